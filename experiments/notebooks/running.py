"""Runs notebooks and removes what differs between runs before they are stored.

Each notebook runs in its own kernel, started in the notebook's folder as in Jupyter. The first cell
finds the clone that contains the notebook, so a copy of the repository runs its own code.
"""

import logging
import os
import pathlib
from collections.abc import Sequence

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = pathlib.Path(__file__).resolve().parent
TIMEOUT = 600  # seconds per cell
UNSTORED = "unstored"  # tag of cells whose output differs between runs, such as times
# Without ipywidgets, an imported package warns about missing progress bars.
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}
KEPT_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def find(names: Sequence[str] = (), folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
    """Returns the notebooks with these names, with or without `.ipynb`; without names, all.

    Raises:
      ValueError: a name is unknown.
    """
    known = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    stems = [name.removesuffix(".ipynb") for name in names] or list(known)
    for name in stems:
        if name not in known:
            raise ValueError(f"there is no notebook {name!r}: choose from {', '.join(known)}")
    return [known[name] for name in stems]


def execute(path: pathlib.Path) -> NotebookNode:
    """Runs a notebook and returns it with its outputs; the file does not change.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised an exception.
      nbclient.exceptions.CellTimeoutError: a cell took more than `TIMEOUT` seconds.
    """
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name=KEPT_METADATA["kernelspec"]["name"],
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=[f"--IPKernelApp.log_level={logging.ERROR}"],
    )
    return client.execute(env=os.environ | QUIET)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Returns a notebook to be stored.

    Without execution counts, metadata except tags, and the outputs of cells tagged `unstored`.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.metadata = nbformat.from_dict(KEPT_METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.outputs = [] if UNSTORED in (tags or ()) else [_stored(o) for o in cell.outputs]
    return notebook


def _stored(output: NotebookNode) -> NotebookNode:
    """Returns an output without its execution count and metadata."""
    output = nbformat.from_dict(output)
    if "execution_count" in output:
        output.execution_count = None
    if "metadata" in output:
        output.metadata = nbformat.from_dict({})
    return output


def problems(notebook: NotebookNode) -> list[str]:
    """Returns the problems of a cleaned notebook, a line each.

    It has no warnings, and contains no path of the machine that it ran on: neither of the clone nor
    of the user's home.
    """
    lines = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                lines.append(f"cell {number} wrote to stderr: {output.text.strip()}")
        text = nbformat.v4.writes(nbformat.v4.new_notebook(cells=[cell]))
        for folder in {str(FOLDER.parent.parent), str(pathlib.Path.home())} - {"/"}:
            if folder in text:
                lines.append(f"cell {number} contains {folder}, a path of one machine")
    return lines
