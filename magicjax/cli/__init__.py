"""The command `magicjax` and its subcommands."""
