"""Training: next-token loss on windows of a token stream, in phases of growing context.

Every batch is a function of seed and step, so a resumed run reads the same data and ends with the
same weights. Attention processes static chunks of queries, each with the keys up to its end, so
that no T x T matrix is stored.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int
from optax import contrib
from tqdm import tqdm

import models
from magicjax.kv_cache import state_layers
from models.gated_delta import DeltaNetInputs

QUERY_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of training: `steps` batches of `batch` windows of `context` tokens."""

    context: int
    batch: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of a training run.

    Attributes:
      phases: phases in order, under one learning rate schedule.
      learning_rate: peak of Muon, for the matrices of the blocks. It is reached after `warmup`
        steps and decays linearly to a tenth over the last `decay` share of the steps.
      adam_learning_rate: peak of Adam, for all other parameters, with the same schedule.
      weight_decay: for the matrices of the blocks only.
      seed: seed of initial weights and batches.
      checkpoint_every: steps between checkpoints.
    """

    phases: tuple[Phase, ...]
    learning_rate: float
    adam_learning_rate: float = 3e-3
    warmup: int = 50
    decay: float = 0.6
    weight_decay: float = 0.05
    seed: int = 0
    checkpoint_every: int = 100

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def causal_attention(q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], v):
    """Causal attention in chunks of queries, whose backward pass recomputes the scores."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    if group > 1:
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))

    @functools.partial(jax.checkpoint, static_argnums=3)
    def chunk(q, k, v, start):
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32)
        visible = jnp.arange(k.shape[2]) <= start + jnp.arange(q.shape[2])[:, None]
        scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -1e30)
        return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores).astype(v.dtype), v)

    outs = []
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        outs.append(chunk(q[:, :, start:end], k[:, :, :end], v[:, :, :end], start))
    return jnp.concatenate(outs, 2).transpose(0, 2, 1, 3), None


def over_whole_texts(q, *keys_values):
    """Returns what a layer reads of texts without a cache: its attention, or its states."""
    if not isinstance(q, DeltaNetInputs):
        return causal_attention(q, *keys_values)
    batch, length, _ = q.x.shape
    before = state_layers.empty(q.shape, batch, q.x.dtype)
    return state_layers.run_chain(q, before, jnp.full(batch, length))[0], None


