"""A reference of heads for multi-token prediction, in float64 and without a cache.

It is written from the layout of Qwen3-Next and Qwen3.5 and from what vLLM and SGLang compute, not
from this package. Each drafted token runs the whole text again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ZERO_CENTRED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # norms scale by 1 + weight
Array = np.ndarray


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a head, given the contents of the target's config.json.

    Experts have tensors of their own, as in Qwen3-Next.
    """
    width, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    has_gate = config["model_type"] in ZERO_CENTRED
    of_outputs = {"q": heads * size * (1 + has_gate), "k": kv_heads * size, "v": kv_heads * size}
    layer = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc.weight": (width, 2 * width)}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{name}.weight": (width,) for name in norms}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{name}.weight"] = (width,)
    for part, outputs in of_outputs.items():
        shapes[f"{layer}self_attn.{part}_proj.weight"] = (outputs, width)
    shapes[f"{layer}self_attn.o_proj.weight"] = (width, heads * size)
    if config.get("attention_bias"):
        for part, outputs in {**of_outputs, "o": width}.items():
            shapes[f"{layer}self_attn.{part}_proj.bias"] = (outputs,)
    shapes |= {f"{layer}self_attn.{part}_norm.weight": (size,) for part in "qk"}

    def mlp(name: str, inner: int) -> None:
        for part in ("gate", "up"):
            shapes[f"{layer}mlp.{name}{part}_proj.weight"] = (inner, width)
        shapes[f"{layer}mlp.{name}down_proj.weight"] = (width, inner)

    if "num_experts" not in config:
        mlp("", config["intermediate_size"])
        return shapes
    shapes[f"{layer}mlp.gate.weight"] = (config["num_experts"], width)
    for expert in range(config["num_experts"]):
        mlp(f"experts.{expert}.", config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        mlp("shared_expert.", config["shared_expert_intermediate_size"])
        shapes[f"{layer}mlp.shared_expert_gate.weight"] = (1, width)
    return shapes


def drawn(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Returns random float32 tensors of a head; norms are random too, and differ."""
    rng = np.random.default_rng(seed)
    mean = 0.0 if config["model_type"] in ZERO_CENTRED else 1.0
    return {
        name: (
            mean + 0.3 * rng.standard_normal(shape)
            if "norm" in name
            else rng.standard_normal(shape) / np.sqrt(shape[-1])
        ).astype(np.float32)
        for name, shape in shapes_of(config).items()
    }


class Reference:
    """A head and its target's embedding, final norm and output matrix.

    Args:
      config: the contents of the target's config.json.
      tensors: of both, by their names, those of the target below `model.`.
      hidden_first: a control: the hidden state comes before the embedding.
      raw_hidden: a control: the target's hidden states are those before its final norm.
      raw_output: a control: the head's own output is read before its norm.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Array],
        hidden_first: bool = False,
        raw_hidden: bool = False,
        raw_output: bool = False,
    ):
        self.config, self.hidden_first = config, hidden_first
        self.raw_hidden, self.raw_output = raw_hidden, raw_output
        self.tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def norm(self, name: str, x: Array) -> Array:
        shift = self.config["model_type"] in ZERO_CENTRED
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / root * (shift + self.tensors[f"{name}.weight"])

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def rotated(self, x: Array) -> Array:
        """Returns heads [T, H, D] rotated by their positions, in the first part of each."""
        rope = self.config["rope_parameters"]
        size = int(self.config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        rates = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
        angles = np.arange(len(x))[:, None, None] * rates
        first, second, rest = np.split(x, (size // 2, size), -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def attention(self, x: Array) -> Array:
        layer, size = "mtp.layers.0.self_attn.", self.config["head_dim"]
        q, k, v = (
            self.linear(f"{layer}{part}_proj", x).reshape(len(x), -1, size) for part in "qkv"
        )
        gate = None
        if self.config["model_type"] in ZERO_CENTRED:  # each head's query, then its gate
            q, gate = (y.reshape(len(x), -1, size) for y in (q[:, ::2], q[:, 1::2]))
        q, k = (self.norm(f"{layer}{n}_norm", y) for n, y in (("q", q), ("k", k)))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(size)
        scores[:, np.triu(np.ones((len(x),) * 2, bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
        out = out if gate is None else out / (1 + np.exp(-gate))
        return self.linear(f"{layer}o_proj", out.reshape(len(x), -1))

    def mlp(self, name: str, x: Array) -> Array:
        gate, up = (self.linear(f"mtp.layers.0.mlp.{name}{n}_proj", x) for n in ("gate", "up"))
        return self.linear(f"mtp.layers.0.mlp.{name}down_proj", gate / (1 + np.exp(-gate)) * up)

    def experts(self, x: Array) -> Array:
        logits, count = self.linear("mtp.layers.0.mlp.gate", x), self.config["num_experts_per_tok"]
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        chosen = np.argsort(-shares, -1)[:, :count]
        out = np.zeros_like(x)
        for row, experts in enumerate(chosen):
            # Qwen3.5 has no key for it, and Qwen3-Next a true one.
            total = shares[row, experts].sum() if self.config.get("norm_topk_prob", True) else 1.0
            for i in experts:
                own = self.mlp(f"experts.{i}.", x[row : row + 1])[0]
                out[row] += shares[row, i] / total * own
        if "shared_expert_intermediate_size" in self.config:
            gate = self.linear("mtp.layers.0.mlp.shared_expert_gate", x)
            out += self.mlp("shared_expert.", x) / (1 + np.exp(-gate))
        return out

    def layer(self, tokens: Sequence[int], features: Array) -> Array:
        """Returns the layer's outputs [T, E] for tokens and the features of the tokens before."""
        embedded = self.tensors["model.embed_tokens.weight"][list(tokens)]
        parts = [
            self.norm("mtp.pre_fc_norm_embedding", embedded),
            self.norm("mtp.pre_fc_norm_hidden", features),
        ]
        x = self.linear("mtp.fc", np.concatenate(parts[:: -1 if self.hidden_first else 1], -1))
        x = x + self.attention(self.norm("mtp.layers.0.input_layernorm", x))
        y = self.norm("mtp.layers.0.post_attention_layernorm", x)
        return x + (self.experts(y) if "num_experts" in self.config else self.mlp("", y))

    def chain(self, text: Sequence[int], hidden: Array, steps: int) -> tuple[Array, list[int]]:
        """Returns logits [steps, V] and the most likely tokens of a draft.

        Args:
          text: tokens 0 to T, of which the last is the root.
          hidden: [T, E], the target's last hidden states of tokens 0 to T - 1, before its norm.
          steps: length of the draft.
        """
        features = hidden if self.raw_hidden else self.norm("model.norm", hidden)
        tokens, all_logits = [*text[1:]], []
        for _ in range(steps):
            out = self.layer(tokens, features)[-1:]
            normed = self.norm("mtp.norm", out)
            logits = (normed @ self.tensors["lm_head.weight"].T)[0]
            all_logits.append(logits)
            tokens.append(int(logits.argmax()))
            features = np.concatenate([features, out if self.raw_output else normed])
        return np.stack(all_logits), tokens[-steps:]
