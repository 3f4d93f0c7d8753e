"""Logits processing at every node of a token tree: biases, penalties and tokens that are excluded.

Penalties and excluded words depend on the text so far, so each node of a tree has those of its own
ancestors. As in vLLM, biases come first, then excluded tokens, then the repetition penalty, then
the frequency and presence penalties. The end of the reasoning is forced after the mask of a
grammar.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from magicjax.trees import token_tree
from sharding import collectives
from sharding.collectives import AxisNames

NO_TOKEN = -1
# Of an engine's requests. A word is two sequences: at the beginning of a text, and after a space.
MAX_SEQUENCES, MAX_SEQUENCE = 64, 8
NO_LIMIT = 2**31 - 1


class ThinkingBudget(NamedTuple):
    """How many tokens the reasoning of a text may have.

    Attributes:
      inside: whether the reasoning has begun; else, the first token may begin it.
      limit: the most tokens of the text before its reasoning is ended; NO_LIMIT for none.
      markers: the tokens that begin it, that end it, and that end it besides; NO_TOKEN for none.
    """

    inside: bool = False
    limit: int = NO_LIMIT
    markers: tuple[int, int, int] = (NO_TOKEN, NO_TOKEN, NO_TOKEN)


@struct.dataclass
class LogitsProcessor:
    """What changes the logits of each row.

    Attributes:
      used: bool [B], whether the row has any of the following.
      bias: float32 [B, V], added to the logits; -inf for tokens that are not allowed.
      repetition: float32 [B], divides the positive logits of tokens of the prompt and the text, and
        multiplies negative ones; 1: no penalty.
      frequency: float32 [B], subtracted from a token's logit for each time that the text has it.
      presence: float32 [B], subtracted once if the text has the token.
      min_tokens: int32 [B], new tokens before EOS is allowed.
      in_prompt: bool [B, V], the tokens of the prompt.
      counts: int32 [B, V], how often the text has each token; the pending one is counted.
      sequences: int32 [B, W, L], excluded sequences of tokens, with NO_TOKEN before shorter ones.
      recent: int32 [B, L-1], the newest tokens of the text; NO_TOKEN before the first one.
      thinking: bool [B], whether the text is within its reasoning.
      thinking_limit: int32 [B], the tokens of the text after which the reasoning is ended.
      markers: int32 [B, 3], of `ThinkingBudget`.
    """

    used: Bool[Any, "B"]
    bias: Float[Any, "B V"]
    repetition: Float[Any, "B"]
    frequency: Float[Any, "B"]
    presence: Float[Any, "B"]
    min_tokens: Int[Any, "B"]
    in_prompt: Bool[Any, "B V"]
    counts: Int[Any, "B V"]
    sequences: Int[Any, "B W L"]
    recent: Int[Any, "B M"]
    thinking: Bool[Any, "B"]
    thinking_limit: Int[Any, "B"]
    markers: Int[Any, "B 3"]


def process(
    rows: LogitsProcessor,
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: token_tree.Parents,
    emitted: Int[Array, "B"],
    eos: Int[Array, "B E"],
    axis_names: AxisNames = (),
) -> Float[Array, "B N V"]:
    """Returns the processed logits of all nodes, in their dtype.

    Args:
      rows: before the round; their `counts` and `recent` have the root's token.
      logits: logits of all tokens, or of this device's shard.
      tokens: tokens of the nodes; that of the root is not read.
      parents: [N] or [B, N].
      emitted: new tokens so far, the root's included.
      eos: tokens that end each row; NO_TOKEN for none.
      axis_names: the mesh axes that shard the vocabulary.
    """
    parents = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)

    def processed(logits):
        local_vocab = logits.shape[-1]
        first = collectives.axis_index(axis_names) * local_vocab

        def local_shard(x):
            return collectives.local_slice(x, (), axis_names)[:, None]

        def index(token):  # in this shard of the vocabulary; `local_vocab` is dropped
            token = token - first
            return jnp.where((token >= 0) & (token < local_vocab), token, local_vocab)

        row = jnp.arange(len(tokens))[:, None, None]
        node = jnp.arange(tokens.shape[1])[:, None]
        ancestors = token_tree.ancestor_mask(parents).at[..., 0].set(False)
        depths = token_tree.depths(parents)
        x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) + local_shard(rows.bias)

        excluded = jnp.zeros(x.shape, bool)
        too_short = (emitted[:, None] + depths < rows.min_tokens[:, None])[..., None]
        excluded = excluded.at[row, node, index(eos)[:, None]].max(too_short, mode="drop")
        completed, last = _completed(rows, tokens, parents, depths)
        excluded = excluded.at[row, node, index(last)[:, None]].max(completed, mode="drop")
        masked = jnp.where(excluded, -jnp.inf, x)
        any_allowed = collectives.pmax(masked.max(-1, keepdims=True), axis_names) > -jnp.inf
        x = jnp.where(any_allowed, masked, x)

        counts = jnp.broadcast_to(local_shard(rows.counts), x.shape)
        added = ancestors.astype(counts.dtype)
        counts = counts.at[row, node, index(tokens)[:, None]].add(added, mode="drop")
        repetition, frequency, presence = (
            x[:, None, None] for x in (rows.repetition, rows.frequency, rows.presence)
        )
        repeated = jnp.where(x > 0, x / repetition, x * repetition)
        x = jnp.where(local_shard(rows.in_prompt) | (counts > 0), repeated, x)
        x = x - frequency * counts - presence * (counts > 0)
        return x.astype(logits.dtype)

    return jax.lax.cond(rows.used.any(), processed, lambda logits: logits, logits)


def end_reasoning(
    rows: LogitsProcessor,
    logits: Float[Array, "B N V"],
    tokens: Int[Array, "B N"],
    parents: token_tree.Parents,
    emitted: Int[Array, "B"],
    axis_names: AxisNames = (),
) -> Float[Array, "B N V"]:
    """Returns the logits, in which </think> is the only token where the reasoning has its limit.

    Where </think> is excluded, they are unchanged. The arguments are those of `process`.
    """
    parents = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)

    def ended(logits):
        ancestors = token_tree.ancestor_mask(parents).at[..., 0].set(False)
        after_end = (ancestors & _ends_reasoning(rows, tokens)[:, None]).any(-1)
        too_long = emitted[:, None] + token_tree.depths(parents) >= rows.thinking_limit[:, None]
        first = collectives.axis_index(axis_names) * logits.shape[-1]
        is_end = first + jnp.arange(logits.shape[-1]) == rows.markers[:, 1, None, None]
        only_end = jnp.where(is_end, logits, -jnp.inf)
        has_end = collectives.pmax(only_end.max(-1), axis_names) > -jnp.inf
        must_end = rows.thinking[:, None] & ~after_end & too_long & has_end
        return jnp.where(must_end[..., None], only_end, logits)

    used = (rows.thinking_limit < NO_LIMIT).any()
    return jax.lax.cond(used, ended, lambda logits: logits, logits)


def _ends_reasoning(rows: LogitsProcessor, tokens: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Returns which tokens are markers that end the reasoning."""
    return ((tokens[..., None] == rows.markers[:, None, 1:]) & (tokens[..., None] >= 0)).any(-1)


