"""The lm-evaluation-harness model: texts and likelihoods are the target's with any drafter."""

import json

import numpy as np
import pytest
import yaml

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'magicjax[lm-eval]'")

from lm_eval.api.instance import Instance

import magicjax
from experiments.lm_eval import adapter
from experiments.lm_eval.adapter import MagicJaxLM, parse_options
from experiments.runner import teacher

SPECULATIVE = dict(drafter="self:streaming:64", tree="chain:3")
TEXT = "def f1(x1):\n    return x1 + 1\n\n\n"


def instances(kind, *all_arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=arguments, idx=i)
        for i, arguments in enumerate(all_arguments)
    ]


@pytest.fixture
def directory(zoo):
    return str(zoo / "target")


def model(directory, **arguments):
    return MagicJaxLM(directory, **dict(dtype="float32", batch_size=2) | arguments)


def test_greedy_texts_equal_plain_decoding_with_any_drafter(directory):
    options = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    contexts = [TEXT * 3, "def", TEXT, ""]
    requests = instances("generate_until", *[(text, options) for text in contexts])
    result = model(directory, **SPECULATIVE).generate_until(requests, disable_tqdm=True)
    target = magicjax.load(directory, dtype="float32")
    prompts = [
        target.tokenizer(text)["input_ids"] or [target.tokenizer.eos_token_id] for text in contexts
    ]
    whole = magicjax.generate(target, prompts, magicjax.SamplingParams(max_tokens=24)).texts
    assert result == [text.split("\n\n")[0] for text in whole]


def test_a_target_may_be_quantized_and_offloaded(directory):
    options = {"until": [], "max_gen_toks": 8}
    requests = instances("generate_until", (TEXT, options))
    scored = instances("loglikelihood", (TEXT, "def"))
    placed = model(directory, weights="int8", offload=True)
    assert placed.target.offload and str(placed.target.weights) == "int8"
    resident = MagicJaxLM(magicjax.load(directory, "float32", weights="int8"), batch_size=2)
    texts, likelihoods = (
        [getattr(lm, name)(asked, disable_tqdm=True) for lm in (placed, resident)]
        for name, asked in (("generate_until", requests), ("loglikelihood", scored))
    )
    assert texts[0] == texts[1]
    assert likelihoods[0][0][0] == pytest.approx(likelihoods[1][0][0], rel=1e-5)
    with pytest.raises(ValueError, match="this one is loaded: pass them to magicjax.load"):
        MagicJaxLM(resident.target, weights="int8")


def logs(lm, ids):
    logits = np.asarray(teacher.logits(lm.target, np.array([ids])), np.float64)[0]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_likelihoods_are_those_of_the_tokens_after_the_context(directory):
    lm = model(directory, **SPECULATIVE)
    requests = [(TEXT, "def f2"), ("def f1", "(x1):\n"), ("", "def"), ("x ", " y")]
    result = lm.loglikelihood(instances("loglikelihood", *requests), disable_tqdm=True)
    for (context, continuation), (log, greedy) in zip(requests, result, strict=True):
        # The harness counts white space at the context's end to the continuation.
        head = lm.tok_encode(context.rstrip()) if context else [lm.prefix_token_id]
        ids = lm.tok_encode(context + continuation)
        ids = ids if context else head + ids
        rows = logs(lm, ids)[len(head) - 1 : -1]
        expected = rows[np.arange(len(rows)), ids[len(head) :]].sum()
        assert log == pytest.approx(expected, rel=1e-5)
        assert greedy == bool((rows.argmax(-1) == ids[len(head) :]).all())


def test_a_long_text_is_scored_in_windows_and_every_token_counts_once(directory):
    lm = model(directory, max_length=32)
    text = TEXT * 6
    ids = lm.tok_encode(text)
    assert len(ids) > 2 * 32
    expected = logs(lm, [lm.prefix_token_id, *ids[:31]])[np.arange(32), ids[:32]].sum()
    done = 32
    while done < len(ids):  # the windows of the harness: as much context as fits
        end = min(done + 32, len(ids))
        window = ids[end - 33 : end]
        rows = logs(lm, window[:-1])
        count = end - done
        expected += rows[-count:][np.arange(count), ids[done:end]].sum()
        done = end
    requests = instances("loglikelihood_rolling", (text,), ("def",))
    result = lm.loglikelihood_rolling(requests, disable_tqdm=True)
    assert result[0] == pytest.approx(expected, rel=1e-5)
    short = lm.tok_encode("def")
    rows = logs(lm, [lm.prefix_token_id, *short])
    assert result[1] == pytest.approx(rows[np.arange(len(short)), short].sum(), rel=1e-5)


