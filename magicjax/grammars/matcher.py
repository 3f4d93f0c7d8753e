"""The state of texts under their grammars, on the host: which tokens may follow, at every node."""

import functools
import os
import re
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from magicjax.grammars.grammar import Grammar, library, limits, one_line
from magicjax.grammars.masking import WORD

ALL = np.uint32(2**32 - 1)
# Tokens such as <tool_call>, which are text unless the tokenizer has them as special; llguidance
# takes all added tokens in angle brackets for special ones.
TAG = re.compile(r"</?\w+>")


def check(target: Any, eos: Sequence[int]) -> None:
    """Raises ValueError unless texts of a model can have a grammar.

    Args:
      target: a model.
      eos: the tokens that end a text.
    """
    if target.tokenizer is None:
        raise ValueError(
            f"a grammar requires a tokenizer, and the target {target.name!r} has none: load one "
            "with a tokenizer"
        )
    if not any(0 <= token < target.config.vocab_size for token in eos):
        raise ValueError(
            f"a grammar ends a text with EOS, and the target {target.name!r} has no EOS token: "
            "pass eos_token_id"
        )


class Matcher:
    """One text under a grammar."""

    def __init__(
        self, target: Any, grammar: Grammar, eos: Sequence[int], stop_token_ids: Sequence[int] = ()
    ):
        """Starts an empty text.

        Args:
          target: a model.
          grammar: the grammar that the text follows.
          eos: the tokens that end it, which are allowed where the grammar allows the end alone.
          stop_token_ids: others that end it, which are also allowed where they are its text.

        Raises:
          ValueError: a model without tokenizer or EOS, or a grammar that is not supported.
        """
        check(target, eos)
        size = target.config.vocab_size
        self._eos, stops = (
            np.array([token for token in tokens if 0 <= token < size], int)
            for tokens in (eos, stop_token_ids)
        )
        self._ends = frozenset([*self._eos.tolist(), *stops.tolist()])
        self._all_ends = np.array(sorted(self._ends))
        tokenizer = tokenizer_of(target.tokenizer, int(self._eos[0]), size)
        self._width = words(tokenizer.vocab_size)  # more than W with tokens beyond the embedding
        self._matcher = library().LLMatcher(tokenizer, grammar.text, log_level=0, limits=limits())
        if self.error:
            raise ValueError(f"the grammar is not supported: {self.error}")

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any more, such as too many states; "" if it can."""
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def push(self, tokens: Sequence[int]) -> None:
        """Adds new tokens of the text; one that ends it is the last."""
        last = tokens[-1] if tokens else None
        if last in self._ends:
            tokens = tokens[:-1]
        if tokens:
            self._matcher.consume_tokens(tokens)
        if last is not None and last in self._eos and not self._matcher.is_accepting():
            self._matcher.compute_bitmask()  # has the error that made EOS the only choice

    def fill(self, allowed: UInt32[np.ndarray, "W"]) -> None:
        """Writes the mask of the next token."""
        self._fill(self._matcher, allowed)

    def _fill(self, matcher: Any, allowed: UInt32[np.ndarray, "W"]) -> None:
        mask = np.empty(self._width, np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed[:] = mask[: len(allowed)]
        if matcher.is_accepting():
            np.bitwise_or.at(allowed, self._all_ends // WORD, _bits(self._all_ends))
        elif not matcher.is_error():  # then EOS alone is allowed
            np.bitwise_and.at(allowed, self._eos // WORD, ~_bits(self._eos))

    def forced(self) -> list[int]:
        """Returns the tokens of the text that the grammar forces next."""
        if not self._matcher.compute_ff_bytes():  # also prepares what follows
            return []
        return self._matcher.compute_ff_tokens()

    def fill_tree(
        self,
        tokens: Sequence[int],
        children: Sequence[Sequence[int]],
        allowed: UInt32[np.ndarray, "N W"],
    ) -> None:
        """Writes the masks of a tree whose root is the last token of the text.

        Args:
          tokens: tokens of all nodes.
          children: indices of each node's children.
          allowed: masks of all nodes; those that the grammar does not allow are left as they are.
        """
        self._fill_tree(self._matcher, tokens, children, allowed, 0)

    def _fill_tree(self, matcher: Any, tokens: Any, children: Any, allowed: Any, node: int) -> None:
        self._fill(matcher, allowed[node])
        for child in children[node]:
            token = tokens[child]
            if token in self._ends:
                continue
            # A copy: after a rollback, llguidance 1.9 can return the mask of the other branch.
            child_matcher = matcher.deep_copy()
            if child_matcher.try_consume_tokens([token]):
                self._fill_tree(child_matcher, tokens, children, allowed, child)


def _bits(tokens: Int[np.ndarray, "T"]) -> UInt32[np.ndarray, "T"]:
    return np.uint32(1) << (tokens % WORD).astype(np.uint32)


def forced_tokens(matchers: Sequence[Matcher | None], count: int) -> Int[np.ndarray, "B D"]:
    """Returns the first tokens, at most `count`, of the text that each grammar forces next.

    They are the tokenizer's own tokens of that text; -1 where there are fewer.
    """
    forced = np.full((len(matchers), count), -1, np.int32)
    for row, matcher in zip(forced, matchers, strict=True):
        tokens = [] if matcher is None else matcher.forced()[:count]
        row[: len(tokens)] = tokens
    return forced


def first_masks(matchers: Sequence[Matcher | None], vocab_size: int) -> UInt32[np.ndarray, "B W"]:
    """Returns the masks of the first tokens of rows; None for rows without a grammar."""
    allowed = np.full((len(matchers), words(vocab_size)), ALL)
    for row, matcher in zip(allowed, matchers, strict=True):
        if matcher is not None:
            matcher.fill(row)
    return allowed


def tree_masks(
    matchers: Sequence[Matcher | None],
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    vocab_size: int,
) -> UInt32[np.ndarray, "B N W"]:
    """Returns the masks of all nodes of the rows' trees.

    Args:
      matchers: one per row, after its root; None for rows that have ended or have no grammar.
      tokens: tokens of the nodes; below 0 for none.
      parents: parents of the nodes; below 0 for the root and padding.
      vocab_size: V.
    """
    allowed = np.full((*tokens.shape, words(vocab_size)), ALL)

    def fill(row: int) -> None:
        matcher = matchers[row]
        assert matcher is not None
        children: list[list[int]] = [[] for _ in range(tokens.shape[1])]
        for node, parent in enumerate(parents[row].tolist()):
            if node and parent >= 0 and tokens[row, node] >= 0:
                children[parent].append(node)
        matcher.fill_tree(tokens[row].tolist(), children, allowed[row])

    # llguidance holds no lock of Python while it computes a mask.
    rows = (row for row, matcher in enumerate(matchers) if matcher is not None)
    list(_threads().map(fill, rows))
    return allowed


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "masks")


def words(vocab_size: int) -> int:
    """Returns W, the words of a mask."""
    return -(-vocab_size // WORD)


@functools.lru_cache(maxsize=4)
def tokenizer_of(tokenizer: Any, eos: int, vocab_size: int) -> Any:
    """Returns the tokens of a fast tokenizer of transformers for llguidance; takes about a second.

    Raises:
      ValueError: a tokenizer without bytes of its tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("a grammar requires a fast tokenizer, which has a tokenizer.json")
    from llguidance.hf import from_tokenizer

    try:
        size = max(vocab_size, len(tokenizer))
        llg_tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
    except ValueError as error:
        raise ValueError(
            "a grammar requires a tokenizer with a byte-level or byte-fallback decoder: "
            f"{one_line(str(error))}"
        ) from error
    added = backend.get_added_tokens_decoder().items()
    tags = {i for i, token in added if not token.special and TAG.fullmatch(token.content)} - {eos}
    if not tags:
        return llg_tokenizer
    package = library()
    return package.LLTokenizer(package.TokenizerWrapper(_TokenizerWithTags(llg_tokenizer, tags)))


class _TokenizerWithTags:
    """llguidance's tokens with some special ones as text, as `TokenizerWrapper` reads them."""

    def __init__(self, tokenizer: Any, tags: Set[int]):
        tokens, is_special = range(tokenizer.vocab_size), tokenizer.is_special_token
        self._tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token
        self.bos_token_id = None
        self.tokens = [tokenizer.decode_bytes([token]) for token in tokens]
        self.special_token_ids = [x for x in tokens if is_special(x) and x not in tags]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)
