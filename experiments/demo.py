"""The demo: python -m experiments.demo [--key value]

Measures `configs/demo.yaml`, or `configs/demo_small.yaml` where memory or disk is too small for its
models; says which and why; prints an answer as it is decoded; ends with the speedups in words.
Every run measures all cells. Further arguments are those of `experiments.launch`.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Sequence

from experiments.runner.steps import Steps

if __name__ == "__main__":  # Ctrl-C during the imports below, which take seconds, exits with 130
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    Steps()("importing JAX")

from experiments import launch
from experiments.report import answer, labels, page, results_folder
from experiments.runner import launchers, workload
from experiments.schema import config
from experiments.schema.fields import ConfigError
from magicjax.downloads import DOWNLOADS
from magicjax.files import cache_folder
from magicjax.parallel import offloading

PROG = "python -m experiments.demo"
CONFIGS = pathlib.Path(__file__).parent / "configs"
COPIES = 2  # of a download on the disk: the client keeps one


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of the demo.

    Attributes:
      config: the file of the experiment.
      models: names of the models to download, the target first.
      memory_gb: free memory that it needs, a third more than the peak of a run on two cores.
    """

    config: str
    models: tuple[str, ...]
    memory_gb: float

    @property
    def download_gb(self) -> float:
        """Gigabytes of the models that are not on the disk yet."""
        downloads = [DOWNLOADS[name] for name in self.models]
        missing = [download for download in downloads if not download.directory.is_dir()]
        return sum(download.size_mb for download in missing) / 1e3


LARGE = Size("demo.yaml", ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"), 4.0)
SMALL = Size("demo_small.yaml", ("smollm2",), 2.0)


def choose(memory_gb: float | None, disk_gb: float) -> tuple[Size, str]:
    """Returns the size of the demo for a machine, and the reason in words.

    Args:
      memory_gb: free memory; None if it is unknown.
      disk_gb: free on the disk of the models.
    """
    disk_needed_gb = COPIES * LARGE.download_gb
    needs = f"needs {LARGE.memory_gb:.1f} GB of memory"
    if disk_needed_gb:
        needs += f" and {disk_needed_gb:.1f} GB of disk to download"
    memory = "an unknown amount" if memory_gb is None else f"{memory_gb:.1f} GB"
    free = f"{memory} of memory and {disk_gb:.1f} GB of disk are free"
    if (memory_gb is None or memory_gb >= LARGE.memory_gb) and disk_gb >= disk_needed_gb:
        return LARGE, f"{LARGE.models[0]}, which {needs}: {free}"
    return SMALL, f"{SMALL.models[0]}, because {LARGE.models[0]} {needs}: {free}"


def free_disk_gb() -> float:
    """Returns the free gigabytes of the disk that models are downloaded to."""
    folder = cache_folder().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free / 1e9


def summary(directory: pathlib.Path) -> list[str]:
    """Returns the result of each group of cells in words."""
    rows = answer.with_intervals(results_folder.read(directory).cells)
    lines = []
    for comparison in answer.answers(rows):
        if comparison.best is None or not comparison.timed:
            result = "no method has a result"
        elif comparison.best["speedup"] > 1:
            times = labels.with_interval(comparison.best, "speedup")
            doubt = ", undecided, because the interval contains 1" * comparison.unclear
            result = f"{times} times faster, same text{doubt} ({comparison.best['method']})"
        else:
            result = "no method is faster"
        lines.append(f"{labels.describe(comparison.group)}: {result}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status, which is that of the launcher."""
    return launch.reported(lambda: _main(arguments))


def _main(arguments: Sequence[str]) -> int:
    steps = Steps()
    memory = offloading.free_host_memory()
    size, reason = choose(None if memory is None else memory / 1e9, free_disk_gb())
    steps(f"model: {reason}")
    download = f"downloading {1e3 * size.download_gb:,.0f} MB, " if size.download_gb else ""
    steps(f"{download}checking models and settings")
    words = [os.path.relpath(CONFIGS / size.config), "--fresh", *arguments]
    experiment = config.from_command_line(words, PROG)
    if experiment.launcher != "in_process":
        raise ConfigError(
            f"launcher={experiment.launcher}: the demo runs in one process; omit it, or run "
            f"{launch.PROG} {words[0]}"
        )
    bench = functools.partial(workload.Bench, steps=steps, streams=True)
    status = launch.run_experiment(experiment, launchers.InProcess(bench))
    if status not in (0, 1):
        return status
    if not experiment.dry_run:
        directory = pathlib.Path(experiment.results) / experiment.name
        print("\n".join([*summary(directory), f"open {directory / page.PAGE}"]))
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launch.end(main(sys.argv[1:]))
