"""The slow oracle: a Llama with gated delta nets, and its greedy text, in numpy float64.

Nothing here comes from the packages under test but the parameters: no cache, no tree, no chunk, no
drafter. Each token costs a whole forward over the text so far.
"""

import dataclasses

import jax
import numpy as np

MATRICES = ("gate", "up", "down")
TIE = 1e-5  # of the largest logit: what float32 may decide either way
STEP = 100  # times as much if float32 may round an element of a cache to another step of 8 bits


def _norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotate(x, theta):
    """Turns pair (i, i + D/2) of the head at position t by t * theta ** (-2i / D)."""
    length, _, size = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _in_8_bits(x):
    """Returns each vector in whole steps, of the least power of two with at most 127 of them."""
    step = 2.0 ** np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 127))
    return np.round(x / step) * step


def _keys_values(x, weights, config, kv_bits=None):
    """The keys and values of one text; x [T,E]."""
    k, v = (np.einsum("te,hde->thd", x, weights[name]["weight"]) for name in "kv")
    k = _rotate(k, config.rope.theta)
    if kv_bits:
        assert kv_bits == 8
        k, v = _in_8_bits(k), _in_8_bits(v)
    return k, v


def _attention(x, weights, config, sees, k, v):
    """Attention of one text, head by head; x [T,E], sees [T,T]."""
    q = _rotate(np.einsum("te,hde->thd", x, weights["q"]["weight"]), config.rope.theta)
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, shared].T / np.sqrt(config.head_dim)
        scores[~sees] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, shared]
    return np.einsum("thd,ehd->te", out, weights["out"]["weight"])


def _delta_net(x, weights, config, sees):
    """A gated delta net of one text, token by token, each from the state after its parent."""
    shape, path = config.delta_net, [np.flatnonzero(row)[::-1] for row in sees]  # newest first
    q, k, v, z = (np.einsum("te,hde->thd", x, weights[name]["weight"]) for name in "qkvz")
    mixed = np.concatenate([y.reshape(len(x), -1) for y in (q, k, v)], -1)
    kernel = weights["conv"][:, 0, ::-1].T  # of the token, of its parent, ...
    mixed = np.array([(mixed[p[: len(kernel)]] * kernel[: len(p)]).sum(0) for p in path])
    mixed = mixed / (1 + np.exp(-mixed))
    sizes = np.cumsum([q[0].size, k[0].size])
    q, k, v = (y.reshape(z.shape) for y, z in zip(np.split(mixed, sizes, -1), (q, k, v)))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    rate = np.log1p(np.exp(x @ weights["a"]["weight"].T + weights["step_bias"]))
    decay = np.exp(-np.exp(weights["log_rate"]) * rate)
    beta = 1 / (1 + np.exp(-x @ weights["b"]["weight"].T))
    out, states = np.zeros_like(v), {}
    for t, (node, *before) in enumerate(path):
        assert node == t
        for head in range(shape.value_heads):
            shared = head // (shape.value_heads // shape.key_heads)
            state = states[before[0], head] if before else np.zeros((q.shape[-1], v.shape[-1]))
            state = decay[t, head] * state
            update = beta[t, head] * (v[t, head] - k[t, shared] @ state)
            states[t, head] = state + np.outer(k[t, shared], update)
            out[t, head] = q[t, shared] / np.sqrt(q.shape[-1]) @ states[t, head]
    out = _norm(out, weights["norm"]["scale"], config.norm_eps) * z / (1 + np.exp(-z))
    return np.einsum("thd,ehd->te", out, weights["out"]["weight"])


def _within(sees, window):
    """Returns what tokens see in a layer, of which each sees its `window` newest positions."""
    if window is None:
        return sees
    place = sees.sum(-1) - 1  # of a node, the tokens before it
    return sees & (place[:, None] - place < window)


