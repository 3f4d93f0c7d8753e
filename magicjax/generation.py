"""The public calls: `generate` texts at once, or `stream` them round by round."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from magicjax.decoding import memory, program_cache
from magicjax.decoding.request import Request, make_options, place, validate
from magicjax.decoding.runner import (
    Output,
    Rounds,
    log_request,
    output_of,
    prefill_and_init,
    run_to_end,
    stream_rounds,
)
from magicjax.drafters import Drafter
from magicjax.grammars.grammar import Grammar
from magicjax.model import Model
from magicjax.prediction.autotune import auto
from magicjax.prediction.autotune.auto import Auto, Choice
from magicjax.trees.token_tree import Tree


def generate(
    target: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: Drafter | Auto | Choice | str | None = None,
    tree: Tree | str | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    do_sample: bool = False,
    temperature: float | Sequence[float] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    seed: int | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    logprobs: int | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
) -> Output:
    """Returns the target's continuation of every prompt, and statistics.

    A drafter changes the time only: greedy tokens are those of plain decoding, and sampled tokens
    have the same joint distribution. The text of a row depends on its prompt, its sampling
    parameters, the seed and its index in `prompts`, not on the other rows.

    Args:
      target: a model from `load`.
      prompts: texts, or token ids; rows may differ in length.
      drafter: proposes tokens; None for plain decoding, one token per pass. An object, or its text,
        as in commands: "self:streaming:256", "small:PATH", which loads the model in every call,
        "prompt-lookup:4", several joined by " + " as an ensemble. "auto" runs trials of several
        drafters on these prompts and uses the one that is measured to be fastest, or plain decoding
        (see `magicjax.Auto`); the output's `choice` can be passed as a drafter later.
      tree: shape of the proposal in each round, or its text, such as "chain:4" or
        "expansion:2,2,1"; None for chain(4).
      max_new_tokens: the limit of every row, or one per row.
      do_sample: sample from the target's distribution instead of decoding greedily.
      temperature: divides the logits; None for 1. This and the next two require do_sample, apply to
        target and drafts alike, and take one number or one per row.
      top_k: sample from this many of the most likely tokens; None or 0 for all.
      top_p: of the tokens that top_k keeps, sample from the fewest most likely ones whose
        probabilities sum to top_p; None or 1 for all.
      seed: of the random numbers; the same seed gives the same texts. None for 0.
      verifier: the rule that accepts drafted tokens. None for greedy, or with do_sample for the
        rule that is exact for the drafter's draws (mss). naive, the baseline of SpecInfer, samples
        from the target and accepts drafted tokens that agree: its tokens are those of plain
        sampling.
      eos_token_id: ends a row, one id or several; None for those of the target, [] for none.
      pad_token_id: fills `tokens` after the end of a row; None for the target's, else EOS.
      stop: strings that end a row; its text is cut before the first one. They may span tokens.
        The loop then runs 8 rounds at a time. Requires a tokenizer.
      grammar: what the text must match, a `magicjax.Grammar`, or one or None per row. Tokens that
        it does not allow have probability 0; a text ends with EOS where the grammar allows its end.
        Requires a tokenizer and an EOS token.
      logprobs: return the log-probabilities of the new tokens, and of this many of the most likely
        tokens at their positions, 0 to 20 (`magicjax.LogProbs`); None for none.
      backend: of attention and products: "cpu" (native kernels), "xla", or another of
        `pallas_kernels.BACKENDS`; None: cpu on a CPU that has the kernels, else xla.
      mesh: of devices (`magicjax.make_mesh`); None for one device. Models loaded for the mesh
        (`load(..., mesh=mesh)`) are used in place, others are moved in every call.
      micro_batches: on a mesh with pipeline stages, the number of parts into which the rows of a
        group of devices are split, so that stages work concurrently; it must divide the rows. None
        for the number that minimizes the time of a pass.

    Raises:
      ValueError, TypeError: invalid arguments. All checks run before compilation: an empty or too
        long prompt, tokens outside the vocabulary, a tree without a drafter, a temperature of 0 or
        below, a top_p outside (0, 1], a verifier that is not exact for the drafter, a drafter that
        does not match the target, a budget too small for the tree, an unknown backend, a mesh that
        does not divide the models or the rows, an empty stop string, a grammar for a target without
        tokenizer or EOS, more than 20 logprobs, KV caches larger than the free memory. The last is
        a `magicjax.decoding.memory.OutOfMemoryError`, as is running out of memory later.
    """
    return _generate(**locals())


def stream(
    target: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: Drafter | Auto | Choice | str | None = None,
    tree: Tree | str | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    do_sample: bool = False,
    temperature: float | Sequence[float] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    seed: int | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    logprobs: int | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
) -> Rounds:
    """Yields the new tokens of each row after prefill and after every round.

    The tokens are those of `generate`; a row with a stop string ends with the token that completes
    it. The loop runs in Python, with a host synchronization after each round. The generator's
    return value is the `Output`, which has the log-probabilities; after `send(True)` it returns
    without another round.

    The arguments are those of `generate`. "auto" chooses one drafter and one tree, which do not
    change during the stream.

    Raises:
      ValueError, TypeError: invalid arguments, at the call rather than at the first round.
    """
    return _stream(**locals())


def _generate(target: Model, prompts: Any, drafter: Any, **options: Any) -> Output:
    memory.check_rows(target, prompts, options["mesh"])
    if isinstance(drafter, Auto | Choice) or drafter == "auto":
        return auto.generate(target, prompts, drafter, options)
    request, compiled = _prepare(target, prompts, drafter, options), program_cache.totals()
    log_request(request)
    state, prefill_s = prefill_and_init(request)
    state, decode_s = run_to_end(request, state)
    return output_of(request, state, compiled, prefill_s=prefill_s, decode_s=decode_s)


def _stream(target: Model, prompts: Any, drafter: Any, **options: Any) -> Rounds:
    before = program_cache.totals()
    memory.check_rows(target, prompts, options["mesh"])
    if isinstance(drafter, Auto | Choice) or drafter == "auto":
        prepared: tuple = auto.prepare_stream(target, prompts, drafter=drafter, **options)
    else:
        prepared = _prepare(target, prompts, drafter, options), None, None
        memory.check(prepared[0])
    after = program_cache.totals()
    return _rounds((after[0] - before[0], after[1] - before[1]), *prepared)


def _prepare(target: Model, prompts: Any, drafter: Any, options: dict[str, Any]) -> Request:
    """Returns the validated request on the devices."""
    request_options = make_options(target, drafter, **options)
    request = validate(target, prompts, request_options)
    with memory.explained(request):  # the drafter may make a copy of the target
        return place(request, request_options.mesh, request_options.micro_batches)


def _rounds(
    searched: tuple[int, float],
    request: Request,
    choice: Choice | None = None,
    started: auto.Started | None = None,
):
    """Yields each round's tokens; returns the output.

    `searched` is the number of programs that the choice of a drafter compiled, and the seconds.
    `started` is what `prefill_and_init` returns.
    """
    count, seconds = program_cache.totals()
    compiled = count - searched[0], seconds - searched[1]
    log_request(request)
    state, prefill_s = prefill_and_init(request) if started is None else started
    del started  # the first step donates the state
    state, decode_s = yield from stream_rounds(request, state)
    output = output_of(request, state, compiled, prefill_s=prefill_s, decode_s=decode_s)
    return dataclasses.replace(output, choice=choice)
