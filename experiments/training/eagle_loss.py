"""The loss of a learned head: as in drafting, it reads its own outputs for several steps.

Step 0 reads the target's hidden states at every position of a window; step s reads the outputs of
step s - 1, and the tokens one further. A query of a later step sees the keys of step 0 up to its
position, and of its own chain one key per step. Source: training-time test, EAGLE-3 (arXiv
2503.01840). The overlap of two distributions, sum(min(p, q)), is the probability that a drawn token
is accepted; one minus it is the loss of arXiv 2602.23881. In training, the target's distribution is
that of the draft vocabulary, at positions whose next token is in it.
"""

import dataclasses
import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16

import models
from experiments.training import recording
from experiments.training.trainer import QUERY_CHUNK

Kind = Literal["cross_entropy", "overlap"]
SMALLEST_WINDOW = 64
OF_TARGET = ("unembedding", "vocab_map", "target_norm")  # parameters that are not trained


def recorded_layers(head: models.EagleConfig, last: int = -1) -> tuple[int, ...]:
    """Returns the layers whose inputs the loss reads: the head's, and `last` for logits.

    A head for multi-token prediction reads the last one itself.
    """
    assert head.layer_inputs is not None  # since `eagle.head_config`
    return head.layer_inputs + (last,) * (not isinstance(head, models.MtpConfig))


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """The loss of a head on recorded windows, and its results on held-out ones.

    Attributes:
      teacher: gives the target's logits of the draft vocabulary, by `unembed`.
      embedder: gives the target's embeddings, by `embed`.
      steps: how many tokens are drafted from each position.
      decay: the weight of step s is decay**s.
      kind: cross-entropy against the target's distribution, or one minus the overlap.
      windows: whether each row sees at most a random number of the newest tokens, so that the head
        also drafts on a ring.
      beginning: the first tokens of a row that every row has; results leave them out.
    """

    teacher: nn.Module
    embedder: nn.Module
    steps: int
    decay: float
    kind: Kind = "cross_entropy"
    windows: bool = True
    beginning: int = 0

    def __call__(
        self, head: nn.Module, params: Any, windows: UInt16[Array, "B T C"], frozen: Any
    ) -> Float[Array, ""]:
        """Returns the weighted mean loss of the steps.

        Args:
          head: the module.
          params: what is trained.
          windows: of `recording.write`.
          frozen: see `frozen_of`.
        """
        weights = [self.decay**step for step in range(self.steps)]
        total: Any = 0.0
        for weight, (logits, target_logits, is_known) in zip(
            weights, self._steps(head, params, windows, frozen), strict=True
        ):
            p = jax.nn.softmax(target_logits)
            if self.kind == "overlap":
                loss = 1 - jnp.minimum(p, jax.nn.softmax(logits)).sum(-1)
            else:
                loss = -(p * jax.nn.log_softmax(logits)).sum(-1)
            total += weight * (loss * is_known).sum() / jnp.maximum(is_known.sum(), 1)
        return total / sum(weights)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def measured(
        self, head: nn.Module, params: Any, windows: UInt16[Array, "B T C"], frozen: Any
    ) -> dict[str, Float[Array, "S"]]:
        """Returns, for each step, how often both choose the same token, and the mean overlap.

        Both are of the target's whole vocabulary.
        """
        same, overlap = [], []
        hidden = recording.unpacked(windows, len(recorded_layers(head.config)))[1][:, :, -1]
        logits = self.embedder.apply(frozen["embedder"], hidden, method="unembed")
        best, total = frozen["vocab_map"][logits.argmax(-1)], jax.nn.logsumexp(logits, -1)
        without_windows = dataclasses.replace(self, windows=False)
        steps = enumerate(without_windows._steps(head, params, windows, frozen), 1)
        for first, (head_logits, target_logits, _) in steps:
            at = slice(first, first + head_logits.shape[1])
            p = jnp.exp(target_logits - total[:, at, None])
            q = jax.nn.softmax(head_logits)
            is_text = slice(self.beginning, None)
            same.append((head_logits.argmax(-1) == best[:, at])[:, is_text].mean())
            overlap.append(jnp.minimum(p, q).sum(-1)[:, is_text].mean())
        return {"same token": jnp.stack(same), "overlap": jnp.stack(overlap)}

    def _steps(self, head, params, windows, frozen):
        """Yields (logits [B,N,R], the target's, whether the text's next token is a draft token)."""
        layers = len(recorded_layers(head.config))
        tokens, hidden = recording.unpacked(windows, layers)
        count = tokens.shape[1] - self.steps
        fixed = {name: frozen[name] for name in OF_TARGET if name in frozen}
        inner = {"params": params["params"] | fixed}
        apply = functools.partial(head.apply, inner)
        inputs = [hidden[:, :, i] for i in range(head.config.num_features)]
        feature = apply(inputs, method="fuse")[:, :count]
        logits = self.teacher.apply(frozen["teacher"], hidden[:, :, -1], method="unembed")
        is_known = frozen["vocab_map"][tokens] < head.config.output_rows
        steps = jnp.arange(count)
        attend = models.in_every_layer(_Attend(self._visible(tokens)))
        for step in range(self.steps):
            first = 1 + step
            positions = jnp.broadcast_to(steps + first, (len(tokens), count))
            read = tokens[:, first : first + count]
            x = self.embedder.apply(frozen["embedder"], read, positions, method="embed")
            feature, _ = apply(x.astype(feature.dtype), feature, positions, attend, method="decode")
            next_is_known = is_known[:, first + 1 : first + 1 + count]
            head_logits = apply(feature, method="draft_logits")
            width = next_is_known.shape[1]  # the text ends one token before the last step
            yield head_logits[:, :width], logits[:, first : first + width], next_is_known

    def _visible(self, tokens):
        """Returns how many of the newest positions the queries of each row see, int32 [B]."""
        if not self.windows:
            return jnp.full(len(tokens), tokens.shape[1])
        # A row's number follows from its tokens, so that a resumed run draws the same.
        keys = jax.vmap(jax.random.key)(tokens.sum(-1))
        share = jax.vmap(jax.random.uniform)(keys)
        smallest = min(SMALLEST_WINDOW, tokens.shape[1])
        exponent = share * jnp.log2(2 * tokens.shape[1] / smallest)
        return (smallest * 2**exponent).astype(
            jnp.int32
        )  # from `smallest` to twice the row, by logarithm


