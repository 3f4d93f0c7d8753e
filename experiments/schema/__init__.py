"""What an experiment's config may say, and the layout of its results."""
