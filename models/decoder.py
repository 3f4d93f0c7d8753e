"""The decoder of all families as one Flax module; families are settings of it.

The module is independent of caches, masks and trees: each block passes its q, k, v to `attend`,
which determines the visible positions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from models import experts
from models.gated_delta import DeltaNetShape, GatedDeltaNet
from models.layers import (
    NEVER,
    Attend,
    LayerAttend,
    LayerNorm,
    PassResult,
    RMSNorm,
    embedding_lookup,
    scaled,
)
from models.linear import Projection, packed_param, packed_rows, products, project
from models.positions import (
    ALIBI_COLUMNS,
    ALIBI_POSITIONS,
    Alibi,
    LearnedPositions,
    Rope,
    add_biases,
    frequencies,
    local_slopes,
    rotate_by,
)
from models.quantized import BLOCK, MatrixFormats
from pallas_kernels.cpu.linear import Matrix
from pallas_kernels.cpu.packed import OUTPUTS, Packed
from pallas_kernels.scores import capped
from sharding import (
    EMBED,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLP,
    VOCAB,
    Split,
    collectives,
)

_gelu_tanh = functools.partial(nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # by Hugging Face's names
    "silu": nn.silu,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
NORMS: dict[str, Any] = {
    "rms": RMSNorm,
    "rms_plus_one": functools.partial(RMSNorm, plus_one=True),
    "rms_wide": functools.partial(RMSNorm, wide=True),
    "layer": LayerNorm,
    "layer_no_bias": functools.partial(LayerNorm, use_bias=False),
}
# Fields that are finite numbers above 0.
FACTORS = (
    *("query_scale", "attention_softcap", "logits_softcap", "logits_divisor", "swiglu_limit"),
    *("embedding_multiplier", "residual_multiplier"),
)
BY_POSITIONS, BY_WINDOW_POSITIONS, UNROTATED = range(3)  # rotations of a layer


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and settings of a decoder (letters as in the architecture notes).

    `models.family_config` fills in the settings of a family.

    Attributes:
      vocab_size: V, the tokens of the vocabulary.
      hidden_size: E, the width.
      intermediate_size: F, the width of the MLP.
      num_layers: L, the blocks.
      num_heads: H query heads.
      num_kv_heads: K key/value heads; divides H.
      head_dim: D; need not be E / H.
      max_positions: the longest context that the model accepts.
      positions: rotary or learned positions, or ALiBi.
      norm: "rms" (RMSNorm), "rms_wide" (Gemma 4's: scaled before it is rounded), "rms_plus_one"
        (earlier ones': also by 1 + the parameter), "layer" (LayerNorm) or "layer_no_bias".
      norm_eps: epsilon of the norms.
      norm_before: the inputs of attention and MLP are normalized.
      norm_after: their outputs are normalized before each sum, with `norm_before` (Gemma 2 and 3)
        or without it (OLMo 2 and 3); requires parallel=False. Without both, the sums are
        normalized (OPT-350m).
      final_norm: a norm before the logits; requires `norm_before` or `norm_after`.
      parallel: attention and MLP read the same x, and both are added to it (Falcon).
      shared_norm: with `parallel`, the MLP reads attention's normalized input (Falcon-7B).
      qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
      joint_qk_norm: with `qk_norm`, one RMSNorm over all heads of q, and one over those of k (OLMo
        2 and 3).
      value_norm: RMSNorm without a scale over each head of v (Gemma 4).
      values_are_keys: layers without a window have no matrix for v, which is k before its norm and
        rotation (Gemma 4).
      qkv_bias: biases on q, k, v.
      clip_qkv: q, k, v are clipped to this absolute value (MPT); None: they are not.
      out_bias: bias on the attention's output.
      mlp_bias: biases in the MLP.
      activation: activation of the MLP, one of `ACTIVATIONS`.
      gated: the MLP is down(activation(gate(x)) * up(x)); False: down(activation(up(x))).
      query_scale: scores are multiplied by it; None: by D**-0.5.
      attention_softcap: scores are bounded by softcap * tanh(score / softcap) (Gemma 2); None: they
        are not.
      attention_sinks: each head has a learned logit in its softmax, without a value (gpt-oss).
      attention_gate: the input also yields a gate for each element of the attention's output,
        which is multiplied by its sigmoid before the output projection (Qwen3-Next).
      logits_softcap: the bound of logits, likewise.
      logits_divisor: logits are divided by it before they are bounded (Granite).
      scale_embeddings: embeddings are multiplied by sqrt(E), rounded to the dtype (Gemma).
      embedding_multiplier: embeddings are multiplied by it (Granite).
      residual_multiplier: outputs of attention and MLP are multiplied by it before each sum
        (Granite).
      num_experts: X, the experts of the mixture that is the MLP; None: there is one MLP. F is the
        width of an expert.
      experts_per_token: k, how many of them a token uses.
      normalize_experts: the weights of a token's experts sum to 1; False: they are those of the
        softmax over all experts.
      router_bias: a bias on the logits of experts.
      shared_expert_size: width of an expert that all tokens use besides, times the sigmoid of a
        gate (Qwen3-Next); None: there is none.
      parallel_experts: the experts and their router do not read the shared expert's input, but the
        sum before its norm, under norms of their own. Both outputs are normalized before their sum,
        without a gate, and the weight of an expert has a factor, a parameter (Gemma 4).
      swiglu_limit: for a gated MLP that is (up + 1) * gate * sigmoid(1.702 * gate), the upper bound
        of the gate, and the bound of `up` on both sides (gpt-oss); None: `activation` applies.
      tie_embeddings: use the embedding as the output matrix.
      embedding_size: width of the token embedding, which is projected to E after the lookup and
        back before the logits (OPT-350m); None: E.
      family: the Hugging Face `model_type` in config.json.
      sliding_window: W, the newest positions that a token of a windowed layer sees, its own
        included; None: every layer sees the whole text.
      full_layers: the layers without a window, in order; the others have it.
      full_head_dim, full_kv_heads: D and K of the layers without a window (Gemma 4); None: those of
        the others.
      window_positions: the rotary settings of the windowed layers; None: those of `positions`.
      unrotated_layers: the layers without positions, in order, of a model with rotary ones
        (SmolLM3).
      shared_kv_layers: the number of last layers that have no keys and values: they attend to those
        of the last earlier layer with a window, or without one, as theirs (Gemma 4).
      double_shared_mlp: the MLPs of those layers have a width of 2 F.
      layer_input_size: P, the width of an embedding of its own that each layer reads besides, gated
        by its output (Gemma 4); None: there are none.
      input_layers: the number of layers in the table of those embeddings; None: all.
      layer_scalars: the output of each layer is multiplied by a parameter (Gemma 4).
      linear_layers: the layers that are gated delta nets, in order; the others are attention.
      delta_net: the shapes of those layers; None: there are none.
      draft_vocab_size: for a draft model with output rows of its most frequent tokens only, the
        number of rows. The last stands for all other tokens, and is never predicted. The parameter
        `vocab_map`, int32 [V], has the row of each token. None: every token has its own.
      embeds_all: whether such a model has an embedding for every token; if not, its embeddings
        are those of the output rows.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    positions: Rope | LearnedPositions | Alibi = Rope()
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_before: bool = True
    norm_after: bool = False
    final_norm: bool = True
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    value_norm: bool = False
    values_are_keys: bool = False
    qkv_bias: bool = False
    clip_qkv: float | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    query_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    attention_gate: bool = False
    logits_softcap: float | None = None
    logits_divisor: float = 1.0
    scale_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    num_experts: int | None = None
    experts_per_token: int = 0
    normalize_experts: bool = True
    router_bias: bool = False
    shared_expert_size: int | None = None
    parallel_experts: bool = False
    swiglu_limit: float | None = None
    tie_embeddings: bool = False
    embedding_size: int | None = None
    family: str = "llama"
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    window_positions: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    shared_kv_layers: int = 0
    double_shared_mlp: bool = False
    layer_input_size: int | None = None
    input_layers: int | None = None
    layer_scalars: bool = False
    linear_layers: tuple[int, ...] = ()
    delta_net: DeltaNetShape | None = None
    draft_vocab_size: int | None = None
    embeds_all: bool = False

    def __post_init__(self):
        if self.embedding_size == self.hidden_size:
            object.__setattr__(self, "embedding_size", None)
        if self.layer_input_size == 0:
            object.__setattr__(self, "layer_input_size", None)
        for name, known in (("norm", NORMS), ("activation", ACTIVATIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} is not supported: use {' or '.join(known)}")
        for name in ("num_kv_heads", "full_kv_heads"):
            if self.num_heads % (getattr(self, name) or 1):
                raise ValueError(
                    f"num_heads={self.num_heads} is not a multiple of {name}={getattr(self, name)}"
                )
        everywhere = self.window_positions is None  # the rotation of all layers is `rope`
        if self.rope is not None and (everywhere or self.full_head_dim is None):
            self._check_rotation(self.rope, "head_dim")
        if self.rope is not None and self.full_head_dim is not None:
            self._check_rotation(self.rope, "full_head_dim")
        if self.window_positions is not None:
            self._check_rotation(self.window_positions, "head_dim")
        self._check_windows()
        self._check_linear_layers()
        self._check_shared_layers()
        self._check_parallel_experts()
        if not 1 <= self.experts_per_token <= (self.num_experts or 0) and (
            self.num_experts is not None or self.experts_per_token
        ):
            raise ValueError(
                f"{self.experts_per_token} of {self.num_experts} experts for each token: a "
                "token uses from 1 to num_experts experts; without experts, omit both"
            )
        for name in FACTORS:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}: it must be a finite number above 0")
        if self.swiglu_limit is not None and not self.gated:
            raise ValueError(f"swiglu_limit={self.swiglu_limit} requires gated=True")
        if isinstance(self.positions, Alibi) and self.max_positions > ALIBI_POSITIONS:
            raise ValueError(
                f"max_positions={self.max_positions} is too large: ALiBi has at most "
                f"{ALIBI_POSITIONS} positions"
            )
        if self.final_norm and not (self.norm_before or self.norm_after):
            raise ValueError(
                "final_norm=True requires norm_before=True or norm_after=True: a model with norms "
                "after each sum has none before its logits; use final_norm=False"
            )
        if self.joint_qk_norm and (not self.qk_norm or self.norm != "rms"):
            raise ValueError(
                f"joint_qk_norm=True with qk_norm={self.qk_norm}, norm={self.norm!r}: it requires "
                "qk_norm=True and norm='rms'"
            )
        if (self.shared_norm and not self.parallel) or (self.parallel and not self.norm_before):
            raise ValueError(
                f"norm_before={self.norm_before}, parallel={self.parallel}, "
                f"shared_norm={self.shared_norm}: shared_norm=True requires parallel=True, which "
                "requires norm_before=True"
            )
        if self.layer_scalars and (self.parallel or not (self.norm_before or self.norm_after)):
            raise ValueError(
                f"layer_scalars=True with norm_before={self.norm_before}, norm_after="
                f"{self.norm_after}, parallel={self.parallel}: it requires parallel=False, and a "
                "norm before or after attention and MLP"
            )
        if self.norm_after and self.parallel:
            raise ValueError("norm_after=True requires parallel=False: omit one of them")
        if self.draft_vocab_size is not None and not 2 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be at least 2 and smaller than "
                f"vocab_size={self.vocab_size}; omit it if the model has all tokens"
            )

    def _check_layers(self, name: str) -> None:
        layers = getattr(self, name)
        if list(layers) != sorted({*layers} & {*range(self.num_layers)}):
            raise ValueError(
                f"{name}={layers}: name layers from 0 to {self.num_layers - 1}, each once, in order"
            )

    def _check_windows(self) -> None:
        if self.unrotated_layers and self.rope is None:
            raise ValueError(
                f"unrotated_layers={self.unrotated_layers} requires rotary positions: omit it"
            )
        self._check_layers("unrotated_layers")
        if self.sliding_window is None:
            names = "full_layers", "window_positions", "full_head_dim", "full_kv_heads"
            if given := [name for name in names if getattr(self, name)]:
                values = ", ".join(f"{name}={getattr(self, name)}" for name in given)
                raise ValueError(
                    f"{values}: without sliding_window no layer has a window; set it, or omit them"
                )
            return
        if self.sliding_window < 1:
            raise ValueError(
                f"sliding_window={self.sliding_window}: it must be 1 or more, or null for none"
            )
        if isinstance(self.positions, Alibi):
            raise ValueError(
                f"sliding_window={self.sliding_window} with ALiBi is not supported: omit one"
            )
        if self.window_positions is not None and self.rope is None:
            raise ValueError("window_positions requires rotary positions: omit it")
        self._check_layers("full_layers")

    def _check_linear_layers(self) -> None:
        if (self.delta_net is None) != (not self.linear_layers):
            raise ValueError(
                f"linear_layers={self.linear_layers}, delta_net={self.delta_net}: linear layers "
                "need their shapes, and shapes need layers; set both, or omit both"
            )
        self._check_layers("linear_layers")
        if self.linear_layers and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} with linear_layers is not supported: omit "
                "one of them"
            )
        if self.shared_expert_size is not None and self.num_experts is None:
            raise ValueError(
                f"shared_expert_size={self.shared_expert_size} without num_experts: omit it"
            )

    def _check_shared_layers(self) -> None:
        if not 0 <= self.shared_kv_layers < self.num_layers:
            raise ValueError(
                f"shared_kv_layers={self.shared_kv_layers}: it must be from 0 to "
                f"{self.num_layers - 1}, less than num_layers"
            )
        first = self.num_layers - self.shared_kv_layers
        if missing := {*self.slides[first:]} - {*self.slides[:first]}:
            kind = "with" if missing.pop() else "without"
            raise ValueError(
                f"shared_kv_layers={self.shared_kv_layers}: none of the first {first} layers is "
                f"one {kind} a window, whose keys and values later layers could read"
            )
        others = {
            "linear_layers": self.linear_layers,
            "joint_qk_norm": self.joint_qk_norm,
            "clip_qkv": self.clip_qkv,
            "ALiBi": isinstance(self.positions, Alibi),
        }
        if self.shared_kv_layers and any(others.values()):
            names = " and ".join(name for name, value in others.items() if value)
            raise ValueError(
                f"shared_kv_layers={self.shared_kv_layers} with {names} is not supported: omit "
                "one of them"
            )

    def of_layer(self, layer: int) -> "DecoderConfig":
        """Returns the config of a block, of which `head_dim` and the like are those of this layer.

        Layers of a kind have equal ones.
        """
        return _of_kind(self, self.slides[layer], self.kv_sources[layer] is not None)

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer reads; None: its own."""
        first, slides = self.num_layers - self.shared_kv_layers, self.slides
        last = {kind: layer for layer, kind in enumerate(slides[:first])}
        return tuple(None if i < first else last[kind] for i, kind in enumerate(slides))

    def _check_parallel_experts(self) -> None:
        if self.parallel_experts and (
            self.shared_expert_size is None or not (self.norm_before and self.norm_after)
        ):
            raise ValueError(
                f"parallel_experts=True with shared_expert_size={self.shared_expert_size}, "
                f"norm_before={self.norm_before}, norm_after={self.norm_after}: it requires a "
                "shared expert, and the others to be True"
            )

    @property
    def linear(self) -> tuple[bool, ...]:
        """Whether each layer is a gated delta net."""
        return tuple(layer in self.linear_layers for layer in range(self.num_layers))

    def state_bytes(self, itemsize: int) -> int:
        """Returns the bytes of a row's states in all gated delta nets.

        `itemsize` is that of activations.
        """
        return sum(self.linear) * (self.delta_net.state_bytes(itemsize) if self.delta_net else 0)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it sees all that the model accepts."""
        window = self.sliding_window
        if window is not None and window >= self.max_positions:
            window = None
        return tuple(window if slides else None for slides in self.slides)

    @property
    def slides(self) -> tuple[bool, ...]:
        """Whether each layer is a windowed one, even if its window is longer than any text."""
        if self.sliding_window is None:
            return (False,) * self.num_layers
        return tuple(layer not in self.full_layers for layer in range(self.num_layers))

    @property
    def rotations(self) -> tuple[int, ...]:
        """The rotation of each layer: `BY_POSITIONS`, `BY_WINDOW_POSITIONS` or `UNROTATED`."""
        windowed = BY_POSITIONS if self.window_positions is None else BY_WINDOW_POSITIONS
        rotated = [windowed if slides else BY_POSITIONS for slides in self.slides]
        unrotated = self.unrotated_layers
        return tuple(UNROTATED if i in unrotated else kind for i, kind in enumerate(rotated))

    def frequencies(self, rotation: Int[Array, ""] | int) -> tuple[Any, Any]:
        """Returns the radians per position and the factor on cosine and sine of a layer (`Rope`).

        `rotation` is that of the layer, and may be traced. Those of `UNROTATED` change nothing.
        """
        assert self.rope is not None
        everywhere = frequencies(self.rope, self.head_dim)
        windowed = frequencies(self.window_positions or self.rope, self.head_dim)
        kinds: Any = everywhere, windowed, (np.zeros_like(everywhere[0]), 1.0)
        if isinstance(rotation, int):
            return kinds[rotation]
        if not self.unrotated_layers and self.window_positions is None:
            return everywhere
        inverse, factor = zip(*kinds, strict=True)
        return jnp.stack(inverse)[rotation], jnp.stack(factor)[rotation]

    def _check_rotation(self, rope: Rope, name: str) -> None:
        """Raises ValueError if heads of the size in the field `name` cannot rotate by `rope`."""
        head_dim, factor = getattr(self, name), rope.partial_rotary_factor
        size = rope.rotary_dim(head_dim)
        if size % 2 and (factor == 1 or rope.kind == "proportional"):
            raise ValueError(f"{name}={head_dim} must be even: the rotation pairs halves")
        if rope.kind == "proportional":
            if not 1 <= factor * head_dim // 2 <= head_dim // 2:
                raise ValueError(
                    f"partial_rotary_factor={factor} rotates {int(factor * head_dim // 2)} pairs "
                    f"of {name}={head_dim}: it must be from {2 / head_dim} to 1"
                )
        elif size % 2 or not 2 <= size <= head_dim:
            nearest = max(min(size, head_dim) // 2 * 2, 2)
            right = nearest / head_dim
            if int(right * head_dim) < nearest:  # 30 / 44, which times 44 is below 30
                right = math.nextafter(right, 1)
            raise ValueError(
                f"partial_rotary_factor={factor} rotates {size} elements of {name}={head_dim}: "
                f"their number must be even, from 2 to {head_dim}; for {nearest}, use {right}"
            )
        if rope.kind == "longrope" and len(rope.short_factor) != size // 2:
            raise ValueError(
                f"short_factor has {len(rope.short_factor)} elements: the rotation has "
                f"{size // 2} pairs, and needs one for each"
            )

    @property
    def rope(self) -> Rope | None:
        """The rotary settings, or None if positions are not rotary."""
        return self.positions if isinstance(self.positions, Rope) else None

    @property
    def kv_head_dim(self) -> int:
        """The size of a head in the KV cache, and in attention: D, more with ALiBi."""
        return self.head_dim + (ALIBI_COLUMNS if isinstance(self.positions, Alibi) else 0)

    @property
    def output_rows(self) -> int:
        """The number of rows of the output matrix."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def embedding_rows(self) -> int:
        """The number of rows of the embedding."""
        return self.vocab_size if self.embeds_all else self.output_rows

    @property
    def embedding_axis(self) -> tuple[int, str | None]:
        """The (size, logical axis) of the token embedding's width.

        A narrow embedding has no axis name: its projection to E would carry EMBED twice, and one
        mesh axis cannot split two axes of an array.
        """
        if self.embedding_size is None:
            return self.hidden_size, EMBED
        return self.embedding_size, None

    def matrix_inputs(self, shards: int = 1, layer: int | None = None) -> dict[str, int]:
        """Returns the inputs of each matrix of a block on one of `shards` devices, by name.

        Args:
          shards: number of devices that divide the model.
          layer: the block; None: matrices that any has.
        """
        width, up = self.hidden_size, ("gate", "up")[not self.gated :]
        inputs = dict[str, int]()
        if layer is None or not self.linear[layer]:
            kinds = [
                self.of_layer(i) for i in (range(self.num_layers) if layer is None else [layer])
            ]
            has_values = not all(kind.values_are_keys for kind in kinds)
            names = (*"qk", *"v" * has_values, *("gate",) * self.attention_gate)
            if layer is not None and self.kv_sources[layer] is not None:
                names = tuple(name for name in names if name not in ("k", "v"))
            inputs |= {f"attention/{name}": width for name in names}
            head_dim = math.gcd(*(kind.head_dim for kind in kinds))
            inputs["attention/out"] = self.num_heads * head_dim // shards
        if (shape := self.delta_net) is not None and (layer is None or self.linear[layer]):
            inputs |= {f"delta_net/{name}": width for name in "qkvz"}
            inputs["delta_net/out"] = shape.value_heads * shape.value_dim
        inputs |= {f"mlp/{name}": width for name in up}
        parts = shards if self.num_experts is None else 1  # experts are divided, not their widths
        unit = self.intermediate_size if layer is None else self.of_layer(layer).intermediate_size
        inputs["mlp/down"] = unit // parts
        if self.shared_expert_size is not None:
            inputs |= {f"mlp/shared/{name}": width for name in up}
            inputs["mlp/shared/down"] = self.shared_expert_size // shards
        return inputs

    def activate(self, first: Array, *others: Array) -> Array:
        """Returns the hidden units of the MLP: of its gate and `up`, or of `up` alone."""
        if self.swiglu_limit is not None:
            gate = jnp.minimum(first, self.swiglu_limit)
            up = jnp.clip(others[0], -self.swiglu_limit, self.swiglu_limit)
            return (up + 1) * gate * nn.sigmoid(1.702 * gate)
        first = ACTIVATIONS[self.activation](first)
        return first * others[0] if self.gated else first