def _completed(
    rows: LogitsProcessor,
    tokens: Int[Array, "B N"],
    parents: Int[Array, "B N"],
    depths: Int[Array, "B N"],
) -> tuple[Bool[Array, "B N W"], Int[Array, "B W"]]:
    """Returns where the next token may complete an excluded sequence, and that token."""
    before, last = rows.sequences[..., :-1], rows.sequences[..., -1]
    length = before.shape[-1]
    node = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    matches = jnp.broadcast_to((last >= 0)[:, None], (*tokens.shape, last.shape[1]))
    for back in range(length):  # tokens before the next one, newest first
        in_tree = jnp.take_along_axis(tokens, node, 1)
        index = jnp.clip(length - 1 - (back - depths), 0, length - 1)  # the root's is the last one
        token = jnp.where(back < depths, in_tree, jnp.take_along_axis(rows.recent, index, 1))
        expected = before[:, None, :, length - 1 - back]
        matches = matches & ((expected == NO_TOKEN) | (expected == token[..., None]))
        node = jnp.maximum(jnp.take_along_axis(parents, node, 1), 0)
    return matches, last


def with_tokens(
    rows: LogitsProcessor, tokens: Int[Array, "B A"], committed: Int[Array, "B"]
) -> LogitsProcessor:
    """Returns the rows after `committed` more tokens of each."""
    is_new = jnp.arange(tokens.shape[1]) < committed[:, None]
    row = jnp.arange(len(tokens))[:, None]
    counts = rows.counts.at[row, tokens].add(is_new.astype(jnp.int32), mode="drop")
    text = jnp.concatenate([rows.recent, tokens], 1)
    index = committed[:, None] + jnp.arange(rows.recent.shape[1])
    is_first = (rows.recent[:, -1] == NO_TOKEN) & (committed > 0)
    begins = is_first & (tokens[:, 0] == rows.markers[:, 0])
    ends = (is_new & _ends_reasoning(rows, tokens)).any(-1)
    return dataclasses.replace(
        rows,
        counts=counts,
        recent=jnp.take_along_axis(text, index, 1),
        thinking=(rows.thinking | begins) & ~ends,
    )


