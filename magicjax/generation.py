"""The public calls: `generate` texts at once, or `stream` them round by round."""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from magicjax.decoding import memory, program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.output import Output, log_request, output_of, texts_of
from magicjax.decoding.preparation import prepare
from magicjax.decoding.request import RequestOptions
from magicjax.decoding.rounds import Rounds, Started, decode_texts, run_rounds, run_to_end
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.sampling_params import SamplingParams
from magicjax.suggest import explain_unknown
from magicjax.trees.token_tree import Tree

if TYPE_CHECKING:
    from magicjax.prediction.choosing import Auto, Choice


@explain_unknown
def generate(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    drafter: "Drafter | Auto | Choice | str | None" = None,
    tree: Tree | str | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
) -> Output:
    """Returns the target's continuation of every prompt, and statistics.

    ::

        target = magicjax.load("Qwen/Qwen2.5-0.5B")
        params = magicjax.SamplingParams(temperature=0.7, max_tokens=64)
        output = magicjax.generate(target, ["def add(a, b):"], params, drafter="prompt-lookup")
        print(output.texts[0], output.stats.tau)

    A drafter changes the time only: greedy tokens are those of plain decoding, and sampled tokens
    have the same joint distribution. The text of a row depends on its prompt, its parameters and
    its index in `prompts`, not on the other rows; but if some rows sample, greedy rows run as
    sampled ones with top_k=1, and equal logits can then be resolved differently.

    Args:
      target: a model from `load`.
      prompts: a list of texts, of lists of token ids, or of conversations, whose messages
        `{"role": ..., "content": ...}` the target's chat template renders; one conversation; or
        what the tokenizer returned for a list of texts. Rows may differ in length.
      params: how the tokens of the texts are chosen and where they end; of all rows, or one per
        row. `max_tokens=None` means as many as the target has positions for. With stop strings
        the loop runs 8 rounds at a time.
      drafter: proposes tokens; None for plain decoding, one token per pass. An object, or its text,
        as in commands: "self:streaming:256", "small:PATH", which loads the model in every call,
        "prompt-lookup:4", several joined by " + " as an ensemble. "auto" runs trials of several
        drafters on these prompts and uses the one that is measured to be fastest, or plain decoding
        (see `magicjax.Auto`); the output's `choice` can be passed as a drafter later.
      tree: shape of the proposal in each round, or its text, such as "chain:4" or
        "expansion:2,2,1"; None for chain(4). "auto" chooses the tree for the drafter as
        drafter="auto" does: on these prompts it times chains of at most 8 tokens, or for drafters
        with branches chains and optimal trees of at most 6 levels.
      verifier: the rule that accepts drafted tokens. None for greedy, or above a temperature of 0
        for the rule that is exact for the drafter's draws (mss). naive, the baseline of SpecInfer,
        samples from the target and accepts drafted tokens that agree: its tokens are those of plain
        sampling.
      eos_token_id: ends a row, one id or several; None for those of the target, [] for none.
      pad_token_id: fills `tokens` after the end of a row; None for the target's, else EOS.
      backend: backend of attention and products: "cpu" (native kernels), "xla", or another of
        `pallas_kernels.BACKENDS`; None: cpu on a CPU that has the kernels, else xla.
      mesh: a mesh of `magicjax.make_mesh`; None for one device. Models loaded for the mesh
        (`load(..., mesh=mesh)`) are used in place, others are moved in every call.
      micro_batches: on a mesh with pipeline stages, the number of parts into which the rows of a
        group of devices are split, so that stages work concurrently; it must divide the rows. None
        for the number that minimizes the time of a pass.

    Raises:
      ValueError, TypeError: invalid arguments. All checks run before compilation: an empty or too
        long prompt, tokens outside the vocabulary, a tree without a drafter, a verifier that is not
        exact for the drafter, a drafter that does not match the target, a budget too small for the
        tree, an unknown backend, a mesh that does not divide the models or the rows, a stop string
        or a grammar for a target without tokenizer, KV caches larger than the free memory. The last
        is a `magicjax.decoding.memory.OutOfMemoryError`, as is running out of memory later.
        Later, a text whose logits are NaN, or whose grammar exceeds its limits, is a `TextError`.
    """
    options = RequestOptions(
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        backend=backend,
        mesh=mesh,
        micro_batches=micro_batches,
    )
    return run(target, prompts, params, options)


def run(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Output:
    """Returns the output of `generate`; the options are its keyword arguments."""
    compiled = program_cache.totals()
    started = _start(target, prompts, params, options)
    decoder, state, choice, search_s = started
    log_request(decoder.request)
    texts, calls = texts_of(decoder.request), ()
    state = decoder.start() if state is None else state
    del started  # the loop donates the state
    if choice is None:
        state = run_to_end(decoder, state, texts)
    else:
        state, calls = choice.run(decoder, state, texts)
    return output_of(decoder, state, texts, compiled, calls, choice, search_s)


def _start(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Started:
    """Returns the decoder of a request; with a drafter to choose, after the search."""
    if auto := _chooser(options):
        return auto.start(target, prompts, params, options)
    return Started(Decoder(prepare(target, prompts, params, options)))


def _chooser(options: RequestOptions) -> ModuleType | None:
    """Returns the module that chooses drafters and trees, None unless one is to be chosen.

    It is imported here because it imports the planner, which other requests do not use.
    """
    texts = [x for x in (options.drafter, options.tree) if isinstance(x, str)]
    if "auto" not in texts and isinstance(options.drafter, Drafter | str | None):
        return None
    from magicjax.prediction import choosing

    return choosing if "auto" in texts or choosing.is_choice(options.drafter) else None


@explain_unknown
def stream(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    drafter: "Drafter | Auto | Choice | str | None" = None,
    tree: Tree | str | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
) -> Rounds:
    """Yields a list of each row's `NewTokens` after prefill and after every round.

    The tokens are those of `generate`; a row with a stop string ends with the token that completes
    it. The loop runs in Python, with a host synchronization after each round. The generator's
    return value is the `Output`, which has the log-probabilities; after `send(True)` it returns
    without another round.

    The arguments are those of `generate`. "auto" chooses one drafter and one tree, which do not
    change during the stream.

    Raises:
      ValueError, TypeError: invalid arguments, at the call rather than at the first round.
    """
    options = RequestOptions(
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        backend=backend,
        mesh=mesh,
        micro_batches=micro_batches,
    )
    return run_stream(target, prompts, params, options)


def run_stream(
    target: Model,
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    options: RequestOptions,
) -> Rounds:
    """Returns the rounds of `stream`; the options are its keyword arguments."""
    before = program_cache.totals()
    started = _start(target, prompts, params, options)
    if started.state is None:
        memory.check(started.decoder.request)
    after = program_cache.totals()
    return _rounds(started, (after[0] - before[0], after[1] - before[1]))


def _rounds(started: Started, compiled: tuple[int, float]) -> Rounds:
    """Yields each round's tokens; returns the output.

    Args:
      started: the decoder, perhaps after a search.
      compiled: the number of programs that were compiled so far, and the seconds.
    """
    count, seconds = program_cache.totals()
    decoder, state, choice, search_s = started
    del started  # the first round donates the state
    log_request(decoder.request)
    texts = texts_of(decoder.request)
    state = decoder.start() if state is None else state
    state = yield from run_rounds(
        state, texts, lambda state: decode_texts(decoder, state, texts, 1)
    )
    before = count - compiled[0], seconds - compiled[1]
    return output_of(decoder, state, texts, before, (), choice, search_s)
