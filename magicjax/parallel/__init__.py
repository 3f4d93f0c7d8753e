"""Where a model's layers lie: host memory (offloading) or pipeline stages."""
