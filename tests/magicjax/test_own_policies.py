"""Policies of a user's own: what they may return, and how their names are found."""

import dataclasses
import importlib.metadata

import jax.numpy as jnp
import pytest

import magicjax
from magicjax import policies
from tests.magicjax import tiny


@pytest.mark.parametrize("policy", [None, 3])
def test_what_is_neither_a_name_nor_a_policy_is_refused(policy):
    with pytest.raises(TypeError, match="neither a name nor a policy: .* object of a subclass"):
        magicjax.SelfSpeculation(policy)


def test_a_class_in_place_of_a_policy_is_refused_with_what_to_write():
    with pytest.raises(TypeError, match=r"policy=SnapKV is a class: give an object, SnapKV\(\)"):
        magicjax.SelfSpeculation(policies.SnapKV)


@dataclasses.dataclass(frozen=True)
class Scored(magicjax.Policy):
    """A policy whose scores have a shape or dtype that a test names."""

    shape: str = "right"

    def score(self, evidence):
        norms = jnp.linalg.norm(evidence.keys, axis=-1)
        return {
            "right": norms,
            "indices": norms.argsort(-1),
            "one head": norms[:, :1],
            "all elements": evidence.keys,
        }[self.shape]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("indices", r"Scored.score gave int32\[1, 2, \d+\]: it must be one real number for each"),
        ("one head", r"Scored.score gave float32\[1, 1, \d+\]: .*\[B, K, S\] = \[1, 2, \d+\]"),
        ("all elements", r"Scored.score gave float32\[1, 2, \d+, 8\]"),
    ],
)
def test_scores_that_are_none_are_refused_by_shape_and_dtype(shape, message):
    drafter = magicjax.SelfSpeculation(Scored(shape=shape), 16)
    with pytest.raises(ValueError, match=message):
        magicjax.generate(tiny.model(), [[1, 2, 3]], drafter=drafter, max_new_tokens=4)


@pytest.fixture
def installed(monkeypatch):
    """Makes a name an entry point of policies, as another installed package would."""

    def install(name, value):
        point = importlib.metadata.EntryPoint(name, value, policies.GROUP)
        asked = {policies.GROUP: [point]}
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.get(group, []))

    return install


def test_a_policy_of_another_package_is_found_by_its_name(installed):
    installed("mine", f"{__name__}:Scored")
    assert magicjax.SelfSpeculation("mine", 16).policy == Scored()
    with pytest.raises(ValueError, match="policy='mime' is unknown: did you mean 'mine'"):
        magicjax.SelfSpeculation("mime")


@pytest.mark.parametrize(
    ("value", "made"),
    [("magicjax:LookUp", "LookUp"), ("magicjax.policies:POLICIES", "dict"), ("magicjax", "module")],
)
def test_an_entry_point_that_is_no_policy_is_refused(installed, value, made):
    installed("mine", value)
    with pytest.raises(ValueError, match=f"the entry point {value} makes a {made}: it must name a"):
        magicjax.SelfSpeculation("mine")


def test_names_of_the_library_are_its_own(installed):
    installed("snapkv", "magicjax:LookUp")
    assert magicjax.SelfSpeculation("snapkv").policy == policies.SnapKV()
