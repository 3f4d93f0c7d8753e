"""The version of this package."""

import importlib.metadata


def version() -> str:
    """Returns the installed version, or "0" for a checkout that is not installed."""
    try:
        return importlib.metadata.version("magicjax")
    except importlib.metadata.PackageNotFoundError:
        return "0"
