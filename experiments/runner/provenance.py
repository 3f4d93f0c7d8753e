"""Provenance of a result: code, versions, files and machine, beside its settings."""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from typing import Any

import jax

from experiments import prompts
from experiments.schema.grid import Cell, drafters_fingerprint, fingerprint
from magicjax.prediction import cost_model
from magicjax.version import version


def of(cell: Cell) -> dict[str, str]:
    """Returns what a result depends on beside its settings and the machine."""
    return {
        "jax": jax.__version__,
        "python": ".".join(map(str, sys.version_info[:2])),
        "target": _model_fingerprint(cell.target),
        "model": " ".join(map(_model_fingerprint, cell.models)),
        "drafters and policies": drafters_fingerprint(cell),
        "prompts": _prompts_fingerprint(cell.prompts, cell.prompt_path),
        "code": code(),
    }


def environment(cell: Cell) -> dict[str, Any]:
    """Returns the content of a cell's `env.json`."""
    devices = jax.devices()
    return {
        "made_by": of(cell),
        "device": device_name(),
        "devices": len(devices),
        "processor": cost_model.device_kind(),
        "system": platform.platform(),
        "versions": {"magicjax": version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def device_name() -> str:
    """Returns the name of this machine's device in tables."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu, {os.cpu_count()} cores"
    return device.device_kind


_prompts_fingerprint = functools.cache(prompts.fingerprint)
_model_fingerprint = functools.cache(fingerprint)


@functools.cache
def code() -> str:
    """Returns a hash of the project's source code."""
    root = pathlib.Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("magicjax", "models", "pallas_kernels", "sharding", "experiments"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
