"""Logs a running experiment to Weights & Biases or TensorBoard.

The folder of results holds the same data. A tracker that fails during the run is therefore switched
off, and the run continues.
"""

import dataclasses
import importlib
import importlib.util
import json
import logging
import numbers
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from experiments.schema import columns
from experiments.schema.fields import ConfigError

logger = logging.getLogger("magicjax.experiments")

# Columns that TensorBoard lists as settings, not results.
SETTINGS = (*columns.SETTINGS, "device")


@dataclasses.dataclass
class Tracker:
    """Logs to all services in use, by name. One that raises is reported and removed."""

    writers: dict[str, Any]

    def cell(self, row: dict[str, Any], step: int) -> None:
        """Logs the columns of a finished cell, without None and ""; `step` must not decrease."""
        values = {key: value for key, value in row.items() if value is not None and value != ""}
        self._log("cell", values, step)

    def close(self, status: str) -> None:
        """Ends the services' runs; `status` other than "ok" marks them as failed."""
        self._log("close", status)
        self.writers.clear()

    def _log(self, method: str, *arguments: Any) -> None:
        for name, writer in list(self.writers.items()):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:  # any error of the service must not end the run
                del self.writers[name]
                logger.error(
                    f"tracking with {name} failed and is switched off; the experiment continues, "
                    f"and its results are in its folder. {type(error).__name__}: {error}"
                )


def check(names: Iterable[str]) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    for name in names:
        package = WRITERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"track={name!r} needs the package {package}, which is not installed: "
                "pip install 'magicjax[tracking]', or omit it"
            )


def open(
    names: Iterable[str],
    experiment_name: str,
    directory: str | os.PathLike,
    config: dict[str, Any],
) -> Tracker:
    """Starts a run in each service and returns the tracker.

    Args:
      names: of `WRITERS`. With WANDB_MODE=offline wandb needs no account; WANDB_PROJECT sets its
        project, by default magicjax.
      experiment_name: of the run.
      directory: folder of the results; TensorBoard writes to `tensorboard/`, wandb to `wandb/`.
      config: the experiment's settings as JSON values.

    Raises:
      ConfigError: see `check`, or a service cannot start.
    """
    unique = dict.fromkeys(names)
    check(unique)
    tracker = Tracker({})
    for name in unique:
        try:
            tracker.writers[name] = WRITERS[name](experiment_name, pathlib.Path(directory), config)
        except Exception as error:  # the services raise their own types
            tracker.close("failed")
            raise ConfigError(
                f"track={name!r} cannot start: {type(error).__name__}: {error}; "
                f"{WRITERS[name].remedy}, or omit it"
            ) from error
    return tracker


class Wandb:
    """A run of Weights & Biases, with a step per cell."""

    package, remedy = "wandb", "run `wandb login`, or set WANDB_MODE=offline"

    def __init__(self, name: str, directory: pathlib.Path, config: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT") or "magicjax",
            name=name,
            dir=str(directory),
            config=config,
        )

    def cell(self, row: dict[str, Any], step: int) -> None:
        self._run.log(row, step=step)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "ok" else 1)


class TensorBoard:
    """TensorBoard event files: a run per cell, listed in the HParams tab."""

    package, remedy = "tensorboardX", "choose a writable folder of results"

    def __init__(self, name: str, directory: pathlib.Path, config: dict[str, Any]):
        module = importlib.import_module("tensorboardX")
        self._writer = module.SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("experiment", name)
        self._writer.add_text(
            "config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```"
        )

    def cell(self, row: dict[str, Any], step: int) -> None:
        # The event format does not accept NumPy scalars.
        plain = {key: float(x) if _is_number(x) else str(x) for key, x in row.items()}
        results = {key: x for key, x in plain.items() if key not in SETTINGS and _is_number(x)}
        settings = {key: x for key, x in plain.items() if key not in results}
        self._writer.add_hparams(settings, results, name=f"{step:04d}", global_step=step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


WRITERS: dict[str, Any] = {"wandb": Wandb, "tensorboard": TensorBoard}
