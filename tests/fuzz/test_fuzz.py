"""The fuzzer passes correct code, catches broken rules, and continues a killed run."""

import json
import re
import shlex

import jax.numpy as jnp
import numpy as np
import pytest

from magicjax.verification import verify
from tests.forget import forget_programs
from tests.fuzz import batches, checks, fuzzing, schedules
from tests.fuzz.checks import UNIT, Found
from tests.fuzz.configurations import configuration
from tests.magicjax import oracle
from tests.magicjax.engine.test_schedules import forget

SEED, BATCH, ENGINE = 0, 1, 2  # configurations that compile quickly


@pytest.fixture
def recompiled():
    """Compiles programs for one test only, because a rule is broken in them."""
    forget_programs()
    yield
    forget_programs()


@pytest.mark.slow
def test_a_batch_passes():
    made = configuration(SEED, BATCH)
    found = batches.run_units(made, [0, 1])
    assert found.failures == []
    assert found.rows == 2 * made.rows and found.caches == made.rows and found.tokens > found.rows


@pytest.mark.slow
def test_schedules_pass():
    found = schedules.run_units(configuration(SEED, ENGINE), [0, 1])
    assert found.failures == []
    assert found.schedules == 2 and found.requests >= 10 and found.caches


def repeated(printed: str) -> int:
    """Runs the first command that was printed; returns its exit code."""
    command = re.search(r"^FAILED python -m tests.fuzz (.*)$", printed, re.MULTILINE)[1]
    return fuzzing.main(shlex.split(command))


@pytest.mark.slow
def test_a_verifier_that_accepts_a_node_too_many_is_found_and_repeated(
    monkeypatch, capsys, recompiled
):
    follow = verify._follow_choices

    def too_many(choice, tokens, parents, depth):
        result = follow(choice, tokens, parents, depth)
        return result.replace(accepted=jnp.minimum(result.accepted + 1, depth))

    monkeypatch.setattr(batches, "units", lambda made: 1)
    with monkeypatch.context() as broken:
        broken.setattr(verify, "_follow_choices", too_many)
        assert fuzzing.main(["--configuration", str(BATCH), "--seed", str(SEED)]) == 1
        printed = capsys.readouterr().out
        assert repeated(printed) == 1
        assert capsys.readouterr().out.count("FAILED") == 1
    forget_programs()
    assert repeated(printed) == 0


@pytest.mark.slow
def test_an_engine_that_forgets_the_values_of_a_row_is_found_and_repeated(
    monkeypatch, capsys, recompiled
):
    monkeypatch.setattr(schedules, "units", lambda made: 2)
    with monkeypatch.context() as broken:
        forget(broken, "values")
        assert fuzzing.main(["--configuration", str(ENGINE), "--seed", str(SEED)]) == 1
        printed = capsys.readouterr().out
        assert repeated(printed) == 1


def test_the_checks_of_a_text_pass_the_right_one_and_catch_a_changed_token():
    target, prompt, length = configuration(SEED, BATCH).target(3), [1, 2, 3], 6
    numbers = np.random.default_rng(0).random((checks.MAX_NEW, 2))
    sampler = checks.Sampler(0.7, 3, 0.9, numbers)
    drawn: list[int] = []
    for i in range(length):
        logits = oracle.logits(target, [*prompt, *drawn])[-1:]
        p = checks.warped(logits, sampler.temperature, sampler.top_k, sampler.top_p)
        drawn.append(int(checks._choices(p, numbers[i : i + 1])[0]))
    best = oracle.greedy(target, prompt, length)
    assert checks.greedy(target, prompt, best) == 0
    assert checks.sampled(target, prompt, np.array(drawn), sampler) == 0
    assert checks.possible(target, prompt, np.array(drawn), sampler) == 0
    worst = int(oracle.logits(target, prompt)[-1].argmin())
    for check, row in ((checks.greedy, best), (checks.sampled, drawn), (checks.possible, drawn)):
        wrong = np.array([worst, *row[1:]])
        arguments = () if check is checks.greedy else (sampler,)
        with pytest.raises(AssertionError, match="after 3"):
            check(target, prompt, wrong, *arguments)


@pytest.mark.parametrize(
    ("row", "message"),
    [([1, 2], "ends before 3"), ([1, 9, 2], "after an EOS"), ([1, 2, 3, 4], "limit 3")],
)
def test_a_wrong_end_is_found(row, message):
    checks.end(np.array([1, 2, 3]), 3, [9])
    checks.end(np.array([1, 9]), 3, [9])
    with pytest.raises(AssertionError, match=message):
        checks.end(np.array(row), 3, [9])


def test_a_killed_run_continues_after_half_a_line(monkeypatch, tmp_path, capsys):
    ran, path = [], tmp_path / "fuzz" / "seed-0.jsonl"

    def check(made, case=None):
        ran.append(made.number)
        return Found(rows=2, failures=[(UNIT, "wrong")] if made.number == 1 else [])

    monkeypatch.setattr(fuzzing, "check", check)
    assert not fuzzing.fuzz(SEED, 1, 3, path)
    path.write_text(path.read_text() + '{"configuration": 3, "en')
    assert not fuzzing.fuzz(SEED, 1, 5, path)
    assert ran == [0, 1, 2, 3, 4]
    records = fuzzing.finished(path)
    assert sorted(records) == [0, 1, 2, 3, 4] and records[1]["failures"][0][1] == "wrong"
    assert len(path.read_text().splitlines()) == 6
    assert "--configuration 1 --seed 0 --case 100" in capsys.readouterr().out
    assert fuzzing.fuzz(SEED, 0, None, path) is False
    assert json.loads(path.read_text().splitlines()[0])["rows"] == 2
