"""The Hopper attention kernel in Pallas Mosaic GPU, and its tuned configurations."""
