"""Lossless speculative decoding for long contexts: sparse KV caches and token trees.

A public name is imported on first use, so `import magicjax` does not import JAX.
"""

import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicjax import policies
    from magicjax.decoding.output import Output
    from magicjax.decoding.stats import Stats
    from magicjax.drafters import (
        MTP,
        Cascade,
        Drafter,
        Eagle,
        Ensemble,
        ForcedTokens,
        FullCacheSpeculation,
        PageRetrieval,
        PromptLookup,
        SelfSpeculation,
        SmallModel,
        SuffixLookup,
    )
    from magicjax.engine.config import EngineConfig
    from magicjax.engine.engine import Engine
    from magicjax.engine.scheduler import QueueFullError
    from magicjax.generation import generate, stream
    from magicjax.grammars.grammar import Grammar
    from magicjax.loading import load, offload
    from magicjax.model import Model
    from magicjax.options import option
    from magicjax.policies import Policy, StreamingLLM
    from magicjax.prediction.choosing import Auto, Choice, choose_drafter
    from magicjax.sampling_params import SamplingParams
    from magicjax.trees.sequoia import expected_tokens, optimal
    from magicjax.trees.token_tree import DynamicTree, TokenTree, chain, expansion, parse_tree
    from magicjax.verification.logprobs import LogProbs
    from sharding import make_mesh

    __version__: str


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

_NAMES = {  # public names by module, as in the block above
    "magicjax.decoding.output": ("Output",),
    "magicjax.decoding.stats": ("Stats",),
    "magicjax.drafters": (
        "Cascade",
        "Drafter",
        "Eagle",
        "Ensemble",
        "ForcedTokens",
        "FullCacheSpeculation",
        "MTP",
        "PageRetrieval",
        "PromptLookup",
        "SelfSpeculation",
        "SmallModel",
        "SuffixLookup",
    ),
    "magicjax.engine.config": ("EngineConfig",),
    "magicjax.engine.engine": ("Engine",),
    "magicjax.engine.scheduler": ("QueueFullError",),
    "magicjax.generation": ("generate", "stream"),
    "magicjax.grammars.grammar": ("Grammar",),
    "magicjax.loading": ("load", "offload"),
    "magicjax.model": ("Model",),
    "magicjax.options": ("option",),
    "magicjax.policies": ("Policy", "StreamingLLM"),
    "magicjax.prediction.choosing": ("Auto", "Choice", "choose_drafter"),
    "magicjax.sampling_params": ("SamplingParams",),
    "magicjax.trees.sequoia": ("expected_tokens", "optimal"),
    "magicjax.trees.token_tree": ("DynamicTree", "TokenTree", "chain", "expansion", "parse_tree"),
    "magicjax.verification.logprobs": ("LogProbs",),
    "sharding": ("make_mesh",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULES, "policies"])


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "policies":
            return importlib.import_module("magicjax.policies")
        if name == "__version__":
            return importlib.import_module("magicjax.version").version()
        if name not in _MODULES:
            raise AttributeError(f"module 'magicjax' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value  # the next use finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "__doc__", "__file__"])