def test_a_long_context_is_truncated_with_a_warning(directory, caplog):
    lm = model(directory, max_length=32)
    ids = lm.tok_encode(TEXT * 6)
    options = {"until": [], "max_gen_toks": 8}
    result = lm.generate_until(instances("generate_until", (TEXT * 6, options)), disable_tqdm=True)
    assert (
        result
        == magicjax.generate(lm.target, [ids[-24:]], magicjax.SamplingParams(max_tokens=8)).texts
    )
    assert "truncated the first" in caplog.text
    with pytest.raises(ValueError, match="max_length=32 is too small"):
        lm.generate_until(
            instances("generate_until", ("x", {"max_gen_toks": 32})), disable_tqdm=True
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"until": "\n"}, (("\n",), 99, {})),
        ({"until": ["a", "b"], "max_gen_toks": 5}, (("a", "b"), 5, {})),
        ({"max_new_tokens": 7, "num_beams": 1, "top_k": None}, ((), 7, {})),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, ((), 99, {})),
        ({"do_sample": True, "temperature": 0.0}, ((), 99, {})),
        ({"temperature": 0.7}, ((), 99, {"temperature": 0.7})),
        ({"do_sample": True, "top_k": 4}, ((), 99, {"temperature": 1.0, "top_k": 4})),
    ],
)
def test_task_options_are_converted_to_generate_arguments(options, expected):
    result = parse_options(options, 99)
    stop, limit, sampling = expected
    assert result == magicjax.SamplingParams(stop=stop, max_tokens=limit, **sampling)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"until": "\n"}, dict(stop="\n")),
        ({"until": ["a", "b"], "max_gen_toks": 5}, dict(stop=["a", "b"], max_tokens=5)),
        ({"max_new_tokens": 7, "num_beams": 1, "top_k": None}, dict(max_tokens=7)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0.0}, {}),
        ({"temperature": 0.7}, dict(temperature=0.7)),
        ({"do_sample": True, "top_k": 4}, dict(temperature=1.0, top_k=4)),
    ],
)
def test_task_options_are_converted_to_parameters(options, expected):
    assert parse_options(options, 99) == magicjax.SamplingParams(**{"max_tokens": 99} | expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batch_size="auto"), "batch_size='auto'.*whole number"),
        (dict(device="mps"), "device='mps': JAX uses cpu"),
        (dict(max_length=257), "max_length=257 is out of range: give 1 to 256"),
        (dict(tree="chain:4"), "tree=chain:4 needs a drafter"),
        (dict(drafter="auto"), "drafter=auto depends on timings"),
    ],
)
def test_unsupported_arguments_are_refused(directory, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(directory, **arguments)


def written_task(folder, kind, **more):
    """Writes a task of the harness with two documents; returns its name."""
    documents = [{"text": TEXT, "target": "def f2"}, {"text": "x1 ", "target": "+ 1"}]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = dict(
        task=f"copies_{kind}",
        output_type=kind,
        dataset_path="json",
        dataset_kwargs={"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        test_split="test",
        doc_to_text="{{text}}",
        doc_to_target="{{target}}",
    )
    (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | more))
    return task["task"]


@pytest.mark.slow
def test_the_command_gives_equal_scores_with_and_without_a_drafter(
    directory, tmp_path, monkeypatch
):
    folder = tmp_path / "tasks"
    folder.mkdir()
    options = {"until": ["\n"], "max_gen_toks": 8}
    metric = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    names = [
        written_task(folder, "generate_until", generation_kwargs=options, metric_list=metric),
        written_task(folder, "loglikelihood"),
    ]

    def scores(drafting):
        out = tmp_path / (drafting or "plain")
        command = ["lm_eval", "run", "--model", "magicjax", "--batch_size", "2"]
        command += ["--model_args", f"target={directory},dtype=float32{drafting}"]
        command += ["--tasks", ",".join(names), "--include_path", str(folder)]
        monkeypatch.setattr("sys.argv", [*command, "--output_path", str(out), "--log_samples"])
        adapter.main()
        (results,) = out.rglob("results_*.json")
        samples = [path.read_text() for path in sorted(out.rglob("samples_*generate*.jsonl"))]
        answers = [json.loads(line)["resps"] for line in samples[0].splitlines()]
        return json.loads(results.read_text())["results"], answers

    plain = scores("")
    assert set(plain[0]) == set(names) and plain[0]["copies_loglikelihood"]["perplexity,none"] > 1
    assert scores(",drafter=self:streaming:64,tree=chain:2") == plain