def _mlp(x, weights, config):
    gate, up = x @ weights["gate"]["weight"].T, x @ weights["up"]["weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ weights["down"]["weight"].T


def _mixture(x, weights, config):
    """The experts of one text, token by token."""
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        scores = np.exp(weights["router"]["weight"] @ token)
        chosen = np.argsort(-scores, kind="stable")[: config.experts_per_token]
        total = scores[chosen].sum() if config.normalize_experts else scores.sum()
        for expert in chosen:
            expert_weights = {
                name: {"weight": weights[name]["weight"][expert]} for name in MATRICES
            }
            out[t] += scores[expert] / total * _mlp(token, expert_weights, config)
    return out


def logits(target, text, sees=None) -> np.ndarray:
    """Returns the logits after every token of one text, [T,V] in float64.

    Token t sees token s where sees[t, s]; without it, where s <= t. Positions are the places in
    the text.
    """
    config = target.config
    sees = np.tril(np.ones((len(text), len(text)), bool)) if sees is None else sees
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), target.params)["params"]
    x, kept = params["embedding"][np.asarray(text)], {}
    for layer, source in enumerate(config.kv_sources):
        block = params[f"layers_{layer}"]
        normed = _norm(x, block["attention_norm"]["scale"], config.norm_eps)
        if config.linear[layer]:
            x = x + _delta_net(normed, block["delta_net"], config, sees)
        else:
            weights, layer_config = block["attention"], config.of_layer(layer)
            if source is None:
                kept[layer] = _keys_values(normed, weights, layer_config, target.kv_bits)
            seen = _within(sees, config.windows[layer])
            k, v = kept[layer if source is None else source]
            x = x + _attention(normed, weights, layer_config, seen, k, v)
        normed = _norm(x, block["mlp_norm"]["scale"], config.norm_eps)
        x = x + (_mlp if config.num_experts is None else _mixture)(normed, block["mlp"], config)
    return _norm(x, params["norm"]["scale"], config.norm_eps) @ params["unembedding"].T


def slack(target) -> float:
    """Returns the share of the largest logit by which rounding may change a logit."""
    return TIE * (STEP if target.kv_bits else 1)


def greedy(target, prompt, new_tokens: int) -> np.ndarray:
    """Returns the first `new_tokens` of plain greedy decoding, the text rerun for each."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(logits(target, text)[-1].argmax()))
    return np.array(text[len(prompt) :], np.int32)


def cut(tokens, eos=(), limit: int | None = None) -> np.ndarray:
    """Returns the tokens up to the first EOS, included, and at most `limit` of them."""
    tokens = np.asarray(tokens)[:limit]
    ends = np.flatnonzero(np.isin(tokens, eos))
    return tokens[: ends[0] + 1] if ends.size else tokens


@dataclasses.dataclass
class Tally:
    """Rows that were compared, and those among them that part at a tie."""

    rows: int = 0
    ties: int = 0

    def compare(self, target, prompts, expected, found, ties_allowed: bool = True) -> None:
        """Asserts that each row found is the row expected, up to a first tie.

        At a first divergence both tokens must be the target's best to within `TIE` of its largest
        logit; float32 decides such a tie by rounding, and nothing can be said about what follows.
        """
        for prompt, wanted, row in zip(prompts, expected, found, strict=True):
            self.rows += 1
            if np.array_equal(wanted, row):
                continue
            place, margin = divergence(target, prompt, wanted, row)
            assert ties_allowed and margin < slack(target), (
                f"after {place} tokens: {row} instead of {wanted}, margin {margin:.1e}"
            )
            self.ties += 1


def divergence(target, prompt, wanted, found) -> tuple[int, float]:
    """Returns (where two rows part, how far the worse token is from the best, relative).

    A row that is a mere start of the other parts from it beyond any tie: margin 1.
    """
    shared = min(len(wanted), len(found))
    differing = np.flatnonzero(wanted[:shared] != found[:shared])
    if not differing.size:
        return shared, 1.0
    place = int(differing[0])
    there = logits(target, [*prompt, *wanted[:place]])[-1]
    worse = min(there[wanted[place]], there[found[place]])
    return place, float((there.max() - worse) / np.abs(there).max())