@functools.lru_cache(maxsize=64)
def _of_kind(config: DecoderConfig, slides: bool, shares: bool) -> DecoderConfig:
    """Returns the config of layers with a window, or of those without one.

    With `shares` they read the keys and values of another layer.
    """
    c = config
    if c.double_shared_mlp:
        width = c.intermediate_size * (2 if shares else 1)
        c = dataclasses.replace(c, intermediate_size=width, double_shared_mlp=False)
    if (c.full_head_dim, c.full_kv_heads, c.values_are_keys) == (None, None, False):
        return c
    plain = dataclasses.replace(c, full_head_dim=None, full_kv_heads=None)
    if slides:
        positions = c.window_positions or c.positions
        return dataclasses.replace(plain, values_are_keys=False, positions=positions)
    return dataclasses.replace(
        plain,
        head_dim=c.full_head_dim or c.head_dim,
        num_kv_heads=c.full_kv_heads or c.num_kv_heads,
        window_positions=None,
    )


def of_layers(module: nn.Module, layers: Sequence[int]) -> nn.Module:
    """Returns the module of a model that has some layers of another, or of an own decoder."""
    changes: dict[str, Any] = {"num_layers": len(layers)}
    if linear := getattr(module.config, "linear_layers", ()):
        changes["linear_layers"] = tuple(i for i, layer in enumerate(layers) if layer in linear)
        if not changes["linear_layers"]:
            changes["delta_net"] = None
    if full := getattr(module.config, "full_layers", ()):
        changes["full_layers"] = tuple(i for i, layer in enumerate(layers) if layer in full)
    if unrotated := getattr(module.config, "unrotated_layers", ()):
        changes["unrotated_layers"] = tuple(i for i, x in enumerate(layers) if x in unrotated)
    if getattr(module.config, "shared_kv_layers", 0):
        sources = module.config.kv_sources
        changes["shared_kv_layers"] = sum(sources[layer] is not None for layer in layers)
    if getattr(module.config, "layer_input_size", None):
        changes["input_layers"] = module.config.input_layers or module.config.num_layers
    module = module.clone(config=dataclasses.replace(module.config, **changes))
    formats = formats_of(module)
    return module.clone(weights=formats.of_layers(layers)) if formats else module


