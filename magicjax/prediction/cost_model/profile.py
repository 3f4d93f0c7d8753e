"""Profiles: files with the measured constants of a device, written by `magicjax calibrate`.

A profile is valid for one device and one version of JAX and magicjax, because other versions may
run other programs.
"""

import dataclasses
import json
import os
import pathlib
import platform
import re
from typing import Any

import jax

from magicjax.files import cache_folder, write_atomically
from magicjax.prediction.cost_model.device import Device, find_device
from magicjax.prediction.cost_model.measured import Steps
from magicjax.version import version


def default_profile() -> pathlib.Path:
    """Returns the default path of this device's profile, for `magicjax calibrate` and `auto`."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind().lower()).strip("-")
    return cache_folder() / f"profile-{name}.json"


def device_of(name: str | os.PathLike) -> Device:
    """Returns the device of a profile, a .json file, or of a preset.

    Raises:
      ValueError, FileNotFoundError: an unknown preset, or an invalid or missing profile.
    """
    if str(name).endswith(".json"):
        return load_profile(name)
    return find_device(str(name))


def provenance() -> dict[str, str]:
    """Returns the device and the versions of JAX and magicjax, for which a profile is valid."""
    return {"device": device_kind(), "jax": jax.__version__, "magicjax": version()}


def device_kind() -> str:
    """Returns the name of this device; for a CPU its model name, which JAX does not report."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = pathlib.Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.M)
    name = match[1] if match else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def save_profile(path: str | os.PathLike, device: Device, measured: Any) -> None:
    """Writes a profile.

    Args:
      path: path of the .json file.
      device: constants and timed steps.
      measured: how they were measured; for information.
    """
    content = {
        "provenance": provenance(),
        "device": dataclasses.asdict(device),
        "measured": measured,
    }
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def load_profile(path: str | os.PathLike) -> Device:
    """Returns the device of a profile.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a profile, or one of another device or version.
    """
    path = pathlib.Path(path)
    remedy = f"measure this device with `magicjax calibrate --target YOUR_TARGET --out {path}`"
    if not path.is_file():
        raise FileNotFoundError(f"the profile {path} does not exist: {remedy}")
    try:
        content = json.loads(path.read_text("utf-8"))
        fields = dict(content["device"])
        steps = tuple(Steps(**step) for step in fields.pop("measured"))
        device, valid_for = Device(**fields, measured=steps), content["provenance"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a valid profile ({error!r}): {remedy}") from error
    if valid_for != provenance():
        raise ValueError(
            f"the profile {path} is for {_in_words(valid_for)}, and this is "
            f"{_in_words(provenance())}: {remedy}"
        )
    return device


def _in_words(run: dict[str, str]) -> str:
    return f"{run.get('device')} (jax {run.get('jax')}, magicjax {run.get('magicjax')})"
