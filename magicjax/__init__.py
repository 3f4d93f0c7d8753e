"""Lossless speculative decoding for long contexts: sparse KV caches and token trees."""

import importlib.util
import pathlib


def _check_neighbours() -> None:
    """Raises ImportError if another package of the same name shadows one of magicjax's."""
    home = pathlib.Path(__file__).resolve().parent.parent
    for name in ("models", "sharding", "pallas_kernels"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"magicjax requires the package {name!r} in {home}")
        path = pathlib.Path(spec.origin or [*(spec.submodule_search_locations or []), name][0])
        if path.resolve() != home / name / "__init__.py":
            raise ImportError(
                f"{path} shadows the package {name!r} of magicjax in {home}: rename that file, or "
                "put magicjax's folder first on the path"
            )


_check_neighbours()

from magicjax import policies  # noqa: E402
from magicjax.decoding.runner import Output  # noqa: E402
from magicjax.decoding.stats import Stats  # noqa: E402
from magicjax.drafters import (  # noqa: E402
    Cascade,
    Drafter,
    Eagle,
    Ensemble,
    FullCacheSpeculation,
    PageRetrieval,
    PromptLookup,
    SelfSpeculation,
    SmallModel,
    SuffixLookup,
)
from magicjax.engine.config import EngineConfig  # noqa: E402
from magicjax.engine.engine import Engine  # noqa: E402
from magicjax.engine.scheduler import QueueFullError  # noqa: E402
from magicjax.generation import generate, stream  # noqa: E402
from magicjax.grammars.grammar import Grammar  # noqa: E402
from magicjax.loading import load, offload  # noqa: E402
from magicjax.model import Model  # noqa: E402
from magicjax.options import option  # noqa: E402
from magicjax.policies import Policy, StreamingLLM  # noqa: E402
from magicjax.prediction.autotune.auto import Auto, Choice, choose_drafter  # noqa: E402
from magicjax.sampling_params import SamplingParams  # noqa: E402
from magicjax.trees.sequoia import expected_tokens, optimal  # noqa: E402
from magicjax.trees.token_tree import DynamicTree, TokenTree, chain, expansion, parse_tree  # noqa: E402
from magicjax.verification.logprobs import LogProbs  # noqa: E402
from magicjax.version import version as _version  # noqa: E402
from sharding import make_mesh  # noqa: E402

__version__ = _version()

__all__ = [
    "Auto",
    "Cascade",
    "Choice",
    "Drafter",
    "DynamicTree",
    "Eagle",
    "Engine",
    "EngineConfig",
    "Ensemble",
    "FullCacheSpeculation",
    "Grammar",
    "LogProbs",
    "Model",
    "Output",
    "PageRetrieval",
    "Policy",
    "PromptLookup",
    "QueueFullError",
    "SamplingParams",
    "SelfSpeculation",
    "SmallModel",
    "Stats",
    "StreamingLLM",
    "SuffixLookup",
    "TokenTree",
    "chain",
    "choose_drafter",
    "expansion",
    "expected_tokens",
    "generate",
    "load",
    "make_mesh",
    "offload",
    "optimal",
    "option",
    "parse_tree",
    "policies",
    "stream",
]
