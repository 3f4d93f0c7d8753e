"""An experiment told to wandb or TensorBoard while it runs, for those who keep their results there.

The folder of results stays the truth: a tracker is told what is written there anyway. So one that
fails while the grid runs is switched off, and the grid goes on.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import json
import logging
import numbers
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

logger = logging.getLogger("magicjax.experiments")

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX"}
EXTRA = "tracking"
# Columns of a row that say what was measured; TensorBoard keeps them apart from what came of it.
SETTINGS = (
    *("method", "target", "draft", "draft_model", "policy", "draw", "verifier", "temperature"),
    *("top_k", "top_p", "seed", "kv_budget", "sinks", "recent", "refresh_every", "kv_dtype"),
    *("sink_positions", "tree", "gamma", "nodes", "dtype", "device", "batch", "context"),
    *("prompts", "new_tokens", "repeat"),
)
TEXTS = (".csv", ".json", ".md", ".txt", ".yaml", ".yml")
LONGEST_TEXT = 200_000  # bytes of a file that TensorBoard is given as text


class TrackingError(ValueError):
    """A tracker that cannot be used; the message names the remedy."""


class Writer(Protocol):
    """One of the services; what it raises is the tracker's matter."""

    def cell(self, row: dict[str, Any], step: int) -> None: ...

    def artifacts(self, paths: Sequence[pathlib.Path]) -> None: ...

    def close(self, status: str) -> None: ...


@dataclasses.dataclass
class Tracker:
    """Tells every service that is switched on; without one it does nothing.

    Attributes:
      writers: the services, by name. One that raises is reported once and dropped.
    """

    writers: dict[str, Writer]

    def cell(self, row: dict[str, Any], step: int) -> None:
        """Tells a finished cell.

        Args:
          row: its columns, as in the summary; those that are None or "" are left out.
          step: its place in the grid; steps must not go back.
        """
        said = {key: value for key, value in row.items() if value is not None and value != ""}
        self._tell(lambda writer: writer.cell(said, step))

    def artifacts(self, paths: Iterable[str | os.PathLike]) -> None:
        """Tells files of results: wandb keeps them, TensorBoard shows pictures and short texts."""
        found = [pathlib.Path(path) for path in paths]
        self._tell(lambda writer: writer.artifacts(found))

    def close(self, status: str) -> None:
        """Ends the services' runs; `status` other than "ok" marks them as failed."""
        self._tell(lambda writer: writer.close(status))
        self.writers.clear()

    def _tell(self, tell: Callable[[Writer], None]) -> None:
        for name, writer in list(self.writers.items()):
            try:
                tell(writer)
            except Exception as error:  # a grid of many hours must not end with its diary
                del self.writers[name]
                logger.error(
                    "tracking by %s failed and is switched off; the experiment goes on, and its "
                    "results are in its folder. %s: %s",
                    name,
                    type(error).__name__,
                    error,
                )


def check(names: Iterable[str]) -> None:
    """Raises TrackingError for a name that is no tracker, or whose package is not installed."""
    for name in names:
        if name not in PACKAGES:
            nearest = difflib.get_close_matches(name, PACKAGES, 1)
            guess = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise TrackingError(
                f"track={name!r} is no tracker; {guess}(trackers: {', '.join(PACKAGES)})"
            )
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise TrackingError(
                f"track={name!r} needs the package {PACKAGES[name]}, which is not installed: "
                f"pip install 'magicjax[{EXTRA}]', or leave it out"
            )


def open(
    names: Iterable[str],
    experiment_name: str,
    directory: str | os.PathLike,
    config: dict[str, Any],
) -> Tracker:
    """Returns a tracker, its services' runs begun: to be called before the grid starts.

    Args:
      names: `wandb`, `tensorboard`, or none. wandb needs no account with WANDB_MODE=offline;
        WANDB_PROJECT names its project, magicjax if it is not set.
      experiment_name: of the run.
      directory: of the results; TensorBoard's files lie in `tensorboard/`, wandb's in `wandb/`.
      config: the experiment's settings, of values that JSON can say.

    Raises:
      TrackingError: what `check` raises, or a service that cannot start.
    """
    wanted = dict.fromkeys(names)
    check(wanted)
    tracker = Tracker({})
    for name in wanted:
        try:
            tracker.writers[name] = WRITERS[name](experiment_name, pathlib.Path(directory), config)
        except Exception as error:  # another library's: told with the remedy
            tracker.close("failed")
            raise TrackingError(
                f"track={name!r} cannot start: {type(error).__name__}: {error}; {REMEDIES[name]}, "
                "or leave it out"
            ) from error
    return tracker


class Wandb:
    """A run of Weights & Biases: a step for each cell, and all cells as one table at the end."""

    def __init__(self, name: str, directory: pathlib.Path, config: dict[str, Any]):
        self._wandb = importlib.import_module("wandb")
        directory.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._rows: list[dict[str, Any]] = []
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "magicjax",
            name=name,
            dir=str(directory),
            config=config,
        )

    def cell(self, row: dict[str, Any], step: int) -> None:
        self._rows.append(row)
        self._run.log(row, step=step)

    def artifacts(self, paths: Sequence[pathlib.Path]) -> None:
        # Names of artifacts have letters, digits, dashes, dots and underscores only.
        name = re.sub(r"[^\w.-]", "-", self._name, flags=re.ASCII)
        artifact = self._wandb.Artifact(f"{name}-results", type="results")
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            else:
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        columns = list(dict.fromkeys(key for row in self._rows for key in row))
        data = [[row.get(column) for column in columns] for row in self._rows]
        if data:
            table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
            self._run.log({"cells": table})
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "ok" else 1)


class TensorBoard:
    """TensorBoard's event files: a run for each cell, which the HParams tab lists as a table."""

    def __init__(self, name: str, directory: pathlib.Path, config: dict[str, Any]):
        module = importlib.import_module("tensorboardX")
        self._writer = module.SummaryWriter(str(directory / "tensorboard"))
        self._writer.add_text("experiment", name)
        self._writer.add_text("config", _as_code(json.dumps(config, indent=1, default=str)))

    def cell(self, row: dict[str, Any], step: int) -> None:
        # Its protocol knows no numbers of numpy's kinds.
        plain = {key: float(x) if _is_number(x) else str(x) for key, x in row.items()}
        results = {key: x for key, x in plain.items() if key not in SETTINGS and _is_number(x)}
        settings = {key: x for key, x in plain.items() if key not in results}
        self._writer.add_hparams(settings, results, name=f"{step:04d}", global_step=step)
        self._writer.flush()

    def artifacts(self, paths: Sequence[pathlib.Path]) -> None:
        from matplotlib import image

        for path in paths:
            if path.suffix == ".png":
                picture = image.imread(path)[..., :3]
                self._writer.add_image(path.name, picture, dataformats="HWC")
            elif path.suffix in TEXTS and path.stat().st_size <= LONGEST_TEXT:
                text = path.read_text("utf-8")
                self._writer.add_text(path.name, text if path.suffix == ".md" else _as_code(text))
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


def _as_code(text: str) -> str:
    """Returns the text as a block of code in markdown, where every line is indented."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


WRITERS: dict[str, Callable[..., Writer]] = {"wandb": Wandb, "tensorboard": TensorBoard}
REMEDIES = {
    "wandb": "log in by `wandb login`, or set WANDB_MODE=offline",
    "tensorboard": "choose a folder of results that can be written",
}
