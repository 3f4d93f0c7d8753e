"""The table of what fits single devices."""

import json

import pytest

from experiments.studies import what_fits
from magicjax.cli import main

LOAD = what_fits.Workload("cpu:16", "llama-3.2-1b", "int8", "prompt-lookup:4", 2, 4096)


def test_a_row_has_the_sizes_that_fit_reports(capsys):
    command = what_fits.command(LOAD)
    arguments = main.parser(command).parse_args(command)
    assert arguments.run(arguments) == 0
    row = what_fits.row(LOAD, json.loads(capsys.readouterr().out))
    assert (row["device"], row["weights"], row["compiled"]) == ("CPU", "int8", "no")
    assert (row["batch"], row["context"], row["usable GB"]) == (2, 4096, 12.9)
    assert 0 < row["GB"] < row["usable GB"]


@pytest.mark.parametrize("load", what_fits.WORKLOADS, ids=str)
def test_every_device_has_a_name(load):
    assert load.device in what_fits.NAMES
