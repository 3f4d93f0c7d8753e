"""What members of an ensemble keep for their commit is by the nodes of the merged tree."""

import jax
import jax.numpy as jnp
import pytest
from flax import struct

import magicjax
from magicjax.decoding.decoder import Decoder
from tests.magicjax import keywords, tiny
from tests.quick import quick


@struct.dataclass
class Remembering(magicjax.SmallModel):
    """Keeps the token of each of its nodes, and compares it with that of the committed node."""

    renumbers: bool = struct.field(pytree_node=False, default=True)

    def prefill(self, target, tokens, cache, stats, settings, previous=None):
        count = jnp.zeros_like(cache.lengths)
        return super().prefill(target, tokens, cache, stats, settings), count, count

    def propose(self, target, state, root, cache, sampling, settings):
        proposal, draft = super().propose(target, state[0], root, cache, sampling, settings)
        return proposal, (draft, proposal.tokens)

    def renumber(self, draft, node_of, num_nodes):
        inner, tokens = draft
        if self.renumbers:
            rows, node = (
                jnp.arange(len(tokens))[:, None],
                jnp.where(node_of < 0, num_nodes, node_of),
            )
            unknown = jnp.full((len(tokens), num_nodes), -1)
            tokens = unknown.at[rows, node].set(tokens, mode="drop")
        return super().renumber(inner, node_of, num_nodes), tokens

    def commit(self, target, state, draft, proposal, outcome):
        inner, right, wrong = state
        own, all_tokens = (
            jnp.take_along_axis(x, jnp.minimum(outcome.path, x.shape[1] - 1), 1)
            for x in (draft[1], proposal.tokens)
        )
        below = jnp.arange(own.shape[1])
        known = (own >= 0) & (below > 0) & (below < outcome.committed[:, None])
        right += (known & (own == all_tokens)).sum(1, dtype=jnp.int32)
        wrong += (known & (own != all_tokens)).sum(1, dtype=jnp.int32)
        return super().commit(target, inner, draft[0], proposal, outcome), right, wrong


@pytest.mark.parametrize("renumbers", quick([True, False], True))
def test_a_member_finds_its_nodes_in_the_merged_tree(renumbers):
    member = Remembering(tiny.model("near"), renumbers=renumbers)
    drafter = magicjax.Ensemble((magicjax.SmallModel(tiny.model("other")), member))
    request = keywords.prepare(
        tiny.model(),
        tiny.prompts(3),
        drafter=drafter,
        tree=tiny.TREES["2,2,1"],
        max_tokens=tiny.NEW,
        eos_token_id=tiny.NEVER,
    )
    state = Decoder(request).decode(Decoder(request).start())
    _, right, wrong = jax.device_get(state.drafter[1])
    assert (right > 0).all()
    assert (wrong == 0).all() == renumbers
