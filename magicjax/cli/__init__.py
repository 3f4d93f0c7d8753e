"""The command `magicjax` and its subcommands."""

INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT
