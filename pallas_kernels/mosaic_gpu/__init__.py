"""The Hopper attention kernel in Pallas Mosaic GPU."""
