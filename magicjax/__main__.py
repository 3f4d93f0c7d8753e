"""`python -m magicjax` runs the command `magicjax`."""

from magicjax.cli.main import main

if __name__ == "__main__":
    main()
