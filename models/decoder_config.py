"""The shapes and settings of a decoder, their limits, and what follows from them for each layer.

`models.decoder` has the modules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from models.gated_delta import DeltaNetShape
from models.layers import LayerNorm, RMSNorm
from models.positions import (
    ALIBI_COLUMNS,
    ALIBI_POSITIONS,
    Alibi,
    LearnedPositions,
    Rope,
    frequencies,
)
from sharding import EMBED

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
        return _layer_config(self, self.slides[layer], self.kv_sources[layer] is not None)

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """The layer whose keys and values each layer reads; None: its own."""
        first, slides = self.num_layers - self.shared_kv_layers, self.slides
        last = {windowed: layer for layer, windowed in enumerate(slides[:first])}
        return tuple(None if i < first else last[windowed] for i, windowed in enumerate(slides))

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
        return tuple(UNROTATED if i in unrotated else x for i, x in enumerate(rotated))

    def frequencies(self, rotation: int) -> tuple[Any, Any]:
        """Returns the radians per position and the factor on cosine and sine of a layer (`Rope`).

        `rotation` is that of the layer, which is not `UNROTATED`.
        """
        rope = self.window_positions if rotation == BY_WINDOW_POSITIONS else self.rope
        assert rope is not None
        return frequencies(rope, self.head_dim)

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
            suggested = nearest / head_dim
            if int(suggested * head_dim) < nearest:  # 30 / 44, which times 44 is below 30
                suggested = math.nextafter(suggested, 1)
            raise ValueError(
                f"partial_rotary_factor={factor} rotates {size} elements of {name}={head_dim}: "
                f"their number must be even, from 2 to {head_dim}; for {nearest}, use {suggested}"
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
            layer_configs = [
                self.of_layer(i) for i in (range(self.num_layers) if layer is None else [layer])
            ]
            has_values = not all(config.values_are_keys for config in layer_configs)
            names = (*"qk", *"v" * has_values, *("gate",) * self.attention_gate)
            if layer is not None and self.kv_sources[layer] is not None:
                names = tuple(name for name in names if name not in ("k", "v"))
            inputs |= {f"attention/{name}": width for name in names}
            head_dim = math.gcd(*(config.head_dim for config in layer_configs))
            inputs["attention/out"] = self.num_heads * head_dim // shards
        if (shape := self.delta_net) is not None and (layer is None or self.linear[layer]):
            inputs |= {f"delta_net/{name}": width for name in "qkvz"}
            inputs["delta_net/out"] = shape.value_heads * shape.value_dim // shards
        inputs |= {f"mlp/{name}": width for name in up}
        # Experts are divided, not their widths.
        mlp_shards = shards if self.num_experts is None else 1
        config = self if layer is None else self.of_layer(layer)
        inputs["mlp/down"] = config.intermediate_size // mlp_shards
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
def _layer_config(config: DecoderConfig, slides: bool, shares: bool) -> DecoderConfig:
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