def rows_of(
    params: Sequence[Any],
    prompts: Sequence[Int[np.ndarray, "T"]],
    sequences: Sequence[Sequence[Sequence[int]]],
    budgets: Sequence[ThinkingBudget],
    vocab_size: int,
    shape: tuple[int, int] | None = None,
) -> LogitsProcessor:
    """Returns the processor of rows before their first new tokens, as numpy arrays.

    Args:
      params: `magicjax.SamplingParams` of the rows.
      prompts: one per row.
      sequences: excluded sequences of tokens of each row.
      budgets: thinking budgets, one per row.
      vocab_size: V.
      shape: (W, L); None: as small as possible.
    """
    if shape is None:
        most = max(map(len, sequences), default=0)
        longest = max((len(tokens) for row in sequences for tokens in row), default=0)
        shape = max(1, most), max(2, longest)
    table = np.full((len(params), *shape), NO_TOKEN, np.int32)
    bias: Any = np.zeros((len(params), vocab_size), np.float32)
    in_prompt = np.zeros(bias.shape, bool)
    for i, (row, prompt, excluded) in enumerate(zip(params, prompts, sequences, strict=True)):
        if row.allowed_token_ids is not None:
            bias[i] = -np.inf
            bias[i, list(row.allowed_token_ids)] = 0
        for token, value in dict(row.logit_bias).items():
            bias[i, token] += value
        if row.repetition_penalty != 1:
            in_prompt[i, prompt] = True
        for j, ids in enumerate(excluded):
            table[i, j, shape[1] - len(ids) :] = ids

    def per_row(name: str, dtype: Any) -> Any:
        return np.array([getattr(row, name) for row in params], dtype)

    return LogitsProcessor(
        used=np.array([row.changes_logits for row in params]),
        bias=bias,
        repetition=per_row("repetition_penalty", np.float32),
        frequency=per_row("frequency_penalty", np.float32),
        presence=per_row("presence_penalty", np.float32),
        min_tokens=per_row("min_tokens", np.int32),
        in_prompt=in_prompt,
        counts=np.zeros(bias.shape, np.int32),
        sequences=table,
        recent=np.full((len(params), shape[1] - 1), NO_TOKEN, np.int32),
        thinking=np.array([budget.inside for budget in budgets]),
        thinking_limit=np.array([budget.limit for budget in budgets], np.int32),
        markers=np.array([budget.markers for budget in budgets], np.int32),
    )
