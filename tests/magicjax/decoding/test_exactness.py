"""Greedy text equals plain decoding, whatever drafts it: a table of cases, and one test body.

Every token is what another implementation chooses after the whole text before it, and every row
ends by its own limit or its first EOS.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest

import magicjax
import models
from magicjax.drafters.spec import resolve
from magicjax.kv_cache import attend
from magicjax.policies import POLICIES
from tests.forget import forget_programs
from tests.fuzz import checks
from tests.magicjax import family_cases, keywords, oracle, recomputation, tiny
from tests.magicjax.decoding import test_rings
from tests.magicjax.kv_cache.test_loop_caches import prompts_around_the_budget
from tests.quick import quick


@dataclasses.dataclass(frozen=True)
class Case:
    """What decodes.

    Attributes:
      drafter, tree: as in the command line, with the names of `draft_model` as paths; None: plain
        decoding.
      feature: of `FEATURES`.
      batch: the number of rows, if the feature has no prompts of its own.
      layout: of `LAYOUTS`.
      accepts: the least acceptance rate.
    """

    drafter: str | None = None
    tree: str | None = None
    feature: str = "float32"
    batch: int = 8
    layout: str = "batch"
    accepts: float = 0.0

    def __str__(self) -> str:
        parts = [self.drafter or "plain", *filter(None, [self.tree])]
        parts += [self.feature] * (self.feature != "float32")
        parts += [f"batch {self.batch}"] * (self.batch != 8)
        return ", ".join(parts + [self.layout] * (self.layout != "batch"))


def cases(drafters, trees, features=("float32",), batches=(8,), **options) -> list[Case]:
    """Returns the cases of all drafters, trees, features and batch sizes."""
    every = itertools.product(drafters, trees, features, batches)
    return [Case(*values, **options) for values in every]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a feature changes.

    Attributes:
      target, near: the target, and a draft model near it.
      prompts: of a batch size and a seed.
      new_tokens: of a row.
      eos: how many tokens end a row.
      every_end: whether rows end in every place of a round, by a limit or an EOS.
      logits: of a target and a text, by another implementation.
      ties: the share of rows in which rounding may choose another token.
    """

    target: magicjax.Model
    near: magicjax.Model
    prompts: Callable = tiny.prompts
    new_tokens: int = tiny.NEW
    eos: int = 1
    every_end: bool = False
    logits: Callable = oracle.logits
    ties: float = 1 / 8


def of_tiny(target="target", near="near", dtype="float32", **options) -> Setup:
    return Setup(tiny.model(target, dtype), tiny.model(near, dtype), **options)


def of_family(kind: str, **options) -> Setup:
    target, near = (family_cases.model(kind, tiny.VOCAB, noise) for noise in (0.0, 0.05))
    return Setup(target, near, logits=recomputation.logits, ties=0, **options)


def of_rings(kind: str) -> Setup:
    target, near = (test_rings.model(kind, noise) for noise in (0.0, 0.03))
    own = dict(prompts=lambda *_: test_rings.prompts(), new_tokens=test_rings.NEW)
    return Setup(target, near, **own, logits=test_rings.logits, ties=0)


def with_quantized_weights() -> Setup:
    target = tiny.quantized(tiny.model(), "int4:8")
    whole = tiny.dequantized(target)
    return Setup(target, tiny.model("near"), logits=lambda _, text: oracle.logits(whole, text))


def with_a_draft_of_short_context() -> Setup:
    """Returns a draft model with fewer positions than the text."""
    model = tiny.model("other")
    config = dataclasses.replace(model.config, max_positions=40)
    short = dataclasses.replace(model, module=models.build(config, "float32"))
    rows = [np.resize(prompt, 90 + n) for n, prompt in enumerate(tiny.prompts(3))]
    return Setup(tiny.model(), short, prompts=lambda *_: rows)


