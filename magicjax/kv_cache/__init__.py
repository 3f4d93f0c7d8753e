"""KV caches of fixed shape: the target's full cache, the sparse draft cache, and prefill."""
