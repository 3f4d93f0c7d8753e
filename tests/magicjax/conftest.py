"""Exact rows counted, the command line in this process, and a model directory for it."""

import sys

import pytest

import models
from magicjax.cli import main
from tests.forget import forget_programs
from tests.magicjax import oracle, tiny


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A tiny random model with a byte-level tokenizer, as a Hugging Face directory."""
    import tokenizers
    import transformers

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([tiny.SOURCE * 3], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>")
    module = models.build(tiny.config(vocab_size=len(wrapped), num_layers=1))
    path = tmp_path_factory.mktemp("models") / "tiny"
    models.save_checkpoint(
        path, module, models.init_params(module, 0), eos_token_ids=[0], tokenizer=wrapped
    )
    return path


@pytest.fixture
def tally(record_property):
    """Counts the rows a test compares; the sums stand at the end of pytest's output."""
    counted = oracle.Tally()
    yield counted
    record_property("rows", counted.rows)
    record_property("ties", counted.ties)


@pytest.fixture
def changed(monkeypatch):
    """`monkeypatch` for code of programs: no test uses what is traced or compiled with a change."""
    forget_programs()
    yield monkeypatch
    monkeypatch.undo()
    forget_programs()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `magicjax ARGUMENTS` in this process; returns (exit code, output, errors)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["magicjax", *map(str, arguments)])
        code = 0
        try:
            main.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call
