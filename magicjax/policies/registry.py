"""Policies by name: those of this package, and those that other packages register."""

import importlib.metadata

from magicjax.policies.attention_mass import H2O, TOVA, PyramidKV, SnapKV
from magicjax.policies.base import Policy
from magicjax.policies.expected_attention import ExpectedAttention
from magicjax.policies.query_free import Full, KeyDiff, KNorm, Random, StreamingLLM
from magicjax.suggest import did_you_mean

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


def get_policy(policy: str | Policy) -> Policy:
    """Returns the policy of a name with its default settings, or `policy` itself.

    A name is one of `POLICIES`, or an entry point of the group "magicjax.policies" of an installed
    package.

    Raises:
      ValueError: an unknown name, or an entry point that is not a policy.
      TypeError: neither a name nor a `Policy`.
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
        raise ValueError(
            f"policy={policy!r} is unknown: use one of {', '.join(known)}, or an entry point of "
            f"{GROUP!r} in an installed package{did_you_mean(policy, known)}"
        )
    loaded = installed[policy].load()
    instance = loaded() if callable(loaded) else loaded
    if not isinstance(instance, Policy):
        raise ValueError(
            f"policy={policy!r}: the entry point {installed[policy].value} gives a "
            f"{type(instance).__name__}: it must name a subclass of magicjax.Policy"
        )
    return instance


def policy_name(policy: Policy) -> str:
    """Returns the name of a policy; that of its class if it is not registered."""
    kind = type(policy)
    value = f"{kind.__module__}:{kind.__qualname__}"
    points = importlib.metadata.entry_points(group=GROUP)
    names = {known: name for name, known in POLICIES.items()}
    return names.get(kind) or {p.value: p.name for p in points}.get(value) or kind.__name__
