"""`generate`, `stream`, the command and the engine give one text, which continues the prompt's."""

import json
import shutil

import numpy as np
import pytest

import magicjax
import models
from magicjax.loading import abstract_model
from tests.magicjax import keywords, tiny
from tests.magicjax.small_tokenizers import (
    ANSWER,
    ASKED,
    BYTES,
    DEEPSEEK,
    TURN,
    make,
    with_channels,
    with_thinking,
)
from tests.quick import quick

NEW = 12
PROMPTS = ["Hello", "The cat's 12 hats"]
DRAFTED = dict(drafter="prompt-lookup:2", tree="chain:3")
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with a tokenizer like Llama 2's, and a chat template."""
    tokenizer = make("byte-fallback")
    tokenizer.chat_template = TEMPLATE
    module = models.build(tiny.config(vocab_size=len(tokenizer), num_layers=1))
    path, params = tmp_path_factory.mktemp("models") / "spaced", models.init_params(module, 0)
    models.save_checkpoint(path, module, params, eos_token_ids=[2], tokenizer=tokenizer)
    tokenizer.chat_template = None
    return path


@pytest.fixture(scope="module")
def target(directory):
    return magicjax.load(directory, dtype="float32")


def spaced(target) -> list[int]:
    """Returns the tokens that begin with a space."""
    tokens = target.tokenizer.get_vocab().items()
    return sorted(token for text, token in tokens if text.startswith("▁") and len(text) > 1)


def engine_texts(target, params) -> list[str]:
    config = magicjax.EngineConfig(
        slots=2, capacity=64, max_tokens=32, logits_processors=True, grammars=True
    )
    engine = magicjax.Engine(target, **DRAFTED, config=config)
    handles = [engine.submit(prompt, params) for prompt in PROMPTS]
    engine.run()
    texts = [handle.result().text for handle in handles]
    assert ["".join(new.text for new in handle.arrived()) for handle in handles] == texts
    return texts


def test_the_text_begins_with_the_space_of_its_first_token(target, directory, run):
    params = magicjax.SamplingParams(max_tokens=NEW, allowed_token_ids=spaced(target))
    output = magicjax.generate(target, PROMPTS, params, **DRAFTED)
    decode = target.tokenizer.backend_tokenizer.decode
    for prompt, row, text in zip(PROMPTS, output.sequences, output.texts, strict=True):
        assert text.startswith(" ") and prompt + text == decode(row.tolist())
    assert engine_texts(target, params) == output.texts
    bias = spaced(target)[0]
    expected = keywords.generate(target, PROMPTS[:1], max_tokens=3, logit_bias={bias: 100.0})
    code, out, _ = run(
        *("generate", "--target", directory, "--dtype", "float32", "--prompt", PROMPTS[0]),
        *("--max-tokens", 3, "--logit-bias", f"{bias}=100"),
    )
    assert (code, out) == (0, f"{expected.texts[0]}\n") and out.startswith(" ")


@pytest.mark.slow
def test_the_limit_of_tokens_cuts_no_complete_character(target):
    text = "你好🙂"
    for limit in (7, 10):  # within the emoji, and after it
        grammar = magicjax.Grammar.regex(f"{text}x*")
        params = magicjax.SamplingParams(max_tokens=limit, grammar=grammar)
        stopped = magicjax.SamplingParams(max_tokens=limit, grammar=grammar, stop="zzz")
        output = magicjax.generate(target, PROMPTS, [params, stopped], **DRAFTED)
        expected = text.encode()[:limit].decode(errors="replace")
        assert output.texts == [expected] * 2
    assert engine_texts(target, params) == output.texts


def test_the_end_of_a_turn_ends_a_text(target, directory):
    end = target.tokenizer.convert_tokens_to_ids(TURN)
    assert target.eos_token_ids == (2, end)
    output = keywords.generate(target, PROMPTS, max_tokens=4, logit_bias={end: 1000.0})
    assert output.finish_reasons == ["eos"] * 2 and output.texts == [""] * 2
    np.testing.assert_array_equal(output.lengths, [1, 1])


REASONING = {  # the tokenizer, the prompt, what comes before the reasoning, and the answer
    "channels": (with_channels(), ASKED, "<|channel|>analysis<|message|>", ANSWER),
    "thinking": (
        with_thinking("added", DEEPSEEK),
        "hi[assistant]<think>\n",
        "",
        "A greeting. 你\n</think>\n\nHello!",
    ),
}


@pytest.mark.parametrize("kind", quick(REASONING, "thinking"))
def test_the_reasoning_before_the_answer_is_apart(kind, target):
    tokenizer, *made = REASONING[kind]
    asked, header, text = (tokenizer(each)["input_ids"] for each in (*made[:2], f"{made[2]}</s>"))
    model = tiny.reciting([*asked, *text], tokenizer)
    config = magicjax.EngineConfig(slots=1, capacity=128, max_tokens=64, grammars=True)
    engine = magicjax.Engine(model, **DRAFTED, config=config)
    cases = [(64, None, "Hello!", "A greeting. 你"), (len(header) + 1, None, "", "A")]
    cases.append((64, magicjax.Grammar.regex("Hell?o!"), "Hello!", "A greeting. 你"))
    for limit, grammar, *expected in cases:
        params = magicjax.SamplingParams(max_tokens=limit, grammar=grammar)
        output = magicjax.generate(model, [asked], params, **DRAFTED)
        assert [*output.texts, *output.reasoning] == expected
        np.testing.assert_array_equal(*tiny.rows_of(output), text[:limit])
        result = engine.submit(asked, params).result()
        assert [result.text, result.reasoning] == expected
    assert keywords.generate(target, PROMPTS, max_tokens=1).reasoning == ["", ""]


def test_the_eos_of_the_tokenizer_ends_a_text(directory, tmp_path):
    path = shutil.copytree(directory, tmp_path / "x")
    for stored, expected in ((None, (2,)), (1, (1, 2)), ([2, 10**6], (2,))):
        for name in ("config.json", "generation_config.json"):
            raw = json.loads((path / name).read_text()) | {"eos_token_id": stored}
            (path / name).write_text(json.dumps(raw))
        target = magicjax.load(path, dtype="float32")
        end = target.tokenizer.convert_tokens_to_ids(TURN)
        assert target.tokenizer.eos_token_id == 2
        assert target.eos_token_ids == abstract_model(path).eos_token_ids == (*expected, end)


def test_stop_strings_can_be_special_tokens(target):
    letter, other = (target.tokenizer.convert_tokens_to_ids(x) for x in ("a", BYTES[65]))
    begin = target.tokenizer.convert_tokens_to_ids("<s>")
    options = dict(allowed_token_ids=[letter, other, begin], presence_penalty=1000.0, max_tokens=9)
    output = keywords.generate(target, PROMPTS, stop="<s>", eos_token_id=[], **options)
    for row, text in zip(tiny.rows_of(output), output.texts, strict=True):
        assert row[-1] == begin and len(row) <= 3
        assert text == "".join({letter: "a", other: "A"}[token] for token in row[:-1].tolist())
    assert output.finish_reasons == ["stop"] * 2
