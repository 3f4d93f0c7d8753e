"""Policies by name: those of this package, and those that other packages register."""

import importlib.metadata
import inspect

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
        _check_dataclass(type(policy))
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


def _check_dataclass(kind: type) -> None:
    """Raises TypeError for a class whose fields do not count in comparisons of its objects.

    Programs are compiled for a policy, and equal policies share them.
    """
    for each in kind.__mro__[: kind.__mro__.index(Policy)]:
        has_fields = "__init__" in vars(each) or inspect.get_annotations(each)
        if has_fields and "__dataclass_fields__" not in vars(each):
            raise TypeError(
                f"policy {each.__name__} is not a dataclass, so that programs compiled for one "
                "object would run for another: decorate it with "
                "@dataclasses.dataclass(frozen=True), and declare its fields"
            )


def policy_name(policy: Policy) -> str:
    """Returns the name of a policy; that of its class if it is not registered."""
    kind = type(policy)
    value = f"{kind.__module__}:{kind.__qualname__}"
    points = importlib.metadata.entry_points(group=GROUP)
    names = {known: name for name, known in POLICIES.items()}
    return names.get(kind) or {p.value: p.name for p in points}.get(value) or kind.__name__