def formats_of(module: nn.Module) -> MatrixFormats:
    """Returns the formats of a module's matrices; an own decoder may not declare any."""
    return getattr(module, "weights", MatrixFormats())


def keep_entries(attend: LayerAttend, q: Array, k: Array, v: Array, **options: Any) -> Any:
    """Returns the results of `attend`, and with its auxiliary output the keys and values."""
    out, aux = attend(q, k, v, **options)
    return out, (aux, (k, v))


def share_entries(attend: LayerAttend, entries: tuple, q: Array, k, v, **options: Any) -> Any:
    """Returns the results of `attend` with another layer's keys and values."""
    del k, v  # the layer has none
    return attend(q, *entries, **options)


class Attention(nn.Module):
    """Projections and positions of q, k, v, `attend`, and the output projection.

    With `shares` it has no keys and values: `attend` has those of another layer.
    """

    config: DecoderConfig
    dtype: Any
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None
    shares: bool = False

    @nn.compact
    def __call__(self, x, positions, attend: LayerAttend, rotation: Int[Array, ""] | int):
        c = self.config
        heads = ((c.num_heads // self.split.shards, HEADS), (c.head_dim, HEAD_DIM))
        kv_heads = ((c.num_kv_heads // self.split.kv_shards, KV_HEADS), (c.head_dim, HEAD_DIM))
        embed = ((c.hidden_size, EMBED),)

        def projection(inputs, outputs, use_bias, name, **options):
            form = self.weights.of(name)
            options |= dict(dtype=self.dtype, weights=form, backend=self.backend)
            return Projection(inputs, outputs, use_bias, name=name, **options)

        gated = [projection(embed, heads, c.qkv_bias, "gate")] * c.attention_gate
        names = "" if self.shares else "k" if c.values_are_keys else "kv"
        q, *others = project(
            x,
            projection(embed, heads, c.qkv_bias, "q"),
            *(projection(embed, kv_heads, c.qkv_bias, name) for name in names),
            *gated,
        )
        k: Any = None
        v: Any = None
        if not self.shares:
            k, *others = others
            v, *others = (k, *others) if c.values_are_keys else others
        if c.joint_qk_norm:
            q = self._norm_of_all_heads("q_norm", q, HEADS, self.split.axes)
            k = self._norm_of_all_heads("k_norm", k, KV_HEADS, self.split.kv_axes)
        elif c.qk_norm:
            settings = c.head_dim, c.norm_eps, self.dtype, HEAD_DIM, self.backend
            norm = NORMS[c.norm]
            q = norm(*settings, name="q_norm")(q)
            k = k if self.shares else norm(*settings, name="k_norm")(k)
        if c.value_norm and not self.shares:
            settings = c.head_dim, c.norm_eps, self.dtype, HEAD_DIM, self.backend
            v = RMSNorm(*settings, use_scale=False, name="v_norm")(v)
        if c.clip_qkv is not None:
            q, k, v = (jnp.clip(x, -c.clip_qkv, c.clip_qkv) for x in (q, k, v))
        is_unrotated = isinstance(rotation, int) and rotation == UNROTATED
        if isinstance(c.positions, Rope) and not is_unrotated:
            turn = c.frequencies(rotation)
            q = rotate_by(q, positions, *turn)
            k = k if self.shares else rotate_by(k, positions, *turn)
        if isinstance(c.positions, Alibi):
            slopes = local_slopes(c.num_heads, self.split)
            q, k, v = add_biases(q, k, v, positions, slopes, c.positions)
        if c.query_scale is not None:  # attention multiplies by D**-0.5
            q = scaled(q, c.query_scale * c.head_dim**0.5)
        options: dict[str, Any] = {}
        if c.attention_softcap is not None:
            options["softcap"] = c.attention_softcap
        if c.attention_sinks:
            normal = nn.initializers.normal(1.0)
            sinks = nn.with_logical_partitioning(normal, (HEADS,))
            options["sinks"] = self.param("sinks", sinks, heads[0][:1], self.dtype)
        out, aux = attend(q, k, v, **options)
        out = out[..., : c.head_dim]
        if c.attention_gate:
            out = out * nn.sigmoid(others[0])
        out = projection(heads, embed, c.out_bias, "out", axis_names=self.split.axes)(out)
        return out, aux

    def _norm_of_all_heads(self, name, x, axis, axis_names):
        c, flat = self.config, x.reshape(*x.shape[:-2], -1)
        settings = flat.shape[-1], c.norm_eps, self.dtype, axis, self.backend
        return RMSNorm(*settings, axis_names=axis_names, name=name)(flat).reshape(x.shape)


class FeedForward(nn.Module):
    """The MLP, gated or not."""

    config: DecoderConfig
    dtype: Any
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None

    @nn.compact
    def __call__(self, x):
        c = self.config
        embed = ((c.hidden_size, EMBED),)
        hidden = ((c.intermediate_size // self.split.shards, MLP),)

        def projection(inputs, outputs, name, **options):
            form = self.weights.of(name)
            options |= dict(dtype=self.dtype, weights=form, backend=self.backend)
            return Projection(inputs, outputs, c.mlp_bias, name=name, **options)

        matrices = [projection(embed, hidden, name) for name in ("gate", "up")[not c.gated :]]
        x = c.activate(*project(x, *matrices))
        return projection(hidden, embed, "down", axis_names=self.split.axes)(x)


class MixtureOfExperts(nn.Module):
    """MLPs of which a router chooses some for each token (`models.experts`).

    With `parallel_experts` it also reads the hidden states before the norm of its input.
    """

    config: DecoderConfig
    dtype: Any
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None

    @nn.compact
    def __call__(self, x, before_norm=None):
        c = self.config
        assert c.num_experts is not None
        options: Any = dict(dtype=self.dtype, backend=self.backend)
        embed, unit = (c.hidden_size, EMBED), (c.intermediate_size, None)
        local = (c.num_experts // self.split.shards, EXPERTS)
        logits_of = functools.partial(Projection, (embed,), ((c.num_experts, None),), c.router_bias)
        router = logits_of(name="router", **options)

        def projection(inputs, outputs, name):
            form = self.weights.of(name)
            return Projection(inputs, outputs, c.mlp_bias, name=name, weights=form, **options)

        into = [projection((embed,), (local, unit), name) for name in ("gate", "up")[not c.gated :]]
        out_of = projection((unit,), (local, embed), "down")
        norms = c.hidden_size, c.norm_eps, self.dtype, EMBED, self.backend
        rows = routed = x.reshape(-1, x.shape[-1])
        if c.parallel_experts:
            before_norm = before_norm.reshape(rows.shape)
            rows = NORMS[c.norm](*norms, name="experts_norm")(before_norm)
            routed = RMSNorm(*norms, use_scale=False, name="router_norm")(before_norm)
            ones = nn.with_logical_partitioning(nn.initializers.ones, (EMBED,))
            scale = self.param("router_scale", ones, (c.hidden_size,), self.dtype)
            routed = scaled(routed * scale, c.hidden_size**-0.5)
        chosen = experts.choose(router(routed), c.experts_per_token, c.normalize_experts)
        if c.parallel_experts:
            ones = nn.with_logical_partitioning(nn.initializers.ones, (None,))
            factors = self.param("expert_scale", ones, (c.num_experts,), self.dtype)
            chosen = chosen[0], chosen[1] * factors[chosen[0]]
        first = collectives.axis_index(self.split.axes) * local[0] if self.split.axes else 0
        out = experts.run_experts(rows, *chosen, into, c.activate, out_of, c.num_experts, first)
        out = collectives.psum(out.astype(x.dtype), self.split.axes).reshape(x.shape)
        if c.shared_expert_size is None:
            return out
        own = dataclasses.replace(c, intermediate_size=c.shared_expert_size)
        weights = self.weights.within("shared")
        shared = FeedForward(own, self.dtype, self.split, weights, self.backend, name="shared")(x)
        if c.parallel_experts:
            out = NORMS[c.norm](*norms, name="experts_output_norm")(out)
            return out + NORMS[c.norm](*norms, name="shared_output_norm")(shared)
        gate = Projection((embed,), ((1, None),), False, name="shared_gate", **options)(x)
        return out + nn.sigmoid(gate) * shared


class Block(nn.Module):
    """One layer; a separate module, so that it can be applied to any layer's weights.

    Its arguments are the hidden states, the positions, the attention of this layer, the layer's
    rotation (`DecoderConfig.rotations`), and its own input [B,T,P] (`layer_input_size`). With
    `linear` it is a gated delta net. With `shares` it has no keys and values.
    """

    config: DecoderConfig
    dtype: Any
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None
    linear: bool = False
    shares: bool = False

    @nn.compact
    def __call__(
        self, x, positions, attend: LayerAttend, rotation: Int[Array, ""] | int, own_input=None
    ):
        c = self.config

        def norm(name):
            return NORMS[c.norm](
                c.hidden_size, c.norm_eps, self.dtype, EMBED, self.backend, name=name
            )

        def part(kind: type[nn.Module], name: str) -> nn.Module:
            weights = self.weights.within(name)
            return kind(c, self.dtype, self.split, weights, self.backend, name=name)

        def mixer() -> Callable[..., tuple[Array, Any]]:
            if not self.linear:
                own = c, self.dtype, self.split, self.weights.within("attention"), self.backend
                return Attention(*own, self.shares, name="attention")
            weights = self.weights.within("delta_net")
            delta_net = GatedDeltaNet(c, self.dtype, weights, self.backend, name="delta_net")
            return lambda x, positions, attend, rotation: delta_net(x, attend)

        attention = mixer()
        mlp = part(FeedForward if c.num_experts is None else MixtureOfExperts, "mlp")

        def weighted(out, name=""):
            out = norm(name)(out) if name and c.norm_after else out
            return scaled(out, c.residual_multiplier)

        if not (c.norm_before or c.norm_after):
            out, aux = attention(x, positions, attend, rotation)
            x = norm("attention_norm")(x + weighted(out))
            return norm("mlp_norm")(x + weighted(mlp(x))), aux
        normed = norm("attention_norm")(x) if c.norm_before else x
        out, aux = attention(normed, positions, attend, rotation)
        if c.parallel:
            normed = normed if c.shared_norm else norm("mlp_norm")(x)
            return x + weighted(out) + weighted(mlp(normed)), aux
        x = x + weighted(out, "attention_output_norm")
        normed = norm("mlp_norm")(x) if c.norm_before else x
        out = mlp(normed, x) if c.parallel_experts else mlp(normed)
        x = x + weighted(out, "mlp_output_norm")
        if c.layer_input_size is not None:
            embed, inner = ((c.hidden_size, EMBED),), ((c.layer_input_size, None),)
            options: Any = dict(use_bias=False, dtype=self.dtype, backend=self.backend)
            gate = ACTIVATIONS[c.activation](
                Projection(embed, inner, name="input_gate", **options)(x)
            )
            out = Projection(inner, embed, name="input_projection", **options)(gate * own_input)
            x = x + norm("input_norm")(out)
        if c.layer_scalars:
            ones = nn.with_logical_partitioning(nn.initializers.ones, (None,))
            x = x * self.param("scalar", ones, (1,), self.dtype)
        return x, aux


def layer_module(module: nn.Module, layer: int = 0) -> Block:
    """Returns the module of a layer; those of layers of a kind in the same formats are equal.

    Its parameters are `params["params"]["layers_<i>"]`.
    """
    weights = module.weights.within(f"{BLOCK}{layer}")
    linear = module.config.linear[layer]
    config = module.config.of_layer(layer)
    shares = module.config.kv_sources[layer] is not None
    own = config, module.dtype, module.split, weights, module.backend, linear, shares
    return Block(*own, parent=None)


def output_matrix(module: nn.Module, params: dict[str, Any]) -> Array | Packed:
    """Returns the matrix [V, E] that gives the logits of a decoder."""
    name = "embedding" if module.config.tie_embeddings else "unembedding"
    matrix, form = params["params"][name], formats_of(module).of(name)
    if not isinstance(form, str):
        return matrix
    return Packed(matrix, form, (OUTPUTS * matrix.shape[0],))


@functools.partial(jax.jit, static_argnames=("block", "rotation"))
def apply_block(
    block: Block,
    params: dict[str, Any],
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: LayerAttend,
    rotation: int,
    own_input: Float[Array, "B T P"] | None = None,
) -> tuple[Float[Array, "B T E"], Any]:
    """Returns the output of a layer with these parameters, and `attend`'s auxiliary output.

    JAX traces and lowers layers with equal modules and shapes once. XLA inlines the calls.
    """
    return block.apply({"params": params}, x, positions, attend, rotation, own_input)


class Transformer(nn.Module):
    """A decoder, used only through `init` and `apply`.

    Attributes:
      config: shapes and settings.
      dtype: dtype of parameters and activations; norms and logits use at least float32.
      split: the division over devices. With several shards the module runs inside `jax.shard_map`,
        on this device's part of the parameters, and returns its part of the logits.
      weights: the formats of quantized matrices.
      backend: backend of the products; None: the native kernels on a CPU that has them.
    """

    config: DecoderConfig
    dtype: Any = jnp.float32
    split: Split = Split()
    weights: MatrixFormats = MatrixFormats()
    backend: str | None = None

    def setup(self):
        c = self.config
        width, axis = c.embedding_axis
        normal = nn.initializers.normal(0.02)
        init = nn.with_logical_partitioning(normal, (VOCAB, axis))

        def tokens_by_width(name: str, rows: int) -> Array | Packed:
            shape = (rows // self.split.shards, width)
            form = self.weights.of(name)
            if not isinstance(form, str):
                return self.param(name, init, shape, self.dtype)
            return packed_param(self, name, form, ((shape[0], VOCAB),), ((width, axis),))

        self.embedding = tokens_by_width("embedding", c.embedding_rows)
        if isinstance(c.positions, LearnedPositions):
            rows = nn.with_logical_partitioning(normal, (None, EMBED))
            table = (c.max_positions + c.positions.offset, c.hidden_size)
            self.position_embedding = self.param("position_embedding", rows, table, self.dtype)
        if c.layer_input_size is not None:
            size, layers = c.layer_input_size, c.input_layers or c.num_layers
            table = (c.vocab_size // self.split.shards, layers * size)
            rows = nn.with_logical_partitioning(normal, (VOCAB, None))
            self.layer_embedding = self.param("layer_embedding", rows, table, self.dtype)
            embed, inputs = ((c.hidden_size, EMBED),), ((layers, None), (size, None))
            options: Any = dict(dtype=self.dtype, backend=self.backend)
            self.layer_projection = Projection(embed, inputs, use_bias=False, **options)
            self.layer_input_norm = NORMS[c.norm](size, c.norm_eps, self.dtype, None, self.backend)
        if c.embedding_size is not None:
            inner, outer = ((c.hidden_size, EMBED),), ((width, axis),)
            projection = functools.partial(
                Projection, use_bias=False, dtype=self.dtype, backend=self.backend
            )
            self.project_in, self.project_out = projection(outer, inner), projection(inner, outer)
        if self.is_initializing():  # later, `block` applies each layer's parameters
            self.layers = [layer_module(self, layer) for layer in range(c.num_layers)]
        if c.final_norm:
            self.norm = NORMS[c.norm](c.hidden_size, c.norm_eps, self.dtype, EMBED, self.backend)
        if not c.tie_embeddings:
            self.unembedding = tokens_by_width("unembedding", c.output_rows)
        if c.draft_vocab_size is not None:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
            self.vocab_map = self.param("vocab_map", zeros, (c.vocab_size,), jnp.int32)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        layer_inputs: Sequence[int] = (),
    ) -> PassResult:
        """Returns hidden states before the final norm, `attend`'s aux of each layer, and inputs.

        Args:
          tokens, positions: the inputs of the pass.
          attend: the attention to the prefix.
          layer_inputs: the layers whose inputs [B,T,E] are returned, by layer; the number of layers
            stands for the last layer's output.
        """
        x, aux, inputs = self.embed(tokens, positions), [], {}
        own, sources = self.layer_inputs(tokens, x), self.config.kv_sources
        kept = dict[int, tuple]()
        for layer, source in enumerate(sources):
            inputs[layer], attention = x, attend(layer)
            if source is not None:
                attention = Partial(share_entries, attention, kept[source])
            elif layer in sources:
                attention = Partial(keep_entries, attention)
            own_input = None if own is None else own[:, :, layer]
            x, layer_aux = self._run_block(x, positions, attention, layer, own_input)
            if layer in sources:
                layer_aux, kept[layer] = layer_aux
            aux.append(layer_aux)
        inputs[self.config.num_layers] = x
        if self.is_initializing():
            self.unembed(x)  # so that `init` creates every parameter
        return x, tuple(aux), {layer: inputs[layer] for layer in layer_inputs}

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Array:
        """Returns the first block's input, [B,T,E]: embeddings of tokens and learned positions.

        Positions beyond the table read its last row. Only padding and tree nodes that are never
        emitted have such positions, because longer contexts are refused before compilation. They
        must be finite, as 0 attention times NaN is NaN for other tokens.
        """
        c = self.config
        if c.draft_vocab_size is not None and not c.embeds_all:
            tokens = self.vocab_map[tokens]
        if isinstance(self.embedding, Packed):
            x = packed_rows(self.embedding, tokens, self.backend).astype(self.dtype)
        else:
            x = embedding_lookup(self.embedding, tokens, self.split)
        if c.scale_embeddings:
            x = x * jnp.asarray(c.hidden_size**0.5, x.dtype)
        x = scaled(x, c.embedding_multiplier)
        if c.embedding_size is not None:
            x = self.project_in(x)
        if isinstance(c.positions, LearnedPositions):
            rows = positions + c.positions.offset
            x = x + jnp.take(self.position_embedding, rows, axis=0, mode="clip")
        return x

    def layer_inputs(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T E"]
    ) -> Float[Array, "B T L P"] | None:
        """Returns the own inputs of all layers, given the embeddings; None: they have none.

        Each is the sum of an embedding of the token, and of a projection of x.
        """
        c = self.config
        if c.layer_input_size is None:
            return None
        context = self.layer_projection(x)
        context = self.layer_input_norm(scaled(context, c.hidden_size**-0.5))
        own = embedding_lookup(self.layer_embedding, tokens, self.split)
        own = own * jnp.asarray(c.layer_input_size**0.5, own.dtype)
        return scaled(context + own.reshape(context.shape), 2**-0.5)

    def block(
        self, x: Float[Array, "B T E"], positions: Int[Array, "B T"], attend: Attend, layer: int
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Returns the output of one layer, and `attend`'s auxiliary output.

        The model must have layers that read only x, their keys and their values.
        """
        return self._run_block(x, positions, attend(layer), layer, None)

    def _run_block(
        self, x: Array, positions: Array, attention: LayerAttend, layer: int, own_input: Any
    ) -> tuple[Array, Any]:
        arguments = x, positions, attention, self.config.rotations[layer], own_input
        if self.is_initializing():
            return self.layers[layer](*arguments)
        params = self.get_variable("params", f"{BLOCK}{layer}")
        with jax.named_scope(f"layer_{layer}"):
            return apply_block(layer_module(self, layer), params, *arguments)

    def unembed(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Returns the logits of hidden states, at least float32.

        Tokens outside a draft vocabulary have the logit `NEVER`.
        """
        logits = self.draft_logits(hidden)
        return logits if self.config.draft_vocab_size is None else logits[..., self.vocab_map]

    def draft_logits(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B R"]:
        """Returns the logits of the draft vocabulary, if there is one, in the order of its rows.

        The last row of a draft vocabulary stands for all other tokens: its logit is `NEVER`.
        """
        c = self.config
        weight = self.embedding if c.tie_embeddings else self.unembedding
        x = self.norm(hidden) if c.final_norm else hidden
        x = self.project_out(x) if c.embedding_size is not None else x
        wide = jnp.promote_types(self.dtype, jnp.float32)
        matrix = weight if isinstance(weight, Packed) else Matrix(weight)
        (logits,) = products(x, [matrix], 1, self.backend, wide)
        logits = capped(scaled(logits, 1 / c.logits_divisor), c.logits_softcap)
        return logits if c.draft_vocab_size is None else logits.at[..., -1].set(NEVER)
