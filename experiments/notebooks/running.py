"""Running a notebook, and what is stored of it: outputs, but nothing that differs between runs.

A notebook runs in a kernel of its own, which starts in the notebook's folder as Jupyter's does.
Its first cell finds the clone that it lies in, so a copy of the repository runs its own code.
"""

import json
import logging
import os
import pathlib
from collections.abc import Sequence

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = pathlib.Path(__file__).resolve().parent
TIMEOUT = 600  # seconds that a cell may take
UNSTORED = "unstored"  # tag of cells that print what differs between runs, such as times
# Without ipywidgets, a package that is imported on the way warns that it has no progress bars.
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}
KEPT_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def find(names: Sequence[str] = (), folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
    """Returns the notebooks of these names, without `.ipynb` or with it; without names, all.

    Raises:
      ValueError: no notebook has that name.
    """
    known = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    wanted = [name.removesuffix(".ipynb") for name in names] or list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no notebook {name!r}: choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def read(path: pathlib.Path) -> NotebookNode:
    """Returns a notebook as it is stored.

    Raises:
      ValueError: the file is no notebook, or not of version 4.
    """
    text = path.read_text("utf-8")
    try:
        raw = json.loads(text)
        version = raw.get("nbformat") if isinstance(raw, dict) else None
        if version != 4:
            raise ValueError(f"its format is version {version}, and only 4 is read: convert it")
        nbformat.validate(nbformat.from_dict(raw))
    except (ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is no notebook: {error}") from error
    return nbformat.reads(text, as_version=4)


def execute(path: pathlib.Path) -> NotebookNode:
    """Returns the notebook with the outputs of a run of it; the file is left as it is.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised, with the cell and its traceback.
      nbclient.exceptions.CellTimeoutError: a cell took more than `TIMEOUT` seconds.
      ValueError: the file is no notebook.
    """
    notebook = read(path)
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
    """Returns what is stored of a notebook that ran.

    Left out are the numbers of executions, metadata but for tags, and all outputs of cells with
    the tag `unstored`.
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
    """Returns an output without its number and metadata."""
    output = nbformat.from_dict(output)
    if "execution_count" in output:
        output.execution_count = None
    if "metadata" in output:
        output.metadata = nbformat.from_dict({})
    return output


def unfit(notebook: NotebookNode) -> list[str]:
    """Returns what is wrong with a stored notebook, a line each; nothing is run.

    It must be as `cleaned` leaves it, have run (some cell has an output), without warnings, and say
    nothing of the machine that it ran on: no path to the clone or to the user's home.
    """
    wrong = []
    if nbformat.writes(cleaned(notebook)) != nbformat.writes(notebook):
        wrong.append("it has metadata or numbers that differ between runs")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not any(cell.outputs for cell in code):
        wrong.append("it has no outputs")
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                wrong.append(f"cell {number} wrote to stderr: {output.text.strip()}")
        said = nbformat.v4.writes(nbformat.v4.new_notebook(cells=[cell]))
        for place in {str(FOLDER.parent.parent), str(pathlib.Path.home())} - {"/"}:
            if place in said:
                wrong.append(f"cell {number} names {place}, a path of one machine")
    return wrong
