"""Drafters as text: what is parsed, written, refused, and found in installed packages."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import magicjax
from magicjax import policies
from magicjax.drafters import Drafter, Proposal, spec
from magicjax.options import Option, parse
from tests.magicjax import keywords
from tests.magicjax import tiny as tiny_models


@functools.cache
def named(path):
    return magicjax.Model(None, None, name=path)


def make(text):
    return spec.make_drafter(text, named)


@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        ("self", magicjax.SelfSpeculation()),
        ("self:streaming:64", magicjax.SelfSpeculation(budget=64)),
        ("self:budget=64", magicjax.SelfSpeculation(budget=64)),
        ("full", magicjax.FullCacheSpeculation()),
        ("full:weights=int8", magicjax.FullCacheSpeculation("int8")),
        ("quest", magicjax.PageRetrieval()),
        ("quest:512:page_size=32", magicjax.PageRetrieval(512, page_size=32)),
        ("quest:budget=64", magicjax.PageRetrieval(64)),
        ("self:draw=top", magicjax.SelfSpeculation(draw="top")),
        ("full:layers=0-9,20-29", magicjax.FullCacheSpeculation(layers="0-9,20-29")),
        ("quest:64:layers=0", magicjax.PageRetrieval(64, layers="0")),
        (
            "self:h2o:9:refresh_every=4:kv_dtype=int8",
            magicjax.SelfSpeculation("h2o", 9, refresh_every=4, kv_dtype="int8"),
        ),
        ("self:sinks=4", magicjax.SelfSpeculation(magicjax.StreamingLLM(sinks=4))),
        (
            "self:snapkv:scaled=false:recent=8",
            magicjax.SelfSpeculation(policies.SnapKV(scaled=False, recent=8)),
        ),
        ("prompt-lookup", magicjax.PromptLookup()),
        ("prompt-lookup:7:min_ngram=2", magicjax.PromptLookup(7, 2)),
        ("suffix", magicjax.SuffixLookup()),
        (
            "suffix:4:store_tokens=0:min_score=0.25",
            magicjax.SuffixLookup(4, store_tokens=0, min_score=0.25),
        ),
        ("small:opt-125m", magicjax.SmallModel(named("opt-125m"))),
        ("small:./a/b:snapkv", magicjax.SmallModel(named("./a/b"), policy="snapkv")),
        ("small:./a/b:snapkv:64", magicjax.SmallModel(named("./a/b"), policy="snapkv", budget=64)),
        ("small:./a:b/c", magicjax.SmallModel(named("./a:b/c"))),  # no policy has a slash
        ("small:./a/b:c:full", magicjax.SmallModel(named("./a/b:c"))),
        ("small:a:snapkv:64:h2o:32", magicjax.SmallModel(named("a:snapkv:64"), None, "h2o", 32)),
        ("small:lr=3", magicjax.SmallModel(named("lr=3"))),
        (
            "self:tova:64 + prompt-lookup:3",
            magicjax.Ensemble((magicjax.SelfSpeculation("tova", 64), magicjax.PromptLookup(3))),
        ),
        (
            "prompt-lookup:3 -> self:tova:64",
            magicjax.Cascade(magicjax.PromptLookup(3), magicjax.SelfSpeculation("tova", 64)),
        ),
    ],
)
def test_a_text_is_a_drafter(text, drafter):
    assert make(text) == drafter


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("self", "self:streaming:256"),
        ("full", "full"),
        ("full:weights=int4:32", "full:weights=int4:32"),
        ("quest", "quest:256"),
        ("self:layers=0,2-3:budget=64", "self:streaming:64:layers=0,2-3"),
        ("self:snapkv:kv_dtype=int8:draw=top", "self:snapkv:256:draw=top:kv_dtype=int8"),
        ("self:streaming:sinks=4", "self:streaming:256:sinks=4"),
        ("self:snapkv:scaled=false", "self:snapkv:256:scaled=false"),
        ("prompt-lookup", "prompt-lookup:4"),
        ("suffix:documents=a/b.txt:max_factor=3", "suffix:8:documents=a/b.txt:max_factor=3.0"),
        ("small:a/b:draw=top", "small:a/b:full:draw=top"),
        ("small:a:snapkv:8 + prompt-lookup:2", "small:a:snapkv:8 + prompt-lookup:2"),
        ("small:a + prompt-lookup -> full", "small:a:full + prompt-lookup:4 -> full"),
        *[("mtp", "mtp"), ("mtp:512:sinks=2", "mtp:512:sinks=2"), ("mtp:draw=top", "mtp:draw=top")],
        *[("mtp:a/b:64", "mtp:a/b:64"), ("mtp:a:b + prompt-lookup", "mtp:a:b + prompt-lookup:4")],
    ],
)
def test_a_drafter_is_written_with_its_defaults_and_read_back(text, written):
    drafter = make(text)
    assert spec.text_of(drafter) == written
    assert make(written) == drafter


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slef", "'slef' is not a drafter; did you mean 'self'?"),
        ("self:snapkv:many", "budget='many': it must be an integer"),
        ("self:snapkv:1:2", "has 3 values, and self takes at most 2 without a name"),
        ("self:refresh_evry=4", "'refresh_evry' is not an .*; did you mean 'refresh_every'"),
        (
            "self:h2o:sinks=4",
            "'sinks' is not an option of .* kv_dtype, weights, layers; of h2o: recent, window",
        ),
        ("self:streaming:4:budget=8", "sets budget twice"),
        ("full:sinks=4", "'sinks' is not an option of full"),
        ("self:full", "policy='full' is unknown: .*; write full instead of self:full"),
        ("self:quest:64", "policy='quest' is unknown: .*; write quest instead of self:quest"),
        ("self:layers=3-1", "layers='3-1': write each layer once, in ascending order"),
        ("quest:sinks=4", "layers, recent, page_size"),
        ("small:a:quest:64", "policy='quest' is unknown: .* needs small:a:quest:64:full"),
        ("self:kv_dtype=int2", "kv_dtype='int2': it must be int8 or int4"),
        ("small", "needs a model: write small:PATH"),
        ("self:kv_dtype=int8:snapkv", "write values without a name before kv_dtype=int8"),
        ("small:llama:7b", "a directory of that name needs small:llama:7b:full"),
        ("self:snapkv:scaled=maybe", "scaled='maybe': it must be true or false"),
        ("self + slef", "'slef' is not a drafter"),
        ("suffix:many", "max_match='many': it must be an integer"),
        ("ngram:4", "'ngram' is not a drafter: write prompt-lookup:4"),
        ("eagle3:PATH", "'eagle3' is not a drafter: write eagle:PATH"),
        ("medusa:PATH", "'medusa' is not a drafter: of the heads .* .docs/learned_heads.md"),
        ("self,prompt-lookup", "are joined by ' . ', as in 'self:streaming:256 . prompt-lookup:4'"),
        ("self:snapkv:64+prompt-lookup:4", "the members of an ensemble are joined by ' . '"),
        ("prompt-lookup:4->self:snapkv:64", "and those of a cascade by ' -> '"),
        ("prompt-lookup -> slef", "'slef' is not a drafter"),
        ("self -> prompt-lookup", "first=SelfSpeculation: it cannot draft within a round"),
        ("prompt-lookup -> small:a", "middle=SmallModel: it does not run the target"),
        ("prompt-lookup -> self -> self", "first=Cascade: it cannot draft within a round"),
    ],
)
def test_a_wrong_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make(text)


@pytest.mark.parametrize("weights", ["int8", "int4:32"])
def test_a_path_is_loaded_with_the_weights_of_the_text(weights):
    loaded = []

    def load(path, **options):
        loaded.append((path, options))
        return named(path)

    text = f"small:a:streaming:64:weights={weights}:draw=top"
    drafter = spec.make_drafter(text, load)
    assert loaded == [("a", {"weights": weights})] and drafter.weights == weights
    written = spec.text_of(drafter)
    assert spec.make_drafter(written, load).weights == weights
    assert sorted(written.split(":")) == sorted(text.split(":"))


def test_a_value_that_cannot_be_read_back_is_not_written():
    with pytest.raises(ValueError, match="'a:b', which must not contain ':'"):
        spec.text_of(Repeat(text="a:b"))


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [(int | None, "4", 4), (float, "1e-3", 1e-3), (bool, "True", True), (str, "x", "x")],
)
def test_values_have_the_type_of_their_option(annotation, text, value):
    assert parse(Option("a", annotation, None), text) == value


def test_the_options_of_any_drafter_have_their_types():
    assert type(Repeat(np.int64(3)).times) is int
    for wrong in ("3", 3.0, True, None):
        with pytest.raises(TypeError, match=f"times={wrong!r}: it must be an integer"):
            Repeat(wrong)


@struct.dataclass
class Repeat(Drafter):
    """Drafts the pending token again."""

    times: int = magicjax.option(1, "how often it is repeated at most", positional=True)
    text: str = magicjax.option("", "not used")

    def __post_init__(self):
        super().__post_init__()
        if self.times < 1:
            raise ValueError(f"times={self.times} must be at least 1")

    def check(self, target, tree, depth, context):
        if depth > self.times:
            raise ValueError(f"depth {depth} exceeds times={self.times}")

    def draw_methods(self, tree):
        return {"top"}

    def prefill(self, target, tokens, cache, stats, settings, previous=None):
        return ()

    def propose(self, target, state, root, cache, sampling, settings):
        parents = settings.tree.array
        return Proposal(jnp.repeat(root[:, None], len(parents), axis=1), parents, None), None

    def commit(self, target, state, draft, proposal, outcome):
        return state


@pytest.fixture(scope="module")
def tiny():
    return tiny_models.model()


@pytest.fixture
def installed(monkeypatch):
    """Installs `Repeat` as "repeat", and a function as "wrong"."""
    points = [
        importlib.metadata.EntryPoint("repeat", f"{Repeat.__module__}:Repeat", spec.GROUP),
        importlib.metadata.EntryPoint("wrong", "math:sqrt", spec.GROUP),
    ]
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: LOADED[self.name])
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [point for point in points if point.group == group],
    )


LOADED = {"repeat": Repeat, "wrong": len}


@pytest.mark.usefixtures("installed")
def test_a_drafter_of_another_package_has_a_name_and_options():
    assert make("repeat:3") == Repeat(3)
    assert spec.text_of(Repeat(3, text="x")) == "repeat:3:text=x"
    with pytest.raises(ValueError, match="did you mean 'repeat'"):
        make("repaet")
    with pytest.raises(ValueError, match="'wrong' is not a class of drafters"):
        make("wrong")


@pytest.mark.usefixtures("installed")
def test_generate_takes_texts(tiny):
    prompts = [np.arange(5, 25).tolist()]
    arguments = {"max_tokens": 6, "eos_token_id": []}
    plain = keywords.generate(tiny, prompts, **arguments)
    both = keywords.generate(
        tiny,
        prompts,
        drafter="repeat:2 + self:streaming:24:sinks=4",
        tree="chain:2 + chain:1",
        **arguments,
    )
    np.testing.assert_array_equal(both.tokens, plain.tokens)
    with pytest.raises(ValueError, match="2 trees for 1 drafters"):
        magicjax.generate(tiny, prompts, drafter="repeat", tree="chain:1 + chain:2")
    with pytest.raises(ValueError, match="depth 2 exceeds times=1"):
        magicjax.generate(tiny, prompts, drafter="repeat", tree="chain:2")


def test_an_object_that_is_no_drafter_is_told_what_it_lacks(tiny):
    class Half(Drafter):
        def check(self, target, tree, depth, context):
            pass

        def propose(self, target, state, root, cache, sampling, settings):
            pass

    class Stranger:
        def propose(self):
            pass

    with pytest.raises(TypeError, match="Half without an .*'commit', 'draw_methods', 'prefill'"):
        Half()
    with pytest.raises(
        TypeError, match="drafter has type Stranger: pass a text .* magicjax.Drafter"
    ):
        magicjax.generate(tiny, [[1, 2]], drafter=Stranger())


@pytest.mark.parametrize(
    ("proposed", "sampled", "message"),
    [
        (lambda p: p, False, "Wrong.propose returned Proposal: return .Proposal, what `commit`"),
        (lambda p: (p.tokens, None), False, "not a Proposal"),
        (lambda p: (p.replace(tokens=p.tokens[:, 1:]), None), False, r"int32\[1, 2\] for parents"),
        (lambda p: (p.replace(tokens=p.tokens * 1.0), None), False, r"float32\[1, 3\] for parents"),
        (lambda p: (p, None), True, "no draws under sampling: give Proposal its draws"),
    ],
)
def test_a_wrong_proposal_is_named(tiny, proposed, sampled, message):
    @struct.dataclass
    class Wrong(Repeat):
        def propose(self, target, state, root, cache, sampling, settings):
            return proposed(Repeat.propose(self, target, state, root, cache, None, settings)[0])

    with pytest.raises(TypeError, match=message):
        keywords.generate(
            tiny, [[1, 2]], drafter=Wrong(2), tree="chain:2", temperature=float(sampled)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"text": x[:, 1:]}, r"state\['text'\] as int32\[1, 3\], .* has int32\[1, 4\]"),
        (lambda x: {"text": x * 1.0}, r"state\['text'\] as float32\[1, 4\], .* has int32\[1, 4\]"),
        (
            lambda x: [x],
            r"structure PyTreeDef\(\[\*\]\), and the state before has PyTreeDef\({'text'",
        ),
    ],
)
@pytest.mark.parametrize("members", [1, 2])
def test_a_state_that_changes_is_named(tiny, change, message, members):
    @struct.dataclass
    class Growing(Repeat):
        def prefill(self, target, tokens, cache, stats, settings, previous=None):
            return {"text": tokens[:, :4]}

        def commit(self, target, state, draft, proposal, outcome):
            return change(state["text"])

    drafter = magicjax.Ensemble((Repeat(2), Growing(2))) if members == 2 else Growing(2)
    with pytest.raises(TypeError, match=f"^Growing.commit returned .*{message}") as error:
        magicjax.generate(tiny, [[1, 2]], drafter=drafter, tree="chain:2")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drawn", ["top", {"random"}])
def test_unknown_draw_methods_are_refused(tiny, drawn):
    @struct.dataclass
    class Wrong(Repeat):
        def draw_methods(self, tree):
            return drawn

    with pytest.raises(ValueError, match="draw_methods returned .*: return a set of with_repl"):
        keywords.generate(tiny, [[1, 2]], drafter=Wrong(), tree="chain:1", temperature=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("broken.Mine", "importing broken raises SyntaxError: .*; correct broken"),
        ("needs.Mine", "importing needs raises ModuleNotFoundError: .*; correct needs"),
        ("absent.Mine", "put the folder of absent.py on PYTHONPATH"),
        ("good.Repeet", "good has no 'Repeet'; did you mean 'Repeat'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_explained(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "needs.py").write_text("import not_there")
    (tmp_path / "good.py").write_text("class Repeat: pass")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        make(text)


def test_a_drafter_that_is_no_pytree_is_refused(tiny):
    required = ("check", "draw_methods", "prefill", "propose", "commit")
    plain = type("Plain", (Drafter,), {name: vars(Repeat)[name] for name in required})
    assert jax.tree_util.all_leaves([plain()])
    with pytest.raises(TypeError, match="Plain is not a pytree: decorate it with @flax.struct"):
        magicjax.generate(tiny, [[1, 2]], drafter=plain())
