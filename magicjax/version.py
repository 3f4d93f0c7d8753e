"""The version of this package."""

import importlib.metadata


def version() -> str:
    """Returns the version that is installed; "0" of a checkout that is run without installation."""
    try:
        return importlib.metadata.version("magicjax")
    except importlib.metadata.PackageNotFoundError:
        return "0"
