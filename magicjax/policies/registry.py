"""Policies by name: those of this package, of other packages, and of any importable file."""

import inspect

from magicjax import plugins
from magicjax.policies.attention_mass import H2O, TOVA, PyramidKV, SnapKV
from magicjax.policies.base import Policy
from magicjax.policies.expected_attention import ExpectedAttention
from magicjax.policies.query_free import KeyDiff, KNorm, Random, StreamingLLM
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
    "random": Random,
}
GROUP = "magicjax.policies"  # of entry points


def get_policy(policy: str | Policy) -> Policy:
    """Returns the policy of a name with its default settings, or `policy` itself.

    A name is one of `POLICIES`, an entry point of the group "magicjax.policies" of an installed
    package, or the import path of a class, such as my_file.MyPolicy.

    Raises:
      ValueError: an unknown name, one of something else than a policy, or a policy that is not a
        dataclass.
      TypeError: neither a name nor a `Policy`.
    """
    if isinstance(policy, str):
        policy = _named(policy)
    if isinstance(policy, Policy):
        _check_dataclass(type(policy))
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(f"policy={policy.__name__} is a class: give an object, {policy.__name__}()")
    raise TypeError(
        f"policy={policy!r} is neither a name nor a policy: give one of {', '.join(POLICIES)}, "
        "or an object of a subclass of magicjax.Policy"
    )


def _named(name: str) -> Policy:
    """Returns the policy of a name."""
    entry = plugins.find(name, POLICIES, GROUP)
    if entry is None:
        known = sorted({*POLICIES, *plugins.installed(GROUP)})
        raise ValueError(
            f"policy={name!r} is unknown: use one of {', '.join(known)}, or the import path of a "
            f"class, such as my_file.MyPolicy{did_you_mean(name, known)}"
        )
    try:
        policy = entry() if callable(entry) else entry
    except Exception as error:  # of any kind: the class is the user's
        raise ValueError(
            f"policy={name!r}: creating it raises {type(error).__name__}: {error}; give every "
            "field a default"
        ) from error
    if not isinstance(policy, Policy):
        raise ValueError(
            f"policy={name!r} gives a {type(policy).__name__}: it must name a subclass of "
            "magicjax.Policy"
        )
    return policy


def _check_dataclass(policy_class: type) -> None:
    """Raises ValueError for a class whose fields do not count in comparisons of its objects.

    Programs are compiled for a policy, and equal policies share them.
    """
    for base in policy_class.__mro__[: policy_class.__mro__.index(Policy)]:
        has_fields = "__init__" in vars(base) or inspect.get_annotations(base)
        if has_fields and "__dataclass_fields__" not in vars(base):
            raise ValueError(
                f"policy {base.__name__} is not a dataclass, so that programs compiled for one "
                "object would run for another: decorate it with "
                "@dataclasses.dataclass(frozen=True), and declare its fields"
            )


def policy_name(policy: Policy) -> str:
    """Returns the name of a policy; the import path of its class if it is not registered."""
    return plugins.name_of(type(policy), POLICIES, GROUP)
