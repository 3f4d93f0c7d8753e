"""Texts do not depend on what a drafter proposes, however wrong it is."""

import dataclasses
import itertools

import pytest
from flax import struct

import magicjax
from tests.magicjax import keywords, tiny
from tests.magicjax.decoding.test_logprobs import check_rows
from tests.quick import quick


@struct.dataclass
class Wrong(magicjax.PromptLookup):
    """Adds a number to every token, or to the root only."""

    added: int = struct.field(pytree_node=False, default=0)
    to_root: bool = struct.field(pytree_node=False, default=False)

    def propose(self, target, state, root, cache, sampling, settings):
        proposal, draft = super().propose(target, state, root, cache, sampling, settings)
        at = slice(0, 1) if self.to_root else slice(None)
        tokens = proposal.tokens.at[:, at].add(self.added)
        return dataclasses.replace(proposal, tokens=tokens), draft


@pytest.mark.parametrize(
    ("added", "to_root"),
    quick(
        [*itertools.product([-(10**6), -1, 1, tiny.VOCAB, 10**6], [False, True])], (-(10**6), False)
    ),
)
def test_wrong_tokens_do_not_change_the_text(added, to_root, tally):
    prompts, options = tiny.prompts(3), dict(max_tokens=12, eos_token_id=[], logprobs=0)
    output = keywords.generate(
        tiny.model(),
        prompts,
        drafter=Wrong(added=added, to_root=to_root),
        tree=magicjax.chain(2),
        **options,
    )
    wanted = [row[:12] for row in tiny.expected(3)]
    tally.compare(tiny.model(), prompts, wanted, tiny.rows_of(output))
    check_rows(tiny.model(), prompts, output, 0)
