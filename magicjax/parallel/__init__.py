"""Layouts of a model's layers: on the device, in host memory, or on pipeline stages."""
