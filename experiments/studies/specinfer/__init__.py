"""SpecInfer's tables (arXiv 2305.09781), and those of Sequoia's and EAGLE-2's trees, re-made."""
