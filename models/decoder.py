"""The decoder of all families as one Flax module; families are settings of it.

The module is independent of caches, masks and trees: each block passes its q, k, v to `attend`,
which determines the visible positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from models import experts
from models.decoder_config import ACTIVATIONS, NORMS, UNROTATED, DecoderConfig
from models.gated_delta import GatedDeltaNet
from models.layers import (
    NEVER,
    Attend,
    LayerAttend,
    PassResult,
    RMSNorm,
    embedding_lookup,
    scaled,
)
from models.linear import Projection, packed_param, packed_rows, products, project
from models.positions import (
    Alibi,
    LearnedPositions,
    Rope,
    add_biases,
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
    def __call__(self, x, positions, attend: LayerAttend, rotation: int):
        c = self.config
        heads = ((c.num_heads // self.split.shards, HEADS), (c.head_dim, HEAD_DIM))
        kv_heads = ((c.num_kv_heads // self.split.kv_shards, KV_HEADS), (c.head_dim, HEAD_DIM))
        embed = ((c.hidden_size, EMBED),)

        def projection(inputs, outputs, use_bias, name, **options):
            options |= dict(dtype=self.dtype, weights=self.weights.of(name), backend=self.backend)
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
        head_norm_options: Any = dict(
            size=c.head_dim, eps=c.norm_eps, dtype=self.dtype, axis=HEAD_DIM, backend=self.backend
        )
        if c.joint_qk_norm:
            q = self._norm_of_all_heads("q_norm", q, HEADS, self.split.axes)
            k = self._norm_of_all_heads("k_norm", k, KV_HEADS, self.split.kv_axes)
        elif c.qk_norm:
            q = NORMS[c.norm](**head_norm_options, name="q_norm")(q)
            k = k if self.shares else NORMS[c.norm](**head_norm_options, name="k_norm")(k)
        if c.value_norm and not self.shares:
            v = RMSNorm(**head_norm_options, use_scale=False, name="v_norm")(v)
        if c.clip_qkv is not None:
            q, k, v = (jnp.clip(x, -c.clip_qkv, c.clip_qkv) for x in (q, k, v))
        if isinstance(c.positions, Rope) and rotation != UNROTATED:
            frequencies, factor = c.frequencies(rotation)
            q = rotate_by(q, positions, frequencies, factor)
            k = k if self.shares else rotate_by(k, positions, frequencies, factor)
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
        flat = x.reshape(*x.shape[:-2], -1)
        norm = RMSNorm(
            size=flat.shape[-1],
            eps=self.config.norm_eps,
            dtype=self.dtype,
            axis=axis,
            backend=self.backend,
            axis_names=axis_names,
            name=name,
        )
        return norm(flat).reshape(x.shape)


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
            options |= dict(dtype=self.dtype, weights=self.weights.of(name), backend=self.backend)
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
        embed, hidden = (c.hidden_size, EMBED), (c.intermediate_size, None)
        local_experts = (c.num_experts // self.split.shards, EXPERTS)
        router = Projection(
            (embed,), ((c.num_experts, None),), c.router_bias, name="router", **options
        )

        def projection(inputs, outputs, name):
            weights = self.weights.of(name)
            return Projection(inputs, outputs, c.mlp_bias, name=name, weights=weights, **options)

        names = ("gate", "up")[not c.gated :]
        up_projections = [projection((embed,), (local_experts, hidden), name) for name in names]
        down_projection = projection((hidden,), (local_experts, embed), "down")
        norm_options: Any = dict(
            size=c.hidden_size, eps=c.norm_eps, dtype=self.dtype, axis=EMBED, backend=self.backend
        )
        rows = routed = x.reshape(-1, x.shape[-1])
        if c.parallel_experts:
            before_norm = before_norm.reshape(rows.shape)
            rows = NORMS[c.norm](**norm_options, name="experts_norm")(before_norm)
            routed = RMSNorm(**norm_options, use_scale=False, name="router_norm")(before_norm)
            ones = nn.with_logical_partitioning(nn.initializers.ones, (EMBED,))
            scale = self.param("router_scale", ones, (c.hidden_size,), self.dtype)
            routed = scaled(routed * scale, c.hidden_size**-0.5)
        chosen, expert_weights = experts.choose(
            router(routed), c.experts_per_token, c.normalize_experts
        )
        if c.parallel_experts:
            ones = nn.with_logical_partitioning(nn.initializers.ones, (None,))
            factors = self.param("expert_scale", ones, (c.num_experts,), self.dtype)
            expert_weights = expert_weights * factors[chosen]
        shard = collectives.axis_index(self.split.axes) if self.split.axes else 0
        out = experts.run_experts(
            rows,
            chosen,
            expert_weights,
            up_projections,
            c.activate,
            down_projection,
            c.num_experts,
            first_expert=shard * local_experts[0],
        )
        out = collectives.psum(out.astype(x.dtype), self.split.axes).reshape(x.shape)
        if c.shared_expert_size is None:
            return out
        shared_expert = FeedForward(
            config=dataclasses.replace(c, intermediate_size=c.shared_expert_size),
            dtype=self.dtype,
            split=self.split,
            weights=self.weights.within("shared"),
            backend=self.backend,
            name="shared",
        )
        shared = shared_expert(x)
        if c.parallel_experts:
            out = NORMS[c.norm](**norm_options, name="experts_output_norm")(out)
            return out + NORMS[c.norm](**norm_options, name="shared_output_norm")(shared)
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
    def __call__(self, x, positions, attend: LayerAttend, rotation: int, per_layer_input=None):
        c = self.config

        def norm(name):
            return NORMS[c.norm](
                c.hidden_size, c.norm_eps, self.dtype, EMBED, self.backend, name=name
            )

        def submodule(module_class: type[nn.Module], name: str, **fields: Any) -> nn.Module:
            return module_class(
                config=c,
                dtype=self.dtype,
                split=self.split,
                weights=self.weights.within(name),
                backend=self.backend,
                name=name,
                **fields,
            )

        def mixer() -> Callable[..., tuple[Array, Any]]:
            if not self.linear:
                return submodule(Attention, "attention", shares=self.shares)
            delta_net = submodule(GatedDeltaNet, "delta_net")
            return lambda x, positions, attend, rotation: delta_net(x, attend)

        attention = mixer()
        mlp = submodule(FeedForward if c.num_experts is None else MixtureOfExperts, "mlp")

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
            out = Projection(inner, embed, name="input_projection", **options)(
                gate * per_layer_input
            )
            x = x + norm("input_norm")(out)
        if c.layer_scalars:
            ones = nn.with_logical_partitioning(nn.initializers.ones, (None,))
            x = x * self.param("scalar", ones, (1,), self.dtype)
        return x, aux


def layer_module(module: nn.Module, layer: int = 0) -> Block:
    """Returns the module of a layer; those of layers of a kind in the same formats are equal.

    Its parameters are `params["params"]["layers_<i>"]`.
    """
    return Block(
        config=module.config.of_layer(layer),
        dtype=module.dtype,
        split=module.split,
        weights=module.weights.within(f"{BLOCK}{layer}"),
        backend=module.backend,
        linear=module.config.linear[layer],
        shares=module.config.kv_sources[layer] is not None,
        parent=None,
    )


def layer_kinds(module: nn.Module) -> list[list[int]]:
    """Returns the layers of each kind, whose modules are equal, in order of their first layers."""
    kinds = dict[Block, list[int]]()
    for layer in range(module.config.num_layers):
        kinds.setdefault(layer_module(module, layer), []).append(layer)
    return [*kinds.values()]


def output_matrix(module: nn.Module, params: dict[str, Any]) -> Array | Packed:
    """Returns the matrix [V, E] that gives the logits of a decoder."""
    name = "embedding" if module.config.tie_embeddings else "unembedding"
    matrix = params["params"][name]
    weight_format = formats_of(module).of(name)
    if not isinstance(weight_format, str):
        return matrix
    return Packed(matrix, weight_format, (OUTPUTS * matrix.shape[0],))


@functools.partial(jax.jit, static_argnames=("block", "rotation"))
def apply_block(
    block: Block,
    params: dict[str, Any],
    x: Float[Array, "B T E"],
    positions: Int[Array, "B T"],
    attend: LayerAttend,
    rotation: int,
    per_layer_input: Float[Array, "B T P"] | None = None,
) -> tuple[Float[Array, "B T E"], Any]:
    """Returns the output of a layer with these parameters, and `attend`'s auxiliary output.

    JAX traces and lowers layers with equal modules and shapes once. XLA inlines the calls.
    """
    return block.apply({"params": params}, x, positions, attend, rotation, per_layer_input)


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

        def vocab_matrix(name: str, rows: int) -> Array | Packed:
            shape = (rows // self.split.shards, width)
            weight_format = self.weights.of(name)
            if not isinstance(weight_format, str):
                return self.param(name, init, shape, self.dtype)
            return packed_param(self, name, weight_format, ((shape[0], VOCAB),), ((width, axis),))

        self.embedding = vocab_matrix("embedding", c.embedding_rows)
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
            self.unembedding = vocab_matrix("unembedding", c.output_rows)
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
        per_layer_inputs = self.layer_inputs(tokens, x)
        sources = self.config.kv_sources
        kept = dict[int, tuple]()
        for layer, source in enumerate(sources):
            inputs[layer], attention = x, attend(layer)
            if source is not None:
                attention = Partial(share_entries, attention, kept[source])
            elif layer in sources:
                attention = Partial(keep_entries, attention)
            per_layer_input = None if per_layer_inputs is None else per_layer_inputs[:, :, layer]
            x, layer_aux = self._run_block(x, positions, attention, layer, per_layer_input)
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
        token_inputs = embedding_lookup(self.layer_embedding, tokens, self.split)
        token_inputs = token_inputs * jnp.asarray(c.layer_input_size**0.5, token_inputs.dtype)
        return scaled(context + token_inputs.reshape(context.shape), 2**-0.5)

    def block(
        self, x: Float[Array, "B T E"], positions: Int[Array, "B T"], attend: Attend, layer: int
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Returns the output of one layer, and `attend`'s auxiliary output.

        The model must have layers that read only x, their keys and their values.
        """
        return self._run_block(x, positions, attend(layer), layer, None)

    def _run_block(
        self, x: Array, positions: Array, attention: LayerAttend, layer: int, per_layer_input: Any
    ) -> tuple[Array, Any]:
        arguments = x, positions, attention, self.config.rotations[layer], per_layer_input
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
        logits_dtype = jnp.promote_types(self.dtype, jnp.float32)
        matrix = weight if isinstance(weight, Packed) else Matrix(weight)
        (logits,) = products(x, [matrix], 1, self.backend, logits_dtype)
        logits = capped(scaled(logits, 1 / c.logits_divisor), c.logits_softcap)
        return logits if c.draft_vocab_size is None else logits.at[..., -1].set(NEVER)
