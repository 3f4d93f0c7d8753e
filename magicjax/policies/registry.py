"""Policies by name: this project's own, and those that other packages register."""

import difflib
import importlib.metadata

from magicjax.policies.attention_mass import H2O, TOVA
from magicjax.policies.base import Policy
from magicjax.policies.expected_attention import ExpectedAttention
from magicjax.policies.full import Full
from magicjax.policies.key_geometry import KeyDiff, KNorm, Random
from magicjax.policies.snapkv import PyramidKV, SnapKV
from magicjax.policies.streaming import StreamingLLM

POLICIES: dict[str, type[Policy]] = {
    "streaming": StreamingLLM,
    "snapkv": SnapKV,
    "h2o": H2O,
    "tova": TOVA,
    "pyramidkv": PyramidKV,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "expected_attention": ExpectedAttention,
    "full": Full,
    "random": Random,
}
GROUP = "magicjax.policies"  # of entry points


def find(policy: str | Policy) -> Policy:
    """Returns the policy of that name with its default settings, or `policy` itself.

    A name is one of `POLICIES`, or an entry point of the group "magicjax.policies" that another
    package installed.

    Raises:
      ValueError: no such name (the nearest is named), or an entry point that is no policy.
      TypeError: neither a name nor a policy.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(f"policy={policy.__name__} is a class: give an object, {policy.__name__}()")
    if not isinstance(policy, str):
        raise TypeError(
            f"policy={policy!r} is neither a name nor a policy: give one of {', '.join(POLICIES)}, "
            "or an object of a subclass of magicjax.Policy"
        )
    if policy in POLICIES:
        return POLICIES[policy]()
    installed = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    if policy not in installed:
        known = sorted({*POLICIES, *installed})
        nearest = difflib.get_close_matches(policy, known, 1, 0.0)[0]
        raise ValueError(
            f"policy={policy!r} is unknown: did you mean {nearest!r}? It must be one of "
            f"{', '.join(known)}; packages can register more as entry points of {GROUP!r}"
        )
    loaded = installed[policy].load()
    made = loaded() if callable(loaded) else loaded
    if not isinstance(made, Policy):
        raise ValueError(
            f"policy={policy!r}: the entry point {installed[policy].value} makes a "
            f"{type(made).__name__}: it must name a subclass of magicjax.Policy"
        )
    return made