def long_prompts(*_) -> list[np.ndarray]:
    """Returns prompts longer than the largest budget, about a budget, and short."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, tiny.VOCAB, n).astype(np.int32) for n in (700, 512, 130, 33, 7)]


FEATURES: dict[str, Callable[[], Setup]] = {
    "float32": lambda: of_tiny(every_end=True),
    "float64": lambda: of_tiny(dtype="float64", every_end=True, ties=0),
    "two EOS": lambda: of_tiny(every_end=True, eos=2),
    # Outputs shorter than a round, and one that overwrites a ring of 7 slots 14 times.
    **{f"max_tokens={n}": functools.partial(of_tiny, new_tokens=n) for n in (1, 2, 7, 100)},
    "around the budget": lambda: of_tiny(prompts=lambda *_: prompts_around_the_budget()),
    "kv_dtype=int8": lambda: of_tiny("int8 cache"),
    "weights=int4:8": with_quantized_weights,
    "draft in bfloat16": lambda: Setup(tiny.model(), tiny.model("near", "bfloat16")),
    "draft of short context": with_a_draft_of_short_context,
    "long": lambda: of_tiny("long", "long near", prompts=long_prompts),
    "all learned positions": lambda: of_family(
        "opt", prompts=lambda *_: [np.arange(40) % tiny.VOCAB, np.arange(3)]
    ),
    **{kind: functools.partial(of_family, kind) for kind in family_cases.KINDS},
    **{kind: functools.partial(of_rings, kind) for kind in test_rings.KINDS},
}


@functools.cache
def setup_of(feature: str) -> Setup:
    return FEATURES[feature]()


_known_logits: dict[tuple, np.ndarray] = {}  # most drafters of a feature have the same text


def logits_of(feature: str, target: magicjax.Model, text) -> np.ndarray:
    """Returns the logits after every token of a text."""
    key = feature, *text
    if key not in _known_logits:
        _known_logits[key] = setup_of(feature).logits(target, text)
    return _known_logits[key]


def draft_model(setup: Setup, name: str, weights: str | None = None) -> magicjax.Model:
    """Returns the model that a drafter's text names."""
    if name == "head":
        return tiny.head(setup.target)
    if name == "mtp_head":
        return tiny.mtp_head(setup.target)
    if name == "other":
        return tiny.model("other", setup.target.dtype.name)
    if name == "few":  # tokens
        return tiny.few(setup.near, tiny.VOCAB * 3 // 4)
    model = {"same": setup.target, "near": setup.near}[name]
    return tiny.quantized(model, weights) if weights else model


def drafting(case: Case) -> tuple:
    """Returns the drafter and the tree of a case."""
    load = functools.partial(draft_model, setup_of(case.feature))
    drafter, tree = resolve(case.drafter, case.tree, load)
    return (tiny.drafter("suffix") if case.drafter == "suffix" else drafter), tree


def in_batch(target, prompts, **options) -> tuple:
    """Returns rows of new tokens, and statistics."""
    output = keywords.generate(target, prompts, **options)
    return tiny.rows_of(output), output.stats


def offloaded(target, prompts, **options) -> tuple:
    return in_batch(magicjax.offload(target), prompts, **options)


def streamed(target, prompts, **options) -> tuple:
    rounds = zip(*keywords.stream(target, prompts, **options), strict=True)
    return [np.concatenate(parts) for parts in rounds], None


def in_engine(target, prompts, max_tokens, eos_token_id, **options) -> tuple:
    config = dataclasses.replace(test_rings.ENGINE, eos_token_id=eos_token_id)
    engine = magicjax.Engine(target, config=config, **options)
    params = [magicjax.SamplingParams(max_tokens=limit) for limit in max_tokens]
    handles = list(map(engine.submit, prompts, params))
    engine.run()
    return [handle.result().tokens for handle in handles], None


LAYOUTS = dict(batch=in_batch, stream=streamed, engine=in_engine, offloaded=offloaded)


def compare(feature: str, prompts, rows, limits, eos, tally) -> None:
    """Asserts that rows have the text of plain decoding, and end where they must."""
    target, own = setup_of(feature).target, functools.partial(logits_of, feature)
    for prompt, row, limit in zip(prompts, rows, limits, strict=True):
        checks.end(row, limit, eos)
        tally.rows += 1
        tally.ties += checks.greedy(target, prompt, row, own)


def check(case: Case, tally) -> None:
    """Compares whole texts and, if the feature has them, texts that end in every place."""
    setup, (drafter, tree) = setup_of(case.feature), drafting(case)

    def run(eos, limits=None, seed=0):
        prompts = setup.prompts(case.batch, seed)
        limits = limits or [setup.new_tokens] * len(prompts)
        options = dict(drafter=drafter, tree=tree, max_tokens=limits, eos_token_id=eos)
        rows, stats = LAYOUTS[case.layout](setup.target, prompts, **options)
        compare(case.feature, prompts, rows, limits, eos, tally)
        return prompts, rows, stats

    never = [tiny.NEVER] * setup.eos
    prompts, rows, stats = run(never)
    if setup.new_tokens >= tiny.NEW:  # texts depend on their prompts
        assert len({row.tobytes() for row in rows}) >= 3 / 4 * len(rows)
    assert not case.accepts or stats.acceptance_rate >= case.accepts
    if case.feature in ("kv_dtype=int8", "weights=int4:8"):  # rounding changes the text
        with pytest.raises(AssertionError, match="instead of"):
            compare("float32", prompts, rows, [tiny.NEW] * len(rows), never, oracle.Tally())
    if setup.every_end:
        run(never, seed=1)
        # Limits one apart end their rows in every place of a round. One row keeps the longest, so
        # that the program is the same.
        for shift in range(0, 8, 3):
            limits = [tiny.NEW - (row + shift) % 9 for row in range(case.batch)]
            limits[shift % case.batch] = tiny.NEW
            run(never, limits)
        # An EOS is what a row says at that offset; others say it earlier, later, or never.
        for offset in range(0, tiny.NEW, 3):
            of_rows = [rows[(offset + n) % case.batch] for n in range(setup.eos)]
            run([int(row[offset - n]) for n, row in enumerate(of_rows)])
    assert tally.ties <= (max(1, tally.rows * setup.ties) if setup.ties else 0)


BATCHES, FAMILIES, RINGS = (1, 3, 8), [*family_cases.KINDS], test_rings.KINDS
CHAIN, WIDE, IRREGULAR = "chain:4", "expansion:2,2,1", "parents:-1,0,0,1,0,1,3,5,7,6"
CASCADED, BRANCHES, DYNAMIC = "chain:2 -> chain:4", "expansion:3,1,1,1", "dynamic:9,4,3"
TREES = (*(f"chain:{n}" for n in range(1, 9)), WIDE, "expansion:1,1,3,1,1,1,1,1", IRREGULAR)
SELF, NEAR, LOOKUP, EAGLE = "self:streaming:12:sinks=2", "small:near", "prompt-lookup", "eagle:head"
HYBRID, WITHOUT_STATES = family_cases.HYBRID, family_cases.WITHOUT_STATES
MTP = "mtp:mtp_head:12:sinks=2"
RING, REFRESHED = "self:streaming:64", "self:snapkv:64:refresh_every=3"
ENSEMBLE, CASCADE = f"small:other + {NEAR}", f"{NEAR} -> {SELF}"
ALL_PAGES = "quest:64:page_size=4"
QUEST, LAYERS, COPY = "quest:12:page_size=4", f"{SELF}:layers=1", "full:weights=int4:8"
MOVING_SINKS = f"{NEAR}:streaming:19:sinks=3:sink_positions=in_cache"

# A case of each kind of drafter, tree, layout and feature; engines run an ensemble and suffix
# lookup. All pairs of drafter and tree for every batch size are slow.
QUICK = [
    *(Case(batch=batch) for batch in BATCHES),
    Case(SELF, CHAIN),
    Case(SELF, CHAIN, layout="stream"),
    Case(SELF, CHAIN, "max_tokens=2"),
    Case(NEAR, IRREGULAR),
    Case(NEAR, DYNAMIC),
    Case(LOOKUP, BRANCHES, "two EOS", batch=3),
    Case(EAGLE, WIDE),
    Case(MTP, WIDE, "qwen3-next"),
    Case(CASCADE, CASCADED),
    Case(SELF, WIDE, "weights=int4:8", batch=3, accepts=0.02),
    Case(QUEST, WIDE, "kv_dtype=int8"),
    Case(NEAR, IRREGULAR, "qwen3-next", accepts=0.02),  # the draft model has states too
    Case(SELF, WIDE, "gemma-4", accepts=0.02),  # heads of two sizes
    Case(REFRESHED, CHAIN, "mixed", layout="engine"),
    Case(RING, CHAIN, "windowed", accepts=0.999),  # windows within the budget: as in the target
    Case("self:h2o:32:refresh_every=4:kv_dtype=int8", DYNAMIC, "long"),
    Case("full", "chain:3", "long", accepts=1.0),
]
DRAFTERS = (SELF, "small:other", "small:same", NEAR, ENSEMBLE)
OTHERS = (QUEST, LAYERS, "small:few", EAGLE, f"{EAGLE}:12:sinks=2", "mtp:mtp_head")
SEVERAL, ONE_TREE = f"{EAGLE} + {LOOKUP} -> {QUEST}", f"{NEAR} -> {COPY}"
CHAINS = ("chain:1", CHAIN, "chain:8")
# All layers of Mistral have a window, and only the newest entries of those are drafted with.
PINNING = [family for family in FAMILIES if family != "mistral"]
PINS = ("streaming", "snapkv", "pyramidkv", "random")
SPARSE = [
    f"self:{policy}:{budget}{refresh}{kv_dtype}"
    for policy, budget, refresh, kv_dtype in itertools.product(
        *(POLICIES, (32, 128, 512), ("", ":refresh_every=4")),
        ("", ":kv_dtype=int8", ":kv_dtype=int4"),
    )
    if policy != "streaming" or not refresh
] + [f"quest:{budget}:refresh_every={n}:page_size=8" for budget in (32, 128, 512) for n in (1, 4)]
SLOW = [
    *cases([*DRAFTERS, *OTHERS], [*TREES, DYNAMIC], batches=BATCHES),
    *cases([LOOKUP], [*CHAINS, BRANCHES], batches=BATCHES),
    *cases(["suffix"], [*CHAINS, DYNAMIC], batches=BATCHES),
    *cases([CASCADE, SEVERAL], [f"chain:2 -> chain:{n}" for n in (2, 4, 8)], batches=BATCHES),
    *cases([ONE_TREE], ["chain:1", WIDE, IRREGULAR, DYNAMIC], batches=BATCHES),
    # Masks of more than 31 nodes do not fit into an int32.
    Case(NEAR, "dynamic:64,5,5", batch=3, accepts=0.1),
    Case(SELF, "expansion:4,3,2,1", batch=3, accepts=0.1),
    *cases([f"{NEAR}:weights=int8", f"{SELF}:weights=int4:8", COPY], [WIDE], batches=[3]),
    *cases(DRAFTERS, TREES, ["float64"], BATCHES),
    Case(MOVING_SINKS, CHAIN, "float64", 3),
    *cases([MOVING_SINKS], [CHAIN, IRREGULAR], ["draft of short context"]),
    Case(NEAR, "chain:3", "draft in bfloat16", accepts=0.05),
    *[Case(SELF, CHAIN, "max_tokens=1"), Case(SELF, CHAIN, "max_tokens=7")],
    Case(SELF, IRREGULAR, "around the budget"),
    Case("self:streaming:6:sinks=1", IRREGULAR),  # the smallest budget
    Case("self:streaming:8:sinks=1", "chain:3", "max_tokens=100", 3, accepts=0.02),
    Case(SELF, "chain:8", "all learned positions"),
    *cases([SELF, LAYERS, ENSEMBLE, EAGLE], [WIDE], ["kv_dtype=int8"]),
    *[Case(NEAR, DYNAMIC, "kv_dtype=int8"), Case(CASCADE, CASCADED, "kv_dtype=int8")],
    *cases([None], [None], ["kv_dtype=int8", "all learned positions", *FAMILIES, *RINGS]),
    *cases([NEAR], [IRREGULAR], ["all learned positions", *RINGS]),
    *cases([LOOKUP], [CHAIN], [*FAMILIES, *RINGS]),
    *cases([SELF], [WIDE, DYNAMIC], FAMILIES, accepts=0.02),
    *cases([NEAR], [IRREGULAR], FAMILIES, accepts=0.02),
    *cases([f"{NEAR}:streaming:32"], [CHAIN], WITHOUT_STATES, accepts=0.02),
    *cases(["suffix", EAGLE, MTP, NEAR], [DYNAMIC], HYBRID, BATCHES),
    *cases([CASCADE, f"{LOOKUP} -> full:weights=int8"], [CASCADED], HYBRID),
    *cases(["self:h2o:24:refresh_every=2", f"{SELF}:layers=0-1"], [WIDE], HYBRID),
    *cases([REFRESHED], [CHAIN], HYBRID, layout="stream"),
    # The budget holds the texts, and a draft continues the target's states.
    *cases(["full", "self:streaming:64", ALL_PAGES], [CHAIN], HYBRID, accepts=0.99),
    *cases(["full", "self:streaming:64", ALL_PAGES], [DYNAMIC], HYBRID, accepts=0.9),
    *cases([f"{QUEST}:refresh_every=2", f"{QUEST}:layers=0-1"], [WIDE], HYBRID),
    *cases([ENSEMBLE, f"small:other + {LOOKUP}"], ["chain:2"], HYBRID),
    *cases(["self:snapkv:24:refresh_every=2"], [CHAIN], PINNING, accepts=0.02),
    *cases(["self:tova:24"], [WIDE], PINNING, accepts=0.02),
    *cases([SELF], [WIDE], family_cases.INDEPENDENT, layout="offloaded"),
    *cases([QUEST], [WIDE], ["gemma-2", *HYBRID], layout="offloaded"),
    # A wrong window of the draft would lower the acceptance rate.
    *cases([RING], [WIDE], RINGS, accepts=0.3),
    *cases(["full:weights=int8"], [CHAIN], RINGS, accepts=0.3),
    *cases([RING], [DYNAMIC], RINGS),
    *cases([f"{RING}:kv_dtype=int8", f"{NEAR} + {RING}"], [CHAIN], RINGS),
    *cases([f"{NEAR} -> {RING}"], [CASCADED], RINGS),
    *cases([REFRESHED, "self:pyramidkv:64", "quest:64:page_size=4", EAGLE], [CHAIN], ["mixed"]),
    *cases([f"{NEAR}:streaming:64", f"{RING}:layers=1"], [CHAIN], ["mixed"]),
    Case("self:h2o:64", WIDE, "mixed"),
    # More queries than a ring has spare slots: no token of a prompt may be prefilled twice.
    Case("self:snapkv:256:window=200", CHAIN, "mixed"),
    Case(feature="mixed", layout="engine"),
    Case(NEAR, IRREGULAR, "mixed", layout="engine"),
    *cases([REFRESHED, NEAR], [CHAIN], ["heads", "shared"], layout="engine"),
    Case(REFRESHED, CHAIN, "mixed", layout="offloaded"),
    *cases(SPARSE, ["chain:3", WIDE, DYNAMIC], ["long"]),
    Case(f"{NEAR}:streaming:40", "chain:3", "long"),
    *[Case(f"{NEAR}:snapkv:40", WIDE, "long"), Case(f"{NEAR}:h2o:40", DYNAMIC, "long")],
    # The ring alone holds the longest text.
    *cases([f"self:{policy}:1536" for policy in PINS], ["chain:3"], ["long"], accepts=1.0),
]


@pytest.mark.parametrize(
    "case", quick([*QUICK, *(case for case in SLOW if case not in QUICK)], *QUICK), ids=str
)
def test_greedy_text_is_that_of_plain_decoding(case, tally, request):
    if case.feature == "float64":
        request.getfixturevalue("float64")
    check(case, tally)


def test_the_drafters_reach_every_branch():
    """Partial acceptance: the test above would be easy if all or nothing were accepted."""
    accepted = {
        kind: tiny.generate(8, 0, kind, tree).stats.acceptance_by_depth
        for kind, tree in [("self", "chain4"), ("near", "irregular")]
    }
    for kind, shares in accepted.items():
        assert all(0.05 < share < 0.95 for share in shares), kind


@pytest.mark.usefixtures("float64")
def test_the_loop_computes_in_float64_there():
    output = tiny.generate(8, 0, dtype="float64")
    float32 = tiny.model().params["params"]["embedding"].nbytes
    assert tiny.model("target", "float64").params["params"]["embedding"].nbytes == 2 * float32
    # Two layers of keys and values: 8 rows, 2 heads, 64 slots, 8 numbers of 8 bytes.
    assert output.stats.kv_bytes_target == 2 * 2 * 8 * 2 * 64 * 8 * 8
    assert output.tokens.dtype == np.int32


@pytest.mark.parametrize("rounds", [True, False])
def test_a_pass_attends_to_its_own_tokens_as_they_are_stored(rounds, monkeypatch):
    if not rounds:  # the control
        monkeypatch.setattr(attend, "rounded", lambda k, v, slots: (k, v))
        forget_programs()
    target, prompts = tiny.model("int8 cache"), tiny.prompts(3)
    options: dict = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, logprobs=0)
    found = keywords.generate(target, prompts, **options)
    errors = []
    for prompt, row, logprobs in zip(prompts, tiny.rows_of(found), found.logprobs, strict=True):
        logits = oracle.logits(target, [*prompt, *row])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, row[:, None], 1)[:, 0]
        wanted = chosen - np.log(np.exp(logits).sum(-1))
        errors.append(np.abs(logprobs.chosen - wanted))
    assert (np.median(errors) < 1e-5) == rounds
    if not rounds:
        forget_programs()


