"""Prompts are shared by the cells of a group, and only by them."""

import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

import magicjax
import models
from experiments import prompts
from experiments.runner import measure, workload
from experiments.schema import config, grid, method
from tests.experiments.conftest import ScriptedBench
from tests.magicjax import tiny

TARGET = pathlib.Path("experiments/zoo/target")


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(TARGET)


@pytest.fixture
def mine(tokenizer, tmp_path):
    made = workload.Bench(tmp_path)
    shape = SimpleNamespace(vocab_size=300)
    made.model = lambda *which, **options: SimpleNamespace(tokenizer=tokenizer, config=shape)
    return made


def cells(**settings):
    return grid.groups(config.Experiment(methods=[method.Method()], **settings))[0]


@pytest.mark.parametrize("kind", ["needle", "variable_tracking", "common_words"])
def test_cells_of_a_task_have_its_rows_and_answers(kind, tokenizer, mine):
    made = prompts.make(kind, tokenizer, "", 2, 2048, 3)
    for cell in cells(prompts=kind, batch=2, context=2048, prompt_seed=3):
        assert (cell.prompts, cell.candidates) == (kind, 1)
        np.testing.assert_array_equal(mine.prompts(cell), [p.tokens for p in made])
        assert [task.answer for task in mine.tasks(cell)] == [p.answer for p in made]


def test_tasks_are_chosen_with_their_prompts(mine, tokenizer, monkeypatch):
    target = SimpleNamespace(tokenizer=tokenizer, eos_token_ids=(7,))
    mine.model = lambda *which, **options: target
    ends = {0: 3, 1: 16, 2: 16, 3: 5}  # where the answer of each candidate ends
    made = prompts.make("chat", tokenizer, "", 4, 600)
    number = {prompt.tokens.tobytes(): i for i, prompt in enumerate(made)}

    def run(cell, rows):
        assert rows.shape == (1, 600)  # batch by batch
        row = np.arange(100, 116)
        row[ends[number[rows[0].tobytes()]] :] = 7
        stats = SimpleNamespace(compile_s=0.5)
        return SimpleNamespace(tokens=row[None], stats=stats)

    monkeypatch.setattr(mine, "run", run)
    (drafted,) = cells(prompts="chat", context=600, requests=2, candidates=2)
    for cell in (grid.plain_of(drafted), drafted):
        assert [task.source for task in mine.tasks(cell)] == [made[1].source, made[2].source]
        first, second = mine.batches(cell)
        np.testing.assert_array_equal(first, made[1].tokens[None])
        np.testing.assert_array_equal(second, made[2].tokens[None])
    assert mine.choosing_s == 2.0  # once for the group


def test_chosen_prompts_are_kept_until_the_text_changes(mine, tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    chosen = []

    def choose(candidates, count, continue_, end_tokens):
        chosen.append(len(candidates))
        return np.arange(count)

    monkeypatch.setattr(workload.prompts, "least_repetitive", choose)
    for word in ("one", "two"):
        path.write_text("".join(f"{i} {word} {i * i}\n" for i in range(900)))
        asked = dict(prompts="files", prompt_path=str(path), context=64, batch=2)
        for cell in cells(**asked):
            again = workload.Bench(mine.chosen)
            again.model = mine.model
            assert again.prompts(cell).shape == (2, 64)
    assert chosen == [8, 8]  # once for the cells of each text


SAMPLING = {"temperature": 1.0, "seed": 3}


# The caches of all cells have the same size, or (46 tokens) differ.
@pytest.mark.slow
@pytest.mark.parametrize(
    "context, sampling", [(62, {}), pytest.param(46, SAMPLING, marks=pytest.mark.slow)]
)
def test_interleaved_runs_equal_separate_calls(context, sampling, monkeypatch):
    bench = workload.Bench()
    monkeypatch.setattr(bench, "model", lambda *arguments, **options: tiny.model())
    rows = np.random.default_rng(0).integers(tiny.VOCAB, size=(2, context)).astype(np.int32)
    monkeypatch.setattr(bench, "prompts", lambda cell: rows)
    methods = [method.Method(drafter="self:snapkv:32", tree="chain:3")]
    experiment = config.Experiment(
        methods=methods, batch=2, context=context, new_tokens=16, **sampling
    )
    (cell,) = grid.groups(experiment)[0]
    group = [grid.plain_of(cell), cell]
    separate = [bench.run(cell) for cell in group]
    prefills = []
    create = workload.PrefilledPrompts.create
    monkeypatch.setattr(
        workload.PrefilledPrompts, "create", lambda *a: prefills.append(1) or create(*a)
    )
    runs = bench.runs(group, rows)
    for cell, expected in 2 * list(zip(group, separate, strict=True)):
        output = runs.run(cell)
        np.testing.assert_array_equal(output.tokens, expected.tokens)
        assert output.stats.histogram == expected.stats.histogram
        assert output.stats.compilations == 0
    assert len(prefills) == (context == 62)
    rounds = max(sum(histogram) for histogram in separate[1].stats.histogram_by_request)
    assert runs.trace(group[1], None).rounds == rounds


def test_only_the_first_batch_of_prompts_has_a_run_that_is_not_timed(monkeypatch):
    target = magicjax.Model(models.build(tiny.config(), "float32"), None)
    bench, outputs, merged = ScriptedBench(target), [], []
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda cell: outputs.append(run(cell)) or outputs[-1])
    monkeypatch.setattr(bench, "prompts", lambda cell: np.arange(3 * cell.context).reshape(3, -1))
    monkeypatch.setattr(measure.bandwidth, "read_bandwidth", lambda: 2e10)
    monkeypatch.setattr(measure, "merge", lambda parts: merged.append(parts) or parts[0])
    shape = dict(batch=1, requests=3, repeats=2, context=8, new_tokens=16)
    (cell,) = cells(**shape, prompts="random", agreement_tokens=0, phases=False)
    measure.measure(bench, cell)
    assert bench.ran == [grid.plain_of(cell), cell] * (3 + 2 + 2)
    first, second, third = outputs[:6:2], outputs[6:10:2], outputs[10::2]
    # The first timed run of the others stands for the run that is not timed, too.
    expected = [(first[0], second[0], third[0])]
    expected += zip(first[1:], second, third, strict=True)
    assert [[*map(id, parts)] for parts in merged[:3]] == [[*map(id, x)] for x in expected]


@pytest.mark.slow
def test_batches_of_a_sampled_cell_draw_different_numbers(monkeypatch):
    bench = workload.Bench()
    monkeypatch.setattr(bench, "model", lambda *arguments, **options: tiny.model())
    rows = np.tile(np.arange(14, dtype=np.int32), (3, 1))
    monkeypatch.setattr(bench, "prompts", lambda cell: rows)
    (cell,) = grid.groups(
        config.Experiment(
            context=14,
            new_tokens=16,
            requests=3,
            repeats=1,
            temperature=1.0,
            agreement_tokens=0,
            phases=False,
            prompts="random",
        )
    )[0]
    metrics, requests = measure.measure(bench, cell)
    assert len({tuple(request["tokens"]) for request in requests}) == 3
    assert len({request["tpot_ms"] for request in requests}) == 3  # each batch has its own time
    for run in (*metrics["runs"], *metrics["plain_runs"]):
        assert len(run["decode_s_by_batch"]) == 3
        assert sum(run["decode_s_by_batch"]) == pytest.approx(run["decode_s"])
    assert metrics["row"]["exact_match"] == 1
