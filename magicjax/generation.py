"""The public calls: `load` a model, `generate` texts, or `stream` them round by round."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

import models
from magicjax import placement
from magicjax.autotune import auto
from magicjax.autotune.auto import Auto, Choice
from magicjax.decoding import program_cache
from magicjax.decoding.request import Request, prepare
from magicjax.decoding.runner import Output, output_of, run, start, tell, timed
from magicjax.drafters import Drafter
from magicjax.model import Model
from magicjax.parallel import offloading, pipeline_stages
from magicjax.trees.token_tree import Tree
from sharding import STAGE, factored, processes


def load(
    source: str | os.PathLike,
    dtype: Any = None,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    shards: int | None = None,
    stages: int | None = None,
    offload: bool | Literal["int8"] = False,
) -> Model:
    """Returns a model from a directory in Hugging Face format, or a preset with random weights.

    Args:
      source: a directory (config.json, safetensors, tokenizer files), or the name of a preset
        (`models.PRESETS`), whose weights are drawn at random.
      dtype: of parameters, caches and activations; None: as stored (presets: bfloat16).
      seed: of a preset's weights.
      mesh: of devices (`make_mesh`): every device gets its part, and none the whole.
      shards: over how many devices of the mesh's `model` axis a small draft is divided, and then
        held several times; None: all. 1: every device has all of it.
      stages: over how many stages of the mesh its layers are divided; None: all, as a target's are,
        but of a model with `shards`. 1: every stage has all of them, as of a small draft.
      offload: keep the blocks' weights in host memory, and stream them to the device in every pass:
        for models that the device cannot hold. "int8": quantized for each output channel, so that
        less is streamed; the weights are not quite the same then.

    Raises:
      FileNotFoundError, ValueError: no such directory or preset; a checkpoint that is not whole; a
        mesh over which the model does not divide; host memory that is too small.
    """
    path, int8 = pathlib.Path(source), offloading.wants_int8(offload)
    if shards is not None and mesh is None:
        raise ValueError(f"shards={shards} says how a mesh is used: pass mesh, or leave it out")
    place, blocks = None, None
    if mesh is not None:
        place = placement.parameter_shardings(models.build(config_of(source)), shards, mesh)
    divided = _stages(stages, shards, mesh)
    if divided > 1:
        return _load_in_stages(source, dtype, seed, mesh, divided, offload)
    if path.is_dir():
        checkpoint = models.load_checkpoint(path, dtype, place=place, mapped_blocks=bool(offload))
        module, params = checkpoint.module, checkpoint.params
        if offload:
            params, layers = models.split_blocks(params)
            blocks = offloading.stack(module, layers, int8, place)
        return _of_checkpoint(path, checkpoint, params=params, shards=shards, blocks=blocks)
    module = models.build(config_of(source), "bfloat16" if dtype is None else dtype)
    params = models.init_params(module, seed, place, blocks=not offload)
    if offload:
        blocks = offloading.stack(module, models.init_blocks(module, seed), int8, place)
    return Model(module, params, name=str(source), shards=shards, blocks=blocks)


def _stages(stages: int | None, shards: int | None, mesh: Mesh | None) -> int:
    """Returns over how many stages a model's layers are divided, checked."""
    of_mesh = 1 if mesh is None else factored(mesh).shape[STAGE]
    if stages is not None and mesh is None:
        raise ValueError(f"stages={stages} says how a mesh is used: pass mesh, or leave it out")
    if stages not in (None, 1, of_mesh):
        raise ValueError(
            f"stages={stages}, and the mesh has {of_mesh}: a target is divided over all of them, "
            "leave stages out; every one has all of a small draft, stages=1"
        )
    if shards is not None and stages is None:
        return 1  # only a small draft has shards
    return of_mesh if stages is None else stages


