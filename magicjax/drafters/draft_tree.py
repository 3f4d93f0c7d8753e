"""Drafts any tree with a draft model."""

from magicjax.drafters.draft_pass import DraftBlock, DraftContext
from magicjax.drafters.dynamic_tree import draft_dynamic_tree
from magicjax.drafters.static_tree import draft_static_tree
from magicjax.trees.proposal import Proposal
from magicjax.trees.token_tree import DynamicTree, Tree


def draft_tree(context: DraftContext, tree: Tree) -> tuple[Proposal, DraftBlock]:
    """Returns the tree with the draft model's tokens, and the block it filled."""
    if isinstance(tree, DynamicTree):
        return draft_dynamic_tree(context, tree)
    return draft_static_tree(context, tree)
