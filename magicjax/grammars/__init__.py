"""Structured output: regular grammars as token automata, and masks of the target's logits."""
