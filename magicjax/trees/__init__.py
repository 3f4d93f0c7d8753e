"""Token trees: what a round drafts, how trees are merged, and which tree is best."""