def _load_in_stages(
    source: str | os.PathLike, dtype: Any, seed: int, mesh: Any, stages: int, offload: Any
) -> Model:
    """Returns a target whose layers are divided over stages; each process loads its own part."""
    if offload:
        raise ValueError(
            f"offload={offload!r} on a mesh with stages is not supported: stages hold their "
            "layers; leave offload out, or use a mesh without stages"
        )
    path, config = pathlib.Path(source), config_of(source)
    pipeline_stages.check(config.num_layers, stages)
    place = placement.parameter_shardings(models.build(config), None, mesh)

    def wanted(module):
        return pipeline_stages.shardings(module, stages, factored(mesh), place)

    if not path.is_dir():
        module = models.build(config, "bfloat16" if dtype is None else dtype)
        params = pipeline_stages.init_params(module, seed, wanted(module), stages)
        return Model(module, params, name=str(source), stages=stages)
    checkpoint = models.load_checkpoint(path, dtype, place=place, mapped_blocks=True)
    module = checkpoint.module
    params = pipeline_stages.load_params(checkpoint.params, wanted(module), stages, module.dtype)
    return _of_checkpoint(path, checkpoint, params=params, stages=stages)


def _of_checkpoint(path: pathlib.Path, checkpoint: models.Checkpoint, **fields: Any) -> Model:
    """Returns the model of a checkpoint, with what users need around it."""
    return Model(
        module=checkpoint.module,
        tokenizer=models.load_tokenizer(path),
        name=path.name,
        eos_token_ids=checkpoint.eos_token_ids,
        pad_token_id=checkpoint.pad_token_id,
        **fields,
    )


def skeleton(source: str | os.PathLike, *, shards: int | None = None) -> Model:
    """Returns the model that `load` makes of a source, without weights, tokenizer and end tokens.

    It is enough for `magicjax.decoding.request.prepare`, which says what is wrong before weights
    are loaded.
    """
    module = models.build(config_of(source))
    return Model(module, params=None, name=str(source), shards=shards)


def config_of(source: str | os.PathLike) -> models.Config:
    """Returns the config of the model that `load` makes of a source, without its weights.

    Raises:
      FileNotFoundError: a directory without config.json; no directory, but written like a path.
      ValueError: a config that is not supported; neither a directory nor a preset.
    """
    if pathlib.Path(source).is_dir():
        return models.load_config(source)
    if os.sep in str(source) or str(source).startswith("."):
        raise FileNotFoundError(f"{source} is no directory: give one with config.json, or a preset")
    try:
        return models.preset(str(source))
    except ValueError as error:
        raise ValueError(f"{str(source)!r} is no directory, and {error}") from error


