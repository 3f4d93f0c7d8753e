"""A conversation: the caches are kept between replies, and a reply prefills only new tokens.

Chat templates may render earlier messages differently in a later turn, and tokenizers may merge the
tokens of an answer. A reply therefore takes the token ids of the whole text. It keeps the caches'
longest common prefix with them and prefills the rest. With the cached tokens 1 2 3 4 5 and the text
1 2 3 9 9 9 it prefills 9 9 9.

Shapes depend on the longest text only, so replies after the first compile nothing.
"""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from magicjax.decoding import memory, program_cache, runner
from magicjax.decoding.request import Request, capacity_of, make_options, place, validate
from magicjax.decoding.runner import Output
from magicjax.decoding.validation import token_ids
from magicjax.kv_cache.full_cache import KVCache
from magicjax.model import Model
from sharding import processes

MAX_CONTEXT = 8192  # default limit: a model's own one can need more memory than the device has
MAX_NEW_TOKENS = 1024
# Tokens of a prefill step, which a short message takes as well. SmolLM2-135M on two CPU cores, in
# steps of 64 and 512: a step takes 0.3 and 1.7 s, a text of 2,048 tokens 9.2 and 6.9 s.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Reply:
    """The result of `Conversation.reply`.

    Attributes:
      output: as of `magicjax.generate` for the whole text, with one row.
      prefilled: tokens that prefill ran, less than the text's by those that were in the cache.
      conversation: for the next reply.
    """

    output: Output
    prefilled: int
    conversation: "Conversation"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The caches of a text of one row, which replies extend.

    A reply donates the caches to its programs, so a conversation replies once; `Reply.conversation`
    replies next. JAX raises an error if a donated cache is used again.

    Attributes:
      request: settings and models of all replies; its tokens are zeros.
      max_context: the most tokens of the text, answers included.
      tokens: int32 [T], the tokens in the target's cache.
      cache: the target's, of one row.
      drafter_state: the drafter's, after the last reply.
    """

    request: Request
    max_context: int
    tokens: Int[np.ndarray, "T"]
    cache: KVCache
    drafter_state: Any

    @classmethod
    def create(
        cls,
        target: Model,
        *,
        max_context: int | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **options: Any,
    ) -> "Conversation":
        """Returns an empty conversation; allocates its caches.

        Args:
          target: a model from `magicjax.load`.
          max_context: the most tokens of the text, answers included; None: the target's positions,
            and at most 8,192. The caches have as many slots, and some for a chunk.
          max_new_tokens: the limit of an answer; the end of the context ends it, too.
          options: the other options of `magicjax.generate`, except drafter="auto".

        Raises:
          ValueError, TypeError: as `magicjax.generate`, caches that do not fit the free memory
            included; max_context exceeds the target's positions; a drafter that would need the
            whole text in every reply (`Drafter.check_conversation`).
        """
        request, max_context = validate_conversation(target, max_context, max_new_tokens, options)
        with memory.explained(request):  # the drafter may make a copy of the target
            request = place(request, options.get("mesh"), options.get("micro_batches"))
        memory.check(request)
        state = runner.state_shapes(request)
        with memory.explained(request):
            cache, drafter_state = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
                (state.cache, state.drafter),
            )
        return cls(request, max_context, np.zeros(0, np.int32), cache, drafter_state)

    def reply(
        self, tokens: Sequence[int] | Int[np.ndarray, "T"]
    ) -> Generator[list[Int[np.ndarray, "N"]], bool | None, Reply]:
        """Yields the new tokens after prefill and after every round, as `magicjax.stream`.

        The tokens are those of `magicjax.generate` for the whole text. The generator's return value
        is the `Reply`; run it to its end, because the conversation's caches are donated. After
        `send(True)` the answer ends without another round.

        Args:
          tokens: of the whole text to continue, earlier answers included.

        Raises:
          ValueError, TypeError: invalid tokens, or a text without room for an answer, at the call
            rather than at the first round; the conversation can still reply.
        """
        (text,) = token_ids(self.request.target, [tokens])
        if len(text) >= self.max_context:
            raise ValueError(
                f"the conversation has {len(text)} tokens with this message, and max_context="
                f"{self.max_context} leaves no room for an answer: shorten the message, or start "
                "a new conversation"
            )
        return self._reply(text)

    def _reply(self, text: Int[np.ndarray, "T"]):
        request, compiled = self._request(text), program_cache.totals()
        runner.log_request(request)
        settings = request.prefill_settings
        same = min(common_prefix(self.tokens, text), len(text) - 1)
        # The queries of a policy's window run again if they are in the cache.
        start = max(0, min(same, len(text) - settings.stats_spec.window))
        kept, first = (_put([n], request.lengths) for n in (same, start))
        cache = dataclasses.replace(self.cache, lengths=first)
        prefilled, prefill_s = runner.extend(request, cache)
        state, resume_s = runner.resume_state(request, *prefilled, self.drafter_state, kept)
        state, decode_s = yield from runner.stream_rounds(request, state)
        output = runner.output_of(
            request, state, compiled, prefill_s=prefill_s + resume_s, decode_s=decode_s
        )
        conversation = dataclasses.replace(
            self,
            tokens=output.sequences[0][:-1],  # the last token is pending
            cache=state.cache,
            drafter_state=state.drafter,
        )
        return Reply(output, len(text) - start, conversation)

    def _request(self, text: Int[np.ndarray, "T"]) -> Request:
        """Returns the request of a text, in the shapes of all texts."""
        request, room = self.request, self.max_context - len(text)
        tokens = np.zeros(request.tokens.shape, np.int32)
        tokens[0, : len(text)] = text
        return dataclasses.replace(
            request,
            prompts=[text],
            tokens=_put(tokens, request.tokens),
            lengths=_put([len(text)], request.lengths),
            limits=_put([min(request.settings.max_new_tokens, room)], request.limits),
        )


def validate_conversation(
    target: Model, max_context: int | None, max_new_tokens: int, options: dict[str, Any]
) -> tuple[Request, int]:
    """Returns (the request of all replies, not placed; max_context), as `Conversation.create`.

    Args:
      target: a model, or a skeleton without parameters.
      max_context, max_new_tokens, options: as for `Conversation.create`.

    Raises:
      ValueError, TypeError: as `Conversation.create`.
    """
    positions = target.config.max_positions
    limit = min(positions, MAX_CONTEXT) if max_context is None else max_context
    if not 2 <= limit <= positions:
        raise ValueError(
            f"max_context={limit}: it must be at least 2 tokens, and at most the {positions} "
            "positions of the target"
        )
    max_new_tokens = min(max_new_tokens, limit - 1)
    longest = np.zeros(limit - max(1, max_new_tokens), np.int32)
    request_options = make_options(target, max_new_tokens=max_new_tokens, **options)
    request = validate(target, [longest], request_options)
    if request.drafter is not None:
        request.drafter.check_conversation()
    capacity = capacity_of(limit, request.settings.shape.depth, CHUNK)
    settings = dataclasses.replace(request.settings, capacity=capacity, chunk=CHUNK)
    tokens = np.zeros((1, capacity), np.int32)
    return dataclasses.replace(request, settings=settings, tokens=tokens), limit


def common_prefix(a: Int[np.ndarray, "T"], b: Int[np.ndarray, "U"]) -> int:
    """Returns the number of equal tokens before the first difference."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if differing.size else length


def _put(values: Any, like: jax.Array) -> jax.Array:
    """Returns int32 values with the sharding of an array."""
    return processes.put(np.array(values, np.int32), like.sharding)
