"""Training and boost-tuning of the small models in `experiments/zoo`."""
