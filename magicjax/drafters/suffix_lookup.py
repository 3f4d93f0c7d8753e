"""Suffix lookup: drafts the frequent continuations of the newest tokens, in own and other texts."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from magicjax.drafters import text_store
from magicjax.drafters.text_lookup import TextLookup, match_lengths, newest_tokens
from magicjax.drafters.text_store import NO_TOKEN
from magicjax.model import Model
from magicjax.options import option
from magicjax.trees.token_tree import MAX_NODES, NO_NODE, DynamicTree, TokenTree, Tree, TreeShape
from sharding import global_arrays

CANDIDATES = 16  # matches that are continued; a GPU finds at most so many in one kernel
MAX_MATCH = 14  # weights of 4 ** 13, and sums of 16 of them, are exact as int32


@struct.dataclass
class SuffixCandidates:
    """The best matches of each row: longer ones first, then later ones.

    Attributes:
      length: int32 [B, C], of the match; 0: there is none.
      tokens: int32 [B, C, D], what may be drafted of its continuation, then `NO_TOKEN`.
    """

    length: Int[Array, "B C"]
    tokens: Int[Array, "B C D"]


@struct.dataclass
class PathScores:
    """How the candidates share the paths of their first 1 to D tokens.

    Attributes:
      score: int32 [B, C, D], the sum of the weights of the candidates with this path.
      total: int32 [B], the sum of all weights.
      first: int32 [B, C, D], the first candidate with this path.
      rank: int32 [B, C, D], how many siblings of the path's last token come before it: of a higher
        score, or of an equal one and an earlier first candidate.
      exists: bool [B, C, D], whether the candidate is the first one with this path.
    """

    score: Int[Array, "B C D"]
    total: Int[Array, "B"]
    first: Int[Array, "B C D"]
    rank: Int[Array, "B C D"]
    exists: Bool[Array, "B C D"]


@struct.dataclass
class SuffixLookup(TextLookup):
    """Drafts the frequent continuations of the newest tokens, in own and other texts.

    The newest tokens are looked up in the row's text and in a store of other texts: `documents`,
    what `remember` was given, and in an engine the answers of finished requests. A candidate whose
    match is shorter than the longest one by n tokens weighs 4 ** -n. The score of a path is the
    weight of the candidates that begin with it, divided by that of all candidates; it estimates the
    probability of the path. A chain takes the best child at each depth, and a dynamic tree the
    nodes of the highest scores.

    After the texts 1 2 3 4 and 1 2 3 5, and 9 2 6 of the row itself, which ends with 1 2, both 3
    have a match of two tokens and 6 a match of one: the scores are 8/9 for 3, 1/9 for 6, and 4/9
    for each of 3 4 and 3 5.

    Source: SuffixDecoding (arXiv 2411.04975), which counts continuations in suffix trees.

    Attributes:
      max_match: how many of the newest tokens are looked up at most.
      store_tokens: M, the size of the store, in tokens; each text takes one more. The oldest leave
        a full store. 0: the row's own text only.
      documents: a text file, UTF-8, which `for_target` adds to the store as one text.
      max_factor: the depth of a node is at most this factor times the length of a match that
        proposes it.
      min_score: the lowest score of a node.
      store: int32 [M], of `magicjax.drafters.text_store`; None: empty, and made by `for_target`.

    Raises:
      ValueError: an option outside its range, or documents without a store.
      TypeError: an option of another type.
    """

    max_match: int = option(
        8, "most of the newest tokens to look for", positional=True, ge=1, le=MAX_MATCH
    )
    store_tokens: int = option(65_536, "tokens of other texts that are kept; 0: none", ge=0)
    documents: str | None = option(None, "a text file that is looked up too; default: none")
    max_factor: float = option(
        2.0, "depth of a node divided by the length of its match, at most", gt=0
    )
    min_score: float = option(0.1, "lowest estimated probability of a node", ge=0, le=1)
    store: Int[Array, "M"] | None = struct.field(default=None, repr=False)

    def __post_init__(self):
        super().__post_init__()
        if self.documents is not None and not self.store_tokens:
            raise ValueError(f"documents={self.documents!r} with store_tokens=0: omit one of them")

    def check(self, target: Model, tree: Tree, depth: int, context: int) -> None:
        """Raises ValueError for a tree of another kind or size, or texts of another vocabulary."""
        shape = tree.shape
        if isinstance(tree, TokenTree) and shape.width > 1:
            raise ValueError(
                "suffix lookup proposes chains and dynamic trees, and this is another tree: use "
                f"chain:{shape.depth}, or a dynamic tree such as dynamic:16,6,4\n{tree}"
            )
        if isinstance(tree, DynamicTree) and tree.min_prob:
            raise ValueError(
                f"min_prob={tree.min_prob:g}: suffix lookup counts texts instead of computing "
                "probabilities: omit it, and use the drafter's option min_score"
            )
        if shape.depth > self._deepest[-1]:
            raise ValueError(
                f"the tree's depth of {shape.depth} exceeds max_factor={self.max_factor} × "
                f"max_match={self.max_match} = {self._deepest[-1]}: use a tree of at most this "
                "depth, or a larger max_match or max_factor"
            )
        if shape.num_nodes - 1 > CANDIDATES * shape.depth:
            raise ValueError(
                f"the tree has {shape.num_nodes} nodes, and suffix lookup drafts at most "
                f"{CANDIDATES} of each depth: use at most {1 + CANDIDATES * shape.depth} nodes"
            )
        largest = NO_TOKEN if self.store is None else global_arrays.fetch(self.store).max(initial=0)
        if largest >= target.config.vocab_size:
            raise ValueError(
                f"the store has token {largest}, outside the target's vocabulary: remember texts "
                f"of the target's tokenizer, whose ids are 0 to {target.config.vocab_size - 1}"
            )

    @property
    def _deepest(self) -> np.ndarray:
        """The largest depth of a node by the length of its match, int32 [max_match + 1]."""
        depths = self.max_factor * np.arange(self.max_match + 1)
        return np.minimum(depths, MAX_NODES).astype(np.int32)

    def for_target(self, target: Model) -> "SuffixLookup":
        """Returns the drafter with a store that has the documents, and no documents to add.

        Raises:
          ValueError: the documents cannot be read or exceed the store, or the target has no
            tokenizer.
        """
        drafter = self._with_store()
        if self.documents is None:
            return drafter
        tokens = _tokens_of(self.documents, target)
        if len(tokens) >= self.store_tokens:
            raise ValueError(
                f"documents={self.documents!r} has {len(tokens)} tokens, and the store keeps "
                f"{self.store_tokens - 1} of one text: use store_tokens={len(tokens) + 1} or more"
            )
        return dataclasses.replace(drafter.remember(tokens), documents=None)

    def _with_store(self) -> "SuffixLookup":
        """Returns the drafter, with an empty store if it has none."""
        if self.store is not None:
            return self
        store = jnp.asarray(text_store.empty(self.store_tokens))
        return dataclasses.replace(self, store=store)

    @property
    def remembers(self) -> bool:
        return self.store_tokens > 0

    def remember(self, text: Any, prompt: int = 0) -> "SuffixLookup":
        """Returns the drafter with a text in its store, without changing a shape.

        Args:
          text: token ids [T], a prompt and its answer.
          prompt: how many tokens are the prompt's. Only its last `max_match` are stored, which
            answers of similar prompts are looked up by.

        Raises:
          ValueError, TypeError: other numbers than token ids, or another shape.
        """
        if not self.remembers:
            return self
        drafter = self._with_store()
        store: Any = drafter.store
        added = text_store.with_text(
            global_arrays.fetch(store), text[max(0, prompt - self.max_match) :]
        )
        return dataclasses.replace(drafter, store=global_arrays.put(added, store.sharding))

    def continuations(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], tree: Tree
    ) -> tuple[Int[Array, "B N-1"], Int[Array, "B N-1"]]:
        candidates = self._candidates(text, newest, tree.shape.depth)
        return best_nodes(candidates, tree.shape, self.min_score)

    def _candidates(
        self, text: Int[Array, "B S"], newest: Int[Array, "B"], depth: int
    ) -> SuffixCandidates:
        """Returns the best matches in the store and the row's own text, which comes after it.

        A continuation ends with its text in the store. In the row's own text it repeats its period,
        as in prompt lookup.
        """
        assert self.store is not None  # since `for_target`
        rows, stored = text.shape[0], len(self.store)
        row_text = jnp.where(jnp.arange(text.shape[1]) <= newest[:, None], text, NO_TOKEN)
        searched = jnp.concatenate([jnp.broadcast_to(self.store, (rows, stored)), row_text], 1)
        length = match_lengths(searched, newest_tokens(text, newest, self.max_match))
        length = jnp.where(searched == NO_TOKEN, 0, length)
        # Of equal lengths `top_k` takes the first. A sort of integers is slower on a CPU.
        length, flipped = jax.lax.top_k(jnp.flip(length, 1).astype(jnp.float32), CANDIDATES)
        length, start = length.astype(jnp.int32), searched.shape[1] - 1 - flipped
        steps, end = jnp.arange(depth), stored + newest[:, None] + 1
        period = jnp.where(start >= stored, jnp.maximum(end - start, 1), depth)
        index = start[..., None] + steps % period[..., None]
        tokens = jnp.take_along_axis(searched, index.reshape(rows, -1), 1, mode="clip")
        tokens = tokens.reshape(index.shape)
        deepest = jnp.asarray(self._deepest)[length]
        ended = (tokens == NO_TOKEN) | (steps >= deepest[..., None])
        return SuffixCandidates(length, jnp.where(jnp.cumsum(ended, -1) > 0, NO_TOKEN, tokens))


def _tokens_of(path: str, target: Model) -> Int[np.ndarray, "T"]:
    """Returns the tokens of a text file."""
    if target.tokenizer is None:
        raise ValueError(
            f"documents={path!r}: the target {target.name!r} has no tokenizer; give token ids to "
            "SuffixLookup.remember"
        )
    try:
        text = pathlib.Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"documents={path!r} cannot be read: {error}; give a text file in UTF-8"
        ) from error
    ids = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.array(ids, np.int32)


def path_scores(candidates: SuffixCandidates) -> PathScores:
    """Returns the scores of the candidates' paths, as integers: a weight of 1 is 4 ** 13."""
    length, tokens = candidates.length, candidates.tokens
    candidate = jnp.arange(tokens.shape[1])[:, None]
    same = (tokens[:, :, None] == tokens[:, None]) & (tokens != NO_TOKEN)[:, None]
    same = jnp.cumprod(same, -1, dtype=jnp.int32)  # [B, C, C, D], up to each depth
    exponent = MAX_MATCH - 1 - (length[:, :1] - length)
    weight = jnp.where(length > 0, 1 << 2 * exponent, 0)
    score = (same * weight[:, None, :, None]).sum(2)
    first = same.argmax(2).astype(jnp.int32)
    exists = (tokens != NO_TOKEN) & (first == candidate)
    same_parent = jnp.pad(same[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=1)
    other_score, own_score = score[:, None], score[:, :, None]
    before = (other_score > own_score) | (
        (other_score == own_score) & (candidate < first[:, :, None])
    )
    rank = (before & exists[:, None] & (same_parent > 0)).sum(2)
    return PathScores(score, weight.sum(1), first, rank, exists)


def best_nodes(
    candidates: SuffixCandidates, shape: TreeShape, min_score: float
) -> tuple[Int[Array, "B N-1"], Int[Array, "B N-1"]]:
    """Returns the tokens and parents of the N - 1 nodes of the highest scores.

    A node's score is at most its parent's. Among equals `top_k` takes the first, here the
    shallower, so that the nodes are always a tree.

    Args:
      candidates: whose paths are merged.
      shape: bounds of the tree; a node has at most `width` children.
      min_score: the lowest score of a node, as a share of all weights.
    """
    scores, count = path_scores(candidates), candidates.length.shape[1]
    kept = jnp.cumprod(scores.rank < shape.width, -1, dtype=jnp.int32) > 0
    kept &= scores.exists & (scores.score >= min_score * scores.total[:, None, None])
    above = jnp.pad(scores.first[..., :-1], ((0, 0), (0, 0), (1, 0)))

    def by_depth(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(len(x), -1)

    best, chosen = jax.lax.top_k(by_depth(jnp.where(kept, scores.score, 0)), shape.num_nodes - 1)
    depth = jnp.where(best > 0, chosen // count, shape.depth)
    order = jnp.argsort(depth, -1)  # stable: parents first, siblings best first
    depth, chosen = (jnp.take_along_axis(x, order, 1) for x in (depth, chosen))
    tokens, above = (
        jnp.take_along_axis(by_depth(x), chosen, 1) for x in (candidates.tokens, above)
    )
    # The number of each path's node; the first `count` are those of the root.
    exists, rows = depth < shape.depth, jnp.arange(len(tokens))[:, None]
    number = jnp.zeros((len(tokens), count * (1 + shape.depth)), jnp.int32)
    path = jnp.where(exists, count + chosen, number.shape[1])
    nodes = jnp.arange(1, shape.num_nodes, dtype=jnp.int32)
    number = number.at[rows, path].set(nodes, mode="drop")
    parents = jnp.take_along_axis(number, depth * count + above, 1)
    return tokens, jnp.where(exists, parents, NO_NODE)
