"""Cases for meshes with stages; each function runs in a process with eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import magicjax
from magicjax.decoding import program_cache
from magicjax.decoding.decoder import Decoder
from magicjax.prediction import hlo
from sharding import STAGE, make_mesh
from tests.forget import forget_programs
from tests.magicjax import keywords, mesh_cases, tiny


def exchanged(case: str, mesh: list[int], micro_batches: int, layers: int) -> dict:
    """Returns what a step sends between and within stages, and what it copies."""
    drafter, tree, options, kv_heads = mesh_cases.CASES[case]
    request = keywords.prepare(
        mesh_cases.target(kv_heads, layers),
        mesh_cases.prompts(),
        drafter=drafter(kv_heads, None),
        tree=tree,
        max_tokens=24,
        eos_token_id=[],
        mesh=make_mesh(*mesh),
        micro_batches=micro_batches,
        **options,
    )
    state = Decoder(request).state_shapes()
    arguments = (request.target, request.drafter, state, state.rounds)
    program = program_cache.program("decode", request.settings, *arguments)
    text, keys = program.as_text(), state.cache.k[0]
    found = hlo.collectives(text, mesh[0] * mesh[1])
    return dict(
        between={c.kind: [c.count, c.bytes] for c in found if c.between},
        within=sorted({c.kind for c in found if not c.between}),
        keys=int(np.prod(keys.sharding.shard_shape(keys.shape))),
        copied=list(hlo.copied_sizes(text)),
        dtype=request.target.dtype.itemsize,
    )


def loaded(path: str, mesh: list[int], weights: str | None) -> dict:
    """Returns how stages divide a checkpoint, and whether its text is the same."""
    on = make_mesh(*mesh)
    load = functools.partial(magicjax.load, path, weights=weights)
    model, whole, draft = load(mesh=on), load(), load(mesh=on, stages=1)
    prompts = mesh_cases.prompts()
    options = dict(max_tokens=8, eos_token_id=[], tree=magicjax.chain(2))
    found = keywords.generate(
        model, prompts, drafter=magicjax.SmallModel(draft), mesh=on, **options
    )
    alone = keywords.generate(whole, prompts, drafter=magicjax.SmallModel(whole), **options)
    layers = [name for name in model.params["params"] if name.startswith("layers_")]
    return dict(
        same=all(map(np.array_equal, tiny.rows_of(found), tiny.rows_of(alone))),
        tau=found.stats.tau,
        slots=len(layers),
        first=list(model.params["params"]["layers_0"]["mlp"]["up"]["weight"].shape),
    )


def refusals(path: str) -> list[str]:
    """Returns the errors for stages that do not fit."""
    two, four = make_mesh(1, 1, 2), make_mesh(1, 1, 4)
    placed, alone = magicjax.load(path, mesh=two), mesh_cases.target(4)
    prompts, errors = mesh_cases.prompts(), []
    small = functools.partial(dict, tree=magicjax.chain(2))
    self_speculation = functools.partial(magicjax.SelfSpeculation, budget=24)
    for target, options in (
        (alone, dict(mesh=four)),
        (alone, dict(mesh=two, micro_batches=3)),
        (alone, dict(mesh=make_mesh(2, 4), micro_batches=2)),
        (alone, dict(micro_batches=2)),
        (placed, {}),
        (placed, dict(mesh=make_mesh(1, 2))),
        (alone, small(mesh=two, drafter=magicjax.SmallModel(placed))),
        (alone, small(mesh=two, drafter=self_speculation("pyramidkv"))),
        (alone, dict(mesh=two, drafter="auto")),
        (magicjax.offload(alone), dict(mesh=two)),
    ):
        try:
            keywords.generate(target, prompts, max_tokens=2, **options)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    for options in (dict(mesh=two, offload=True), dict(stages=1), dict(mesh=two, stages=3)):
        try:
            magicjax.load(path, **options)
        except ValueError as error:
            errors.append(str(error))
    return errors


def differs(what: str) -> bool:
    """Returns whether the text changes with an error in stages or micro-batches."""
    from magicjax.kv_cache import attend
    from magicjax.parallel import layouts

    wrong = {
        # Every micro-batch reads the first rows of the caches.
        "rows": (attend, "tree_attention", _with_first_rows(attend.tree_attention)),
        # The first stage's hidden states are used as the last ones.
        "last": (layouts.Pipelined, "last_hidden", lambda self, hidden, split: _from_first(hidden)),
    }
    owner, name, mistaken = wrong[what]
    right = getattr(owner, name)
    forget_programs()
    try:
        setattr(owner, name, mistaken)
        found = mesh_cases.generate("self", (1, 1, 2), micro_batches=4)
    finally:
        setattr(owner, name, right)
        forget_programs()
    return not np.array_equal(found.tokens, mesh_cases.on_one("self").tokens)


def _from_first(hidden):
    first = jnp.where(jax.lax.axis_index(STAGE) == 0, hidden, jnp.zeros_like(hidden))
    return jax.lax.psum(first, STAGE)


def _with_first_rows(tree_attention):
    def mistaken(*arguments, first_row=None, **options):
        first_row = first_row if first_row is None else jnp.zeros_like(first_row)
        return tree_attention(*arguments, first_row=first_row, **options)

    return mistaken