def generate(
    target: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: Drafter | Auto | Choice | Literal["auto"] | None = None,
    tree: Tree | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    do_sample: bool = False,
    temperature: float | Sequence[float] | None = None,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    seed: int | None = None,
    verifier: str | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    backend: str | None = None,
    mesh: Mesh | None = None,
    micro_batches: int | None = None,
) -> Output:
    """Returns the target's own continuation of every prompt, and statistics.

    With a drafter, greedy tokens are the same as without one, and sampled ones have the same joint
    distribution; only the time differs. A row's text depends on its prompt, its parameters, the
    seed and its place in `prompts`, not on the other rows.

    Args:
      target: as `load` returns it.
      prompts: texts, or token ids; rows may differ in length.
      drafter: who proposes; None: plain decoding, one token a pass. "auto" tries drafters on these
        prompts and plans which of them pays, if any (`magicjax.Auto` says how); the output's
        `choice` can be given as a drafter later.
      tree: what it proposes in a round; None: chain(4).
      max_new_tokens: of every row, or one for each row.
      do_sample: draw tokens from the target's distribution, instead of taking the most likely.
      temperature: with do_sample, logits are divided by it; None: 1. This and the next two apply
        to target and drafts alike, and may be one number or one for each row.
      top_k: with do_sample, how many of the most likely tokens can be drawn; None or 0: all.
      top_p: with do_sample, the most likely tokens whose probabilities reach it can be drawn, of
        those that top_k left; None or 1: all.
      seed: with do_sample; the same seed gives the same texts. None: 0.
      verifier: who decides on drafted tokens. None: greedy, or with do_sample the rule that is
        exact for how the drafter draws (mss). naive, SpecInfer's baseline, samples the target and
        follows where a drafted token agrees: the very tokens of plain sampling.
      eos_token_id: what ends a row, one or several; None: the target's own; []: nothing.
      pad_token_id: what fills `tokens` behind a row's end; None: the target's own, else EOS.
      backend: of the attention (`pallas_kernels.BACKENDS`); None: xla.
      mesh: of devices (`magicjax.make_mesh`); None: one device. Models that were loaded for it
        (`load(..., mesh=mesh)`) lie where they should, others are moved in every call.
      micro_batches: in how many parts the rows of a group of devices go through the stages of such
        a mesh, so that stages work at the same time; a divisor of the rows. None: as many as make
        a pass fastest, by the bytes that it reads.

    Raises:
      ValueError, TypeError: bad input, before anything is compiled: an empty or too long prompt,
        tokens outside the vocabulary, a tree without a drafter, a temperature of 0 or below, a
        top_p outside (0, 1], a verifier that is not exact for the drafter, a drafter that does not
        fit the target, a budget too small for the tree, an unknown backend, a mesh over which
        models or rows do not divide.
    """
    options: dict[str, Any] = dict(
        tree=tree,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        verifier=verifier,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        backend=backend,
        mesh=mesh,
        micro_batches=micro_batches,
    )
    if isinstance(drafter, Auto | Choice | str):
        return auto.generate(target, prompts, drafter, options)
    request = prepare(target, prompts, drafter=drafter, **options)
    tell(request)
    programs = program_cache.count()
    state, prefill_s, compiling_start = start(request)
    state, decode_s, compiling_decode = run(request, request.settings, state)
    return output_of(
        request,
        state,
        prefill_s=prefill_s,
        decode_s=decode_s,
        compile_s=compiling_start + compiling_decode,
        compilations=program_cache.count() - programs,
    )


def stream(
    target: Model, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any
) -> Iterator[list[Int[np.ndarray, "T"]]]:
    """Yields, after prefill and after every round, each row's newly emitted tokens.

    The same step as `generate`'s compiled loop, called from Python: same tokens, and a word with
    the host after each round. The generator's return value is the `Output`.

    Args:
      target, prompts, options: as for `generate`. A drafter that is to be chosen is, in a prefill
        of its own, and then drafts the tree that was planned: nothing is planned anew.
    """
    unknown = options.keys() - (prepare.__kwdefaults__ or {}).keys() | (options.keys() & {"put"})
    if unknown:
        raise TypeError(f"stream() has no option {sorted(unknown)[0]!r}")
    drafter = options.get("drafter")
    if isinstance(drafter, Auto | Choice | str):
        choice, request = auto.fixed(target, prompts, **options)
        return _stream(request, choice)
    return _stream(prepare(target, prompts, **options))


def _stream(request: Request, choice: Choice | None = None):
    tell(request)
    programs = program_cache.count()
    state, prefill_s, compile_s = start(request)
    decode_s, told = 0.0, np.zeros(len(request.prompts), np.int32)
    while True:
        emitted, output, ended = processes.fetch((state.emitted, state.output, state.ended))
        yield [row[a:b] for row, a, b in zip(output, told, emitted, strict=True)]
        told = emitted
        if ended.all():
            break
        arguments = request.target, request.drafter, state
        step, compiling = program_cache.program("step", request.settings, *arguments)
        state, seconds = timed(step, *arguments)
        compile_s, decode_s = compile_s + compiling, decode_s + seconds
    output = output_of(
        request,
        state,
        prefill_s=prefill_s,
        decode_s=decode_s,
        compile_s=compile_s,
        compilations=program_cache.count() - programs,
    )
    return dataclasses.replace(output, choice=choice)