def logits_of(model: nn.Module, params, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Returns the model's logits at every position of `tokens`.

    Raises ValueError for models that `causal_attention` does not support.
    """
    config = model.config
    unsupported = {
        "sliding windows": any(config.windows),
        "capped scores": config.attention_softcap is not None,
        "attention sinks": config.attention_sinks,
        "experts": config.num_experts is not None,
    }
    if features := [name for name, has in unsupported.items() if has]:
        raise ValueError(
            f"a model of the family {config.family!r} with {' and '.join(features)} cannot be "
            "trained: use another family"
        )
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = model.apply(params, tokens, positions, models.in_every_layer(over_whole_texts))
    return model.apply(params, hidden, method="unembed")


def batches(
    stream: np.ndarray, schedule: Schedule, first: int, row: int | None = None
) -> Iterator[np.ndarray]:
    """Yields windows [batch, context + 1, ...] from step `first` on.

    With `row`, the stream has rows of so many tokens, and windows do not cross them.
    """
    phases = [phase for phase in schedule.phases for _ in range(phase.steps)]
    size = len(stream) if row is None else row
    for step, phase in enumerate(phases[first:], first):
        random = np.random.default_rng((schedule.seed, step))
        starts = random.integers(0, max(1, size - phase.context), phase.batch)
        if row is not None:
            starts += row * random.integers(0, len(stream) // row, phase.batch)
        yield np.stack([stream[s : s + phase.context + 1] for s in starts])


def rate(schedule: Schedule, peak: float) -> optax.Schedule:
    """Returns the learning rate schedule: warmup, constant, linear decay to a tenth."""
    decay_steps = max(1, int(schedule.steps * schedule.decay))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, schedule.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak / 10, decay_steps),
        ],
        [schedule.warmup, max(schedule.warmup, schedule.steps - decay_steps)],
    )


def optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the blocks and Adam for all other parameters.

    On few tokens Muon needs about half the steps of AdamW. Source: K. Jordan, "Muon".
    """

    def dimensions(params):
        """Returns the input and output axes of each weight, None for Adam."""

        def weight_dimensions(path, weight):
            if path[-1].key != "weight":
                return None
            outputs = 1 if path[-2].key == "out" else weight.ndim - 1
            axes = tuple(range(weight.ndim))
            return contrib.MuonDimensionNumbers(axes[outputs:], axes[:outputs])

        return jax.tree_util.tree_map_with_path(weight_dimensions, params)

    muon = contrib.muon(
        rate(schedule, schedule.learning_rate),
        adam_learning_rate=rate(schedule, schedule.adam_learning_rate),
        muon_weight_dimension_numbers=dimensions,
        weight_decay=schedule.weight_decay,
        adam_b2=0.95,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def text_loss(model: nn.Module, params, windows: Int[Array, "B T1"]) -> Float[Array, ""]:
    """Returns the mean next-token loss in nats."""
    logits = logits_of(model, params, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@functools.lru_cache(maxsize=4)
def _step(model: nn.Module, schedule: Schedule, loss: Callable):
    """Returns the optimizer and the compiled step (state, windows, *frozen) -> state."""
    tx = optimizer(schedule)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, windows, *frozen):
        gradient = jax.value_and_grad(functools.partial(loss, model))
        value, grads = gradient(state["params"], windows, *frozen)
        updates, moments = tx.update(grads, state["optimizer"], state["params"])
        smooth = jnp.where(state["loss"] == 0, value, 0.98 * state["loss"] + 0.02 * value)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments, "loss": smooth}

    return tx, step


def train(
    model: nn.Module,
    stream: np.ndarray,
    schedule: Schedule,
    directory: pathlib.Path,
    *,
    loss: Callable = text_loss,
    initial=None,
    frozen: Any = None,
    row: int | None = None,
    label: str = "train",
):
    """Returns the trained parameters; resumes from the newest checkpoint in `directory`.

    Args:
      model: the module to train.
      stream: int32 [n], the training tokens, or [n, columns] if the loss needs more per token.
      schedule: phases and learning rate.
      directory: folder of the checkpoints, which must not hold those of another schedule.
      loss: (model, params, windows [B, T+1, ...]) -> scalar; `frozen`, if given, comes last.
      initial: initial parameters; None for random ones.
      frozen: arrays that the loss reads and that are not trained.
      row: as for `batches`.
      label: label of the progress bar.
    """
    # Runs that differ only in seed and checkpoint interval share one compiled step.
    tx, step = _step(model, dataclasses.replace(schedule, seed=0, checkpoint_every=1), loss)
    if initial is None:
        params = models.init_params(model, schedule.seed)
    else:
        params = jax.tree.map(jnp.copy, initial)  # the step donates its state
    state = {"params": params, "optimizer": tx.init(params), "loss": jnp.zeros(())}

    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(pathlib.Path(directory).resolve(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(abstract))
        bar = tqdm(total=schedule.steps, initial=first, desc=label, unit="step", mininterval=5)
        loss_arguments = () if frozen is None else (frozen,)
        for done, windows in enumerate(batches(stream, schedule, first, row), first + 1):
            state = step(state, windows, *loss_arguments)
            if done % 10 == 0:
                bar.set_postfix(context=windows.shape[1] - 1, loss=f"{float(state['loss']):.3f}")
            bar.update()
            if done % schedule.checkpoint_every == 0 or done == schedule.steps:
                manager.save(done, args=ocp.args.StandardSave(state))
        bar.close()
    return state["params"]


_text_loss = jax.jit(text_loss, static_argnums=0)


def evaluate(model: nn.Module, params, stream: np.ndarray, context: int, limit: int) -> float:
    """Returns the mean loss in nats per token over disjoint windows of `context` tokens.

    At most `limit` tokens are used. Raises ValueError if they are fewer than one window.
    """
    starts = range(0, min(limit, len(stream) - 1) - context + 1, context)
    if not starts:
        raise ValueError(f"{min(limit, len(stream))} tokens are fewer than a window of {context}")
    return float(
        np.mean([_text_loss(model, params, stream[None, s : s + context + 1]) for s in starts])
    )
