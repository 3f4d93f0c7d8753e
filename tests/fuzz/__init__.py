"""Random configurations and engine schedules, compared with the oracle: `python -m tests.fuzz`."""
