"""Profiles: the constants of the device at hand as `magicjax calibrate` measured them, in a file.

A profile is refused on another device, or under another version of JAX or magicjax, which may run
other programs: a plan would look measured, and not be.
"""

import dataclasses
import json
import os
import pathlib
import platform
import re
from typing import Any

import jax

from magicjax.cost_model.device import Device, find_device
from magicjax.cost_model.measured import Steps
from magicjax.version import version


def default_profile() -> pathlib.Path:
    """Returns where `magicjax calibrate` writes the profile of this device, and `auto` looks."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind().lower()).strip("-")
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "magicjax" / f"profile-{name}.json"


def device_of(name: str | os.PathLike) -> Device:
    """Returns the device of a profile, a .json file, or the preset of that name.

    Raises:
      ValueError, FileNotFoundError: neither, or a profile of another device.
    """
    if str(name).endswith(".json"):
        return load_profile(name)
    return find_device(str(name))


def this_device() -> Device:
    """Returns the device of the profile where calibrate writes it; raises as `load_profile`."""
    return load_profile(default_profile())


def surroundings() -> dict[str, str]:
    """Returns what a profile is valid for: the device, and the versions of JAX and of magicjax."""
    return {
        "device": device_kind(),
        "jax": jax.__version__,
        "magicjax": version(),
    }


def device_kind() -> str:
    """Returns the name of the device at hand; of a CPU its own, as JAX calls them all alike."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def save_profile(path: str | os.PathLike, device: Device, measured: Any) -> None:
    """Writes a profile, whole or not at all.

    Args:
      path: of the .json file.
      device: the constants, and the steps that were timed.
      measured: how, for readers.
    """
    path = pathlib.Path(path)
    content = {
        "surroundings": surroundings(),
        "device": dataclasses.asdict(device),
        "measured": measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    partial.replace(path)


def load_profile(path: str | os.PathLike) -> Device:
    """Returns the device of a profile.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no profile, or one of another device or version.
    """
    path = pathlib.Path(path)
    renew = f"measure this one with `magicjax calibrate --target YOUR_TARGET --out {path}`"
    if not path.is_file():
        raise FileNotFoundError(f"the profile {path} does not exist: {renew}")
    try:
        content = json.loads(path.read_text("utf-8"))
        given = dict(content["device"])
        steps = tuple(Steps(**each) for each in given.pop("measured"))
        device, valid = Device(**given, measured=steps), content["surroundings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no profile of a device ({error!r}): {renew}") from error
    here = surroundings()
    if valid != here:
        raise ValueError(
            f"the profile {path} was measured on {_words(valid)}, and this is {_words(here)}: "
            f"{renew}"
        )
    return device


def _words(valid: dict[str, str]) -> str:
    return f"{valid.get('device')} (jax {valid.get('jax')}, magicjax {valid.get('magicjax')})"