class _Attend:
    """The attention of all steps: the keys of step 0 under a causal mask, and one of each later."""

    def __init__(self, visible):
        self.visible, self.keys, self.values = visible, [], []

    def __call__(self, q, k, v):
        group = q.shape[2] // k.shape[2]
        self.keys.append(jnp.repeat(k, group, 2))
        self.values.append(jnp.repeat(v, group, 2))
        outs = []
        for start in range(0, q.shape[1], QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, q.shape[1])
            k, v = self.keys[0][:, :end], self.values[0][:, :end]
            chain_kv = [
                (keys[:, start:end], values[:, start:end])
                for keys, values in zip(self.keys[1:], self.values[1:])
            ]
            outs.append(_chunk(q[:, start:end], k, v, chain_kv, self.visible, start))
        return jnp.concatenate(outs, 1), None


@functools.partial(jax.checkpoint, static_argnums=5)
def _chunk(q, k, v, chain_kv, visible, start):
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    distance = start + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    mask = (distance >= 0) & (distance < visible[:, None, None])
    scores = jnp.where(mask[:, None], scores, models.layers.NEVER)
    chain = [jnp.einsum("bthd,bthd->bht", q, k)[..., None] for k, _ in chain_kv]
    p = jax.nn.softmax(jnp.concatenate([scores, *chain], -1) * q.shape[-1] ** -0.5)
    out = jnp.einsum("bhts,bshd->bthd", p[..., : k.shape[1]], v)
    for step, (_, chain_v) in enumerate(chain_kv):
        out += p[..., k.shape[1] + step].swapaxes(1, 2)[..., None] * chain_v
    return out


def frozen_of(head_vocab_map: Array, target: models.Checkpoint, tokens: Array) -> dict[str, Any]:
    """Returns what the loss reads of the target: output rows of the draft tokens, and embeddings.

    Args:
      head_vocab_map: int32 [V], the draft token of each token.
      target: with its parameters.
      tokens: int32 [R], the token of each draft token.
    """
    inner = {k: v for k, v in target.params["params"].items() if not k.startswith(models.BLOCK)}
    rows = inner["embedding" if target.config.tie_embeddings else "unembedding"][tokens]
    rows = rows.astype(jnp.float32)
    rest = models.cast_params({k: v for k, v in inner.items() if k != "embedding"}, jnp.float32)
    return {
        "vocab_map": head_vocab_map,
        "unembedding": rows,
        "teacher": {"params": rest | {"unembedding": rows, "embedding": rows}},  # the latter unread
        "embedder": {"params": inner},
        "target_norm": models.cast_params(inner["norm"], jnp.float32) if "norm" in inner else {},
    }


def modules_of(target: models.Checkpoint, size: int) -> tuple[nn.Module, nn.Module]:
    """Returns the modules `teacher` and `embedder` of `HeadLoss`, for `size` draft tokens."""
    config = dataclasses.replace(target.config, vocab_size=size, tie_embeddings=False)
    return models.build(config), target.module
