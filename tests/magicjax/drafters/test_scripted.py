"""Statistics of a scripted drafter, whose acceptance is known."""

import numpy as np
import pytest

import magicjax
from tests.magicjax import keywords, scripted, tiny
from tests.quick import quick

LIMITS = [tiny.NEW - row for row in range(8)]
# Depth 4 and width 3, the bounds of the trees of rows and rounds.
OUTLINE = magicjax.TokenTree.from_parents((-1, 0, 0, 0, 1, 4, 5, 2, 3))


def random_tree(rng, outline) -> list[int]:
    """Returns parents within the outline's nodes, depth and width; some nodes are padding."""
    parents, depths = [-1], [0]
    for _ in range(1, outline.num_nodes):
        free = [
            node
            for node, depth in enumerate(depths)
            if 0 <= depth < outline.depth and parents.count(node) < outline.width
        ]
        if rng.random() < 0.2:
            parents.append(-1)
            depths.append(-1)
        else:
            newest = rng.random() < 0.5  # so that some trees are deep
            parents.append(free[-1] if newest else int(rng.choice(free)))
            depths.append(depths[parents[-1]] + 1)
    return parents


def script_for(kind: str, seed: int):
    """Returns (tree, script) for eight rows."""
    rng = np.random.default_rng(seed)
    tree = {"chain": magicjax.chain(4), "tree": tiny.TREES["irregular"], "own": OUTLINE}[kind]
    text = np.stack(tiny.expected(8, 0, tiny.NEW + tree.depth))
    if kind == "own":
        parents = [[random_tree(rng, tree) for _ in range(tiny.NEW)] for _ in range(8)]
    else:
        parents = np.broadcast_to(tree.array, (8, tiny.NEW, tree.num_nodes))
    return tree, scripted.write(rng, text, np.array(parents), follow_the_tree=kind != "own")


def run(tree, script) -> magicjax.Output:
    return keywords.generate(
        tiny.model(),
        tiny.prompts(8),
        drafter=script.drafter,
        tree=tree,
        max_tokens=LIMITS,
        eos_token_id=tiny.NEVER,
    )


@pytest.mark.parametrize("kind", quick(["chain", "tree", "own"], "own"))
def test_rounds_accept_exactly_the_scripted_tokens_in_every_row(kind):
    seen = set()
    for seed in range(3):
        tree, script = script_for(kind, seed)
        output = run(tree, script)
        for row, wanted, limit in zip(tiny.rows_of(output), tiny.expected(8), LIMITS, strict=True):
            np.testing.assert_array_equal(row, wanted[:limit])
        rounds = [scripted.play(script.accepts[row], limit) for row, limit in enumerate(LIMITS)]
        flat = np.concatenate(rounds)
        seen |= set(flat.tolist())
        stats = output.stats
        assert stats.target_passes == len(flat)
        assert stats.accepted == flat.sum()
        assert stats.emitted == sum(LIMITS) - 8
        real = [
            int((script.trees[row, :n, 1:] >= 0).sum()) for row, n in enumerate(map(len, rounds))
        ]
        assert stats.drafted == sum(real)
        assert stats.tau == pytest.approx(stats.emitted / len(flat))
        assert stats.acceptance_rate == pytest.approx(flat.mean() / tree.depth)
        by_depth = [(flat >= depth).mean() for depth in range(1, tree.depth + 1)]
        assert stats.acceptance_by_depth == pytest.approx(by_depth)
    assert seen == set(range(tree.depth + 1))  # every number of accepted tokens occurred


def test_a_script_that_is_off_by_one_is_detected():
    tree, script = script_for("chain", 0)
    late = script.drafter.replace(text=np.roll(script.drafter.text, 1, axis=1))
    output = run(tree, scripted.Script(late, script.accepts, script.trees))
    for row, wanted, limit in zip(tiny.rows_of(output), tiny.expected(8), LIMITS, strict=True):
        np.testing.assert_array_equal(row, wanted[:limit])  # exact with any drafts
    rounds = [scripted.play(script.accepts[row], limit) for row, limit in enumerate(LIMITS)]
    assert output.stats.accepted < np.concatenate(rounds).sum() / 4
