"""The quality of each policy when its compressed cache decodes alone, beside its acceptance.

    python -m experiments.studies.policies_alone [--policies snapkv h2o ... --budgets 128 512]

Alone, a compressed cache is lossy: the target never verifies. As in kvpress, the cache is
compressed once, after the prompt, and new tokens stay in it. Measured on the same cache:

- perplexity of the next tokens of texts;
- needle accuracy: the share of answers that a greedy text contains;
- acceptance rate: of drafts with the cache in lossless decoding of the same prompts.
"""

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

import magicjax
from experiments import prompts
from experiments.prompts import Prompt
from magicjax import policies
from magicjax.benchmarks.tables import record_table
from magicjax.cli.options import check_context
from magicjax.decoding import runner
from magicjax.decoding.preparation import prepare
from magicjax.decoding.request import Request, RequestOptions
from magicjax.drafters import Drafter, FullCacheSpeculation, SelfSpeculation
from magicjax.files import write_atomically
from magicjax.kv_cache.attend import AttendTo
from magicjax.model import DTYPES, Model
from magicjax.options import token_count

FULL = "full"
TREE = magicjax.chain(3)


@functools.partial(jax.jit, static_argnums=4)
def log_probs(
    target: Model, cache: Any, tokens: Int[Array, "B T"], first: Int[Array, "B"], backend: str
) -> Float[Array, "B T-1"]:
    """Returns the log-probabilities of all but the first token, with a cache of what precedes.

    Args:
      target: the model.
      cache: of the text before the tokens, full or compressed.
      tokens: the text goes on with these.
      first: position of the first token of each row.
      backend: of the attention.
    """
    steps = jnp.arange(tokens.shape[1])
    positions = first[:, None] + steps
    attend = AttendTo(cache, steps <= steps[:, None], backend, positions=positions)
    logits = target.unembed(target(tokens, positions, attend)[0])[:, :-1].astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, -1)


def request_of(target: Model, drafter: Drafter, tree: Any, prompt: np.ndarray, new: int) -> Request:
    """Returns a request that decodes one prompt greedily, without EOS."""
    params = magicjax.SamplingParams(max_tokens=new)
    options = RequestOptions(drafter=drafter, tree=tree, eos_token_id=[])
    return prepare(target, [prompt], params, options)


def perplexity(target: Model, drafter: Drafter, texts: Sequence[np.ndarray], scored: int) -> float:
    """Returns the perplexity of the last `scored` tokens of texts, with a cache of the others."""
    found = []
    for text in texts:
        # One token more than is scored: the first one's logits are those of prefill.
        request = request_of(target, drafter, TREE, text[: -scored - 1], 8)
        state, _ = runner.prefill_and_init(request)
        cache = drafter.draft_cache(state.drafter, state.cache)  # type: ignore[attr-defined]
        tokens, backend = jnp.asarray(text[None, -scored - 1 :]), request.settings.backend
        found.append(log_probs(request.target, cache, tokens, state.cache.lengths, backend))
    return float(np.exp(-np.mean(jax.device_get(found))))


def answers(target: Model, drafter: Drafter, asked: Sequence[Prompt], new: int) -> float:
    """Returns the mean score of greedy texts of `new` tokens that a cache decodes alone."""
    chain, scores = magicjax.chain(new - 1), []
    for prompt in asked:
        request = request_of(target, drafter, chain, prompt.tokens, new)
        state, _ = runner.prefill_and_init(request)
        tokens = drafted(request.settings, request.target, request.drafter, state)
        scores.append(prompts.score(prompt, target.tokenizer.decode(tokens[0])))
    return float(np.mean(scores))


@functools.partial(jax.jit, static_argnums=0)
def drafted(settings: Any, target: Model, drafter: Any, state: Any) -> Int[Array, "B T"]:
    """Returns the first token of each row and those that the drafter proposes after it."""
    root = state.pending, state.cache, None
    return drafter.propose(target, state.drafter, *root, settings)[0].tokens


def acceptance(target: Model, drafter: Drafter, rows: Sequence[np.ndarray], new: int) -> float:
    """Returns the acceptance rate of chains of 3 in lossless greedy decoding."""
    params = magicjax.SamplingParams(max_tokens=new)
    runs = [
        magicjax.generate(target, [row], params, drafter=drafter, tree=TREE, eos_token_id=[]).stats
        for row in rows
    ]
    return sum(run.accepted for run in runs) / sum(run.drafted for run in runs)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each policy and budget, after one of the full cache.

    Raises:
      OSError, ValueError: as `magicjax.load`; a policy, a budget or prompts that are not possible.
    """
    check_context(options.target, options.context + options.scored)
    sparse: list[tuple[str, int, Drafter]] = [
        (policy, budget, SelfSpeculation(policy=policy, budget=budget))
        for policy in options.policies
        for budget in options.budgets
    ]
    target = magicjax.load(options.target, options.dtype)
    make = functools.partial(prompts.make, tokenizer=target.tokenizer, path="")
    texts = make(prompts.STDLIB, count=options.texts, context=options.context + options.scored + 1)
    # The text goes on with the answer: a small model misunderstands the task as a message.
    needles = dict(count=options.questions, context=options.context, chat_template=False)
    asked = make(options.needle, **needles)
    rows = []
    for policy, budget, drafter in [(FULL, options.context, FullCacheSpeculation()), *sparse]:
        of_texts = [text.tokens for text in texts]
        beginnings = [text[: options.context] for text in of_texts]
        rows.append(
            {
                "policy": policy,
                "budget": budget,
                "perplexity": perplexity(target, drafter, of_texts, options.scored),
                "needle accuracy": answers(target, drafter, asked, options.new_tokens),
                "acceptance, texts": acceptance(target, drafter, beginnings, options.scored),
                "acceptance, needles": acceptance(
                    target, drafter, [each.tokens for each in asked], options.new_tokens
                ),
            }
        )
        print(record_table(rows[-1:]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.policies_alone",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--target", default="smollm2", help="model directory or GGUF file, or a name of fetch")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--policies", nargs="+", default=[*policies.POLICIES], help="names of policies")
    add("--budgets", nargs="+", type=int, default=[128, 512], help="slots per layer and KV head")
    add("--context", type=token_count, default=4096, help="tokens of a prompt")
    add("--texts", type=int, default=4, help="texts for perplexity")
    add("--scored", type=int, default=128, help="tokens of a text after the prompt")
    add("--needle", default="needle", help="kind of prompts with an answer")
    add("--questions", type=int, default=16, help="prompts with an answer")
    add("--new-tokens", type=int, default=12, help="of an answer")
    add("--out", type=pathlib.Path, help="write the table to this CSV file")
    options = parser.parse_args(arguments)
    if min(options.texts, options.questions) < 1 or min(options.scored, options.new_tokens) < 2:
        parser.error("--texts and --questions must be at least 1, --scored and --new-tokens 2")
    try:
        rows = measure(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(record_table(rows))
    if options.out is not None:
        write_atomically(options.out, pd.DataFrame(rows).to_csv(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
