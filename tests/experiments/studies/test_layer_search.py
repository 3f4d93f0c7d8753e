"""The search for layers, against the loop's own acceptance and by hand."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import magicjax
import models
from experiments.studies import layer_search
from magicjax.drafters import layer_skipping
from tests.magicjax import keywords, tiny

CONTEXT = 30


def test_agreement_is_the_share_of_first_tokens_that_the_loop_accepts(monkeypatch):
    monkeypatch.setattr(layer_search, "NEW", tiny.NEW)
    target, options = tiny.model(), dict(eos_token_id=tiny.NEVER)
    prompt = tiny.prompts(1)[0]
    (text,) = keywords.generate(target, [prompt], max_tokens=tiny.NEW + 1, **options).sequences
    kv = layer_search.read(target, text[None, :-1])

    def agreement(*kept):
        return float(layer_search.agreement(target, text[None], kv, np.array(kept)))

    # Prefill of a beginning of the text writes the token from which the only round drafts.
    rows = [text[: CONTEXT + i] for i in range(tiny.NEW)]
    drafter = magicjax.FullCacheSpeculation(layers="1")
    tree = magicjax.chain(1)
    run = keywords.generate(target, rows, max_tokens=2, drafter=drafter, tree=tree, **options)
    accepted = [row[1] for row in run.stats.histogram_by_request]
    assert agreement(False, True) == pytest.approx(np.mean(accepted))
    assert 0 < np.mean(accepted) < 1
    assert agreement(True, True) == 1


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2, 5), (3, 4, 7, 8, 10)])
def test_layers_are_written_as_the_option_reads_them(layers):
    assert layer_skipping.parse(layer_search.written(layers)) == layers


def test_the_layer_that_costs_least_is_removed_at_each_size():
    worth = {0: 5, 1: 1, 2: 9, 3: 3}
    found = layer_search.eliminate(lambda layers: sum(worth[n] for n in layers), 4, 1)
    assert found == [(0, 2, 3), (0, 2), (2,)]


def test_times_between_sizes_are_interpolated_and_the_fastest_is_marked():
    found = {(0, 1, 2): 0.9, (0, 1): 0.8, (0,): 0.0}
    rows = layer_search.ranked(found, {1: 0.001, 3: 0.003}, magicjax.chain(1))
    assert [row["ms per round"] for row in rows] == pytest.approx([3, 2, 1])
    assert [row["tokens per ms"] for row in rows] == pytest.approx([1.9 / 3, 0.9, 1])
    assert [row["best"] for row in rows] == ["", "", "*"]


def test_stored_sets_are_not_evaluated_again(tmp_path):
    path, evaluated = tmp_path / "agreement.jsonl", []

    def evaluate(layers):
        evaluated.append(layers)
        return len(layers) / 4

    value = layer_search.stored(path, evaluate)
    assert [value((0, 1)), value((0, 1)), value((2,))] == [0.5, 0.5, 0.25]
    path.write_text(path.read_text() + '["0-2"')  # killed while it wrote
    again = layer_search.stored(path, evaluate)
    assert [again((0, 1)), again((0, 1, 2)), again((2,))] == [0.5, 0.75, 0.25]
    assert evaluated == [(0, 1), (2,), (0, 1, 2)]
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == ["0-1", "2", "0-2"]


@pytest.fixture
def command(zoo, monkeypatch):
    """Returns the command for a target of three layers."""
    monkeypatch.setattr(layer_search, "CONTEXT", 64)
    monkeypatch.setattr(layer_search, "NEW", 16)
    shallow = magicjax.load(str(zoo / "target"), "float32")
    shape = tiny.config(num_layers=3, vocab_size=shallow.config.vocab_size, max_positions=256)
    params = models.init_params(models.build(shape), 0)
    module = models.build(shape, jnp.float32)
    eos = shallow.eos_token_ids
    models.save_checkpoint(
        zoo / "deep", module, params, eos_token_ids=eos, tokenizer=shallow.tokenizer
    )
    options = ["--target", str(zoo / "deep"), "--dtype", "float32", "--prompts", "stdlib"]
    return [*options, "--out", str(zoo / "search")]


@pytest.mark.slow
def test_the_command_prints_the_drafter_and_resumes(command, monkeypatch, capsys):
    assert layer_search.main(command) == 0
    first = capsys.readouterr().out
    assert "self:full:layers=" in first and first.count("| * ") == 1
    monkeypatch.setattr(layer_search, "agreement", None)
    assert layer_search.main([*command, "--depth", "2", "--drafter", "self:streaming:32"]) == 0
    assert "self:streaming:32:layers=" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smallest", "3"], "smallest=3 must be from 1 to 2"),
        (["--drafter", "prompt-lookup"], "'layers' is not an option of prompt-lookup"),
    ],
)
def test_wrong_options_are_refused(command, options, message, capsys):
    with pytest.raises(SystemExit):
        layer_search.main([*command, *options])
    assert message in capsys.readouterr().err
