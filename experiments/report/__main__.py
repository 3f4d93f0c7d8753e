"""`python -m experiments.report FOLDER` writes the report of a folder of results."""

import sys

import tyro

from experiments.report import page

if __name__ == "__main__":
    sys.exit(tyro.cli(page.main, description=page.__doc__))
