"""Token trees: their shapes, proposals, merging, and the best tree for given acceptance rates."""
