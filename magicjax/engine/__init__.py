"""Continuous batching: requests join and leave a batch of fixed shape."""
