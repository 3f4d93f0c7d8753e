from types import SimpleNamespace

import numpy as np
import pytest

import models
from experiments import config, corpus, grid, measure, prompts, synthetic


class Letters:
    """A tokenizer of one token for each letter; 0 ends a text."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_the_stream_is_the_modules_in_order_each_with_an_end():
    modules = [corpus.Module("a.py", "ab"), corpus.Module("b.py", "c")]
    stream = prompts.held_out_stream(Letters(), modules)
    np.testing.assert_array_equal(stream, [97, 98, 0, 99, 0])


def test_prompts_come_from_held_out_modules_only(monkeypatch):
    modules = [corpus.Module(f"{i}.py", chr(200 + i)) for i in range(200)]
    monkeypatch.setattr(corpus, "library", lambda: modules)
    trained_on, held_out = corpus.split(modules)
    stream = set(prompts.held_out_stream(Letters()).tolist()) - {0}
    assert stream == {ord(m.text) for m in held_out}
    assert not stream & {ord(m.text) for m in trained_on}


def test_stretches_are_of_the_asked_length_the_same_each_time_and_apart():
    stream = np.arange(100, dtype=np.int32)
    rows = prompts.cut(stream, count=2, context=60)
    np.testing.assert_array_equal(rows, [np.arange(10, 70), np.arange(30, 90)])
    np.testing.assert_array_equal(rows, prompts.cut(stream, 2, 60))
    many = prompts.cut(stream, 40, 60)
    assert many.shape == (40, 60) and len({tuple(row) for row in many}) == 40


def test_the_rows_are_those_that_repeat_themselves_least():
    candidates = np.arange(6, dtype=np.int32)[:, None]
    loops = np.array([9, 0, 5, 40, 1, 30])  # how much the continuation of each repeats

    def continue_(rows):
        assert rows.shape == (2, 1)
        fresh = 1000 + np.arange(64)
        return np.stack([np.where(np.arange(64) < loops[row[0]] + 8, 7, fresh) for row in rows])

    chosen = prompts.least_repetitive(candidates, 2, continue_)
    np.testing.assert_array_equal(chosen, [[1], [4]])


def test_without_a_choice_nothing_is_generated():
    candidates = np.arange(3, dtype=np.int32)[:, None]
    assert prompts.least_repetitive(candidates, 3, None) is candidates


def test_a_text_that_is_too_short_is_named_with_what_would_fit():
    stream = np.zeros(1000, np.int32)
    with pytest.raises(ValueError) as error:
        prompts.cut(stream, count=4, context=997)
    message = str(error.value)
    assert "4 prompts of context=997 need 1001 tokens" in message and "has 1000" in message
    assert "a context of at most 996" in message
    prompts.cut(stream, 4, 996)


def test_a_target_without_tokenizer_is_an_error():
    with pytest.raises(ValueError, match="no tokenizer"):
        prompts.held_out_stream(SimpleNamespace(tokenizer=None).tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer("experiments/zoo/target")


@pytest.fixture(scope="module")
def stream(tokenizer):
    return prompts.held_out_stream(tokenizer)


@pytest.mark.parametrize("context", [2048, 32768])
def test_the_held_out_text_is_enough_for_rows_of_every_context(context, tokenizer, stream):
    made = prompts.make("held_out", tokenizer, stream, 16, context)
    assert {prompt.tokens.shape for prompt in made} == {(context,)}
    assert len({prompt.tokens.tobytes() for prompt in made}) == 16
    assert {prompt.answer for prompt in made} == {()}


def test_rows_of_a_task_are_the_first_ones_whatever_their_count(tokenizer, stream):
    one, two = (prompts.make("needle", tokenizer, stream, count, 512) for count in (1, 2))
    np.testing.assert_array_equal(one[0].tokens, two[0].tokens)
    assert two[0].answer != two[1].answer


def bench_of(tokenizer):
    bench = measure.Bench()
    bench.model = lambda directory, dtype, mesh: SimpleNamespace(tokenizer=tokenizer)
    return bench


@pytest.mark.parametrize("kind", synthetic.TASKS)
def test_cells_of_a_task_take_its_rows_without_a_choice_and_keep_the_answers(
    kind, tokenizer, stream
):
    shapes = [{"batch": 2, "context": 2048}]
    experiment = config.validate({"prompts": kind, "shapes": shapes, "methods": [{}]}, "test")
    bench, made = bench_of(tokenizer), prompts.make(kind, tokenizer, stream, 2, 2048)
    for cell in grid.groups(experiment)[0]:
        assert (cell.prompts, cell.candidates) == (kind, 1)
        np.testing.assert_array_equal(bench.prompts(cell), [p.tokens for p in made])
        assert bench.answers(cell) == [p.answer for p in made]


def test_grids_of_two_kinds_of_prompts_do_not_share_them(tokenizer):
    bench, rows = bench_of(tokenizer), []
    for kind in ("held_out", "needle"):
        raw = {"prompts": kind, "shapes": [{"batch": 1, "context": 256}]}
        choice = {"candidates": 1} if kind == "held_out" else {}
        cell = grid.groups(config.validate(raw | choice, "test"))[0][0]
        rows.append(bench.prompts(cell))
        assert len(bench.answers(cell)) == (kind == "needle")
    assert (rows[0] != rows[1]).any()
