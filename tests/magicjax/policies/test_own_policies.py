"""Custom policies: valid scores, and names that other packages register."""

import dataclasses
import importlib.metadata

import jax.numpy as jnp
import pytest

import magicjax
from magicjax import policies
from magicjax.drafters import spec
from tests.magicjax import keywords, tiny


@pytest.mark.parametrize("policy", [None, 3])
def test_an_object_that_is_not_a_policy_is_rejected(policy):
    with pytest.raises(TypeError, match="neither a name nor a policy: .* object of a subclass"):
        magicjax.SelfSpeculation(policy)


def test_a_policy_class_is_rejected_with_a_remedy():
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
        ("indices", r"Scored.score returned int32\[1, 2, \d+\]: it must return one float for each"),
        ("one head", r"Scored.score returned float32\[1, 1, \d+\]: .*\[B, K, S\] = \[1, 2, \d+\]"),
        ("all elements", r"Scored.score returned float32\[1, 2, \d+, 8\]"),
    ],
)
def test_scores_of_a_wrong_shape_or_dtype_are_rejected(shape, message):
    drafter = magicjax.SelfSpeculation(Scored(shape=shape), 16)
    with pytest.raises(ValueError, match=message):
        keywords.generate(tiny.model(), [[1, 2, 3]], drafter=drafter, max_tokens=4)


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that registers an entry point as an installed package would."""

    def install(name, value):
        point = importlib.metadata.EntryPoint(name, value, policies.GROUP)
        asked = {policies.GROUP: [point]}
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: asked.get(group, []))

    return install


def test_a_policy_of_another_package_is_found_by_its_name(installed):
    installed("mine", f"{__name__}:Scored")
    assert magicjax.SelfSpeculation("mine", 16).policy == Scored()
    with pytest.raises(ValueError, match="policy='mime' is unknown: .*; did you mean 'mine'"):
        magicjax.SelfSpeculation("mime")


@pytest.mark.parametrize(
    ("value", "made"),
    [
        ("magicjax:PromptLookup", "PromptLookup"),
        ("magicjax.policies:POLICIES", "dict"),
        ("magicjax", "module"),
    ],
)
def test_an_entry_point_that_is_not_a_policy_is_rejected(installed, value, made):
    installed("mine", value)
    with pytest.raises(ValueError, match=f"policy='mine' gives a {made}: it must name a"):
        magicjax.SelfSpeculation("mine")


def test_a_policy_has_an_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(
        "import dataclasses, magicjax\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Longest(magicjax.policies.KNorm):\n"
        "    power: float = 1.0\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Open(Longest):\n"
        "    def __post_init__(self): raise ValueError('no power')\n"
        "class Undecorated(magicjax.Policy):\n"
        "    sign: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = "self:my_policies.Longest:64:power=2.0"
    drafter = spec.make_drafter(text, magicjax.load)
    assert (type(drafter.policy).__name__, drafter.policy.power) == ("Longest", 2)
    assert spec.text_of(drafter) == text
    for wrong, message in {
        "my_policies.Longst": "my_policies has no 'Longst'; did you mean 'Longest'",
        "nowhere.Longest": "put the folder of nowhere.py on PYTHONPATH",
        "my_policies.Open": "creating it raises ValueError: no power; give every field a default",
        "my_policies.Undecorated": "policy Undecorated is not a dataclass",
        "dataclasses.MISSING": "policy='dataclasses.MISSING' gives a _MISSING_TYPE",
    }.items():
        with pytest.raises(ValueError, match=message):
            spec.make_drafter(f"self:{wrong}:64", magicjax.load)


def test_entry_points_cannot_replace_builtin_policies(installed):
    installed("snapkv", "magicjax:PromptLookup")
    assert magicjax.SelfSpeculation("snapkv").policy == policies.SnapKV()


def test_a_policy_whose_fields_do_not_count_is_refused():
    class Undecorated(magicjax.Policy):
        def __init__(self, sign):
            object.__setattr__(self, "sign", sign)

        def score(self, evidence):
            return evidence.keys.sum(-1)

    class Annotated(policies.KNorm):
        sign: float = 1.0

    for policy in (Undecorated(1.0), Annotated()):
        with pytest.raises(
            ValueError, match="is not a dataclass, so that programs compiled for one"
        ):
            magicjax.SelfSpeculation(policy)