# Negative controls of the comparison itself.


def test_the_comparison_catches_a_wrong_token_a_short_row_and_a_tie_that_is_none():
    prompts, wanted = tiny.prompts(3), tiny.expected(3)
    wrong = [row.copy() for row in wanted]
    wrong[1][5] = (wrong[1][5] + 1) % tiny.VOCAB
    limits, eos = [tiny.NEW] * 3, [tiny.NEVER]
    compare("float32", prompts, wanted, limits, eos, oracle.Tally())
    for found in (wrong, [wanted[0], wanted[1][:-1], wanted[2]]):
        with pytest.raises(AssertionError, match="instead of"):
            oracle.Tally().compare(tiny.model(), prompts, wanted, found)
        with pytest.raises(AssertionError, match="instead of|ends before 24 tokens"):
            compare("float32", prompts, found, limits, eos, oracle.Tally())


def test_the_comparison_counts_a_tie_but_not_where_none_is_allowed():
    target = tiny.model()
    params = {**target.params["params"]}
    # Two tokens with the same logits: which one is said is a matter of rounding.
    params["unembedding"] = np.array(params["unembedding"])
    prompt, (said, *_) = tiny.prompts(1)[0], tiny.expected(1)[0]
    twin = (int(said) + 1) % tiny.NEVER
    params["unembedding"][twin] = params["unembedding"][said]
    tied = type(target)(target.module, {"params": params})
    rows = np.array([[said, 0]]), np.array([[twin, 5]])
    tally = oracle.Tally()
    tally.compare(tied, [prompt], *rows)
    assert (tally.rows, tally.ties) == (1, 1)
    assert checks.greedy(tied, prompt, np.array([twin])) == 1
    with pytest.raises(AssertionError, match="margin 0.0e"):
        tally.compare(tied, [prompt], *rows, ties_allowed=False)


def test_the_texts_are_varied_enough_to_tell_a_mistake():
    texts = [row for seed in range(2) for row in tiny.expected(8, seed)]
    assert np.mean([len(set(row.tolist())) for row in texts]) > tiny.NEW / 3
    assert len({row.tobytes() for row in texts}) == len(texts)
    assert all(tiny.NEVER not in row for row in texts)
