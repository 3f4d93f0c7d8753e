"""Decoder models as pure functions of their parameters."""

from models.llama import Attend, Llama, LlamaConfig
from models.rope import Rope

__all__ = ["Attend", "Llama", "LlamaConfig", "Rope"]
