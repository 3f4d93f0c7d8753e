"""Makes `golden_eagle/`: tiny random EAGLE-3 and EAGLE-3.1 heads, and what a reference drafts.

Needs torch and safetensors, which the tests that read the result do not:
`python tests/models/make_golden_eagle.py [CASE...]`. The reference is written from the papers, not
from this package: EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992) and, for the tree,
EAGLE-2 (arXiv 2406.16858, section 4). It computes in float64 and has no cache: each drafted token
runs the whole text again. Norms are random too, or a head that left them out would pass.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.nn.functional import silu

GOLDEN = pathlib.Path(__file__).parent / "golden_eagle"
CHAIN, WIDTH, DEPTH, NODES = 5, 4, 4, 12
TEXT = 9  # tokens of the text before the root
MARGIN = 2e-3  # between a chosen and the next best token or node, so that float32 chooses alike

LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
SPECFORGE = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20}
# Of a target of 8 layers; the outputs of layers 1, 3, 4 are the inputs of 2, 4, 5.
OUTPUTS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
ROPE = {"rope_type": "default", "rope_theta": 300.0}
ROPE_3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 20,
    "eagle_aux_hidden_state_layer_ids": [3, 4, 6],
    "norm_before_fc": True,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
        "head_dim": 8,
        "rope_parameters": ROPE,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A head: its config.json, which tensors it has, and their names.

    Attributes:
      config: the contents of config.json.
      embedding: whether it has an embedding; False: it reads the target's.
      output: whether it has an output matrix; False: it uses the target's rows of its tokens.
      layer: the prefix of the layer's tensors.
      seed: of all random numbers.
    """

    config: Mapping[str, Any]
    embedding: bool = False
    output: bool = True
    layer: str = "midlayer."
    seed: int = 0


CASES = {
    "safeailab": Case({**SPECFORGE, "architectures": ["LlamaForCausalLM"]}, embedding=True, seed=4),
    "specforge": Case({**SPECFORGE, "eagle_config": OUTPUTS}),
    "speculators": Case(SPECULATORS, embedding=True, layer="layers.0."),
    "eagle31": Case({**SPECFORGE, "fc_norm": True, "norm_output": True}),
    "full_vocabulary": Case({**SPECFORGE, "draft_vocab_size": 48}),
    "tied_head": Case(SPECFORGE, output=False),
    "grouped_rope_llama3": Case({**SPECFORGE, "num_key_value_heads": 1, "rope_scaling": ROPE_3}),
    "wide_head_dim": Case({**SPECFORGE, "head_dim": 12}),
    "wide_target": Case({**SPECFORGE, "target_hidden_size": 48}, embedding=True),
}


class Reference:
    """A head and the text that it continues, in float64.

    Args:
      config: of the layer, with the settings of the head.
      tensors: by their names in SpecForge's layout.
      embedding, output: matrices of the head, or of the target in their place.
      text: tokens 0 to T of a text, of which the last is the root.
      hidden: [T, 3 * Et], the target's hidden states of tokens 0 to T - 1, side by side.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        output: torch.Tensor,
        text: Sequence[int],
        hidden: torch.Tensor,
    ):
        self.config, self.text = config, list(text)
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding, self.output = embedding.double(), output.double()
        self.features = self.fuse(hidden.double())

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self.tensors[name]

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[name].T

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the features [T, E] of the target's hidden states [T, 3 * Et]."""
        if self.config.get("norm_before_fc"):
            hidden = self.norm("input_norm.weight", hidden)
        if self.config.get("fc_norm"):
            three = hidden.chunk(3, -1)
            hidden = torch.cat(
                [self.norm(f"fc_norm.{i}.weight", x) for i, x in enumerate(three)], -1
            )
        return self.product("fc.weight", hidden)

    def frequencies(self, head_dim: int) -> torch.Tensor:
        rope = self.config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequency
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / scaling["factor"])

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the attention of the entries [T, 2 * E], each to itself and to earlier ones."""
        size = self.config.get("head_dim") or self.config["hidden_size"] // 4
        time = len(x)
        angles = torch.arange(time)[:, None] * self.frequencies(size)
        cos, sin = angles.cos(), angles.sin()

        def heads(part: str) -> torch.Tensor:
            return self.product(f"midlayer.self_attn.{part}_proj.weight", x).view(time, -1, size)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            first, second = y.transpose(0, 1).chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        q, k, v = rotate(heads("q")), rotate(heads("k")), heads("v").transpose(0, 1)
        k, v = (y.repeat_interleave(len(q) // len(y), 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(size)
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        joined = mixed.transpose(0, 1).reshape(time, -1)
        return self.product("midlayer.self_attn.o_proj.weight", joined)

    def layer(self, tokens: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """Returns the layer's outputs [T, E] for tokens and the features of the tokens before."""
        embedded = self.norm("midlayer.input_layernorm.weight", self.embedding[list(tokens)])
        normed = self.norm("midlayer.hidden_norm.weight", features)
        residual = normed if self.config.get("norm_before_residual") else features
        x = residual + self.attention(torch.cat([embedded, normed], -1))
        y = self.norm("midlayer.post_attention_layernorm.weight", x)
        gate, up = (self.product(f"midlayer.mlp.{part}_proj.weight", y) for part in ("gate", "up"))
        return x + self.product("midlayer.mlp.down_proj.weight", silu(gate) * up)

    def logits(self, drafted: Sequence[int] = ()) -> torch.Tensor:
        """Returns the logits [V] after the root and drafted tokens: -inf for others than d2t's."""
        tokens, features = self.text[1:], self.features
        for token in (*drafted, None):
            out = self.layer(tokens, features)[-1:]
            normed = self.norm("norm.weight", out)
            feedback = normed if self.config.get("norm_output") else out
            tokens, features = [*tokens, token], torch.cat([features, feedback])
        draft = (normed @ self.output.T)[0]
        if "d2t" not in self.tensors:
            return draft
        logits = torch.full((self.config["vocab_size"],), -math.inf, dtype=torch.float64)
        logits[torch.arange(len(draft)) + self.tensors["d2t"].long()] = draft
        return logits


def best(values: torch.Tensor, count: int) -> list[int]:
    """Returns the indices of the greatest values, best first, and checks that none are close."""
    top = values.topk(min(count + 1, len(values)))
    gaps = top.values[:-1] - top.values[1:]
    assert gaps.min() > MARGIN, f"two values differ by {gaps.min():.1e} only: use another seed"
    return top.indices[:count].tolist()


def chain(logits: Callable[..., torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Returns the tokens of a greedy chain and the logits of each."""
    tokens: list[int] = []
    steps = []
    for _ in range(CHAIN):
        steps.append(logits(tokens))
        tokens += best(steps[-1], 1)
    return tokens, torch.stack(steps)


def tree(logits: Callable[..., torch.Tensor]) -> tuple[list[int], list[int]]:
    """Returns the tokens of the best nodes and their parents; 0 is the root, and node 1 the first.

    At each depth the best nodes of the depth before have children; the best of all are the tree.
    """
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    drafted: list[tuple[tuple[int, ...], float]] = []
    for _ in range(DEPTH):
        children = []
        for path, score in frontier:
            log_probs = logits(path).log_softmax(-1)
            children += [((*path, i), score + float(log_probs[i])) for i in best(log_probs, WIDTH)]
        drafted += children
        scores = torch.tensor([score for _, score in children], dtype=torch.float64)
        frontier = [children[i] for i in best(scores, WIDTH)]
    order = sorted(range(len(drafted)), key=lambda i: -drafted[i][1])
    cut = drafted[order[NODES - 1]][1] - drafted[order[NODES]][1]
    assert cut > MARGIN, f"the last node is better than the next by {cut:.1e} only"
    paths = [(), *(drafted[i][0] for i in sorted(order[:NODES]))]
    return [path[-1] for path in paths[1:]], [paths.index(path[:-1]) for path in paths[1:]]


def random_tensors(
    case: Case, config: Mapping[str, Any], draw: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns random tensors of a head by their names in SpecForge's layout."""
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim") or width // config["num_attention_heads"]
    queries, pairs = (config[f"num_{x}_heads"] * size for x in ("attention", "key_value"))
    hidden = config.get("target_hidden_size") or width
    matrices = {
        "fc": (width, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (pairs, 2 * width),
        "midlayer.self_attn.v_proj": (pairs, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (mlp, width),
        "midlayer.mlp.up_proj": (mlp, width),
        "midlayer.mlp.down_proj": (width, mlp),
    }
    matrices |= {"lm_head": (config["draft_vocab_size"], width)} if case.output else {}
    matrices |= {"embed_tokens": (vocab, width)} if case.embedding else {}
    layer_norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    norms = {f"midlayer.{name}": width for name in layer_norms} | {"norm": width}
    norms |= {"input_norm": 3 * hidden} if config.get("norm_before_fc") else {}
    norms |= {f"fc_norm.{i}": hidden for i in range(3)} if config.get("fc_norm") else {}
    tensors = {name: 1.5 * draw(*shape) / math.sqrt(shape[1]) for name, shape in matrices.items()}
    tensors |= {name: 1 + 0.3 * draw(length) for name, length in norms.items()}
    named = {f"{name}.weight": tensor.bfloat16() for name, tensor in tensors.items()}
    if config["draft_vocab_size"] == vocab:
        return named
    ids = draw(vocab).argsort()[: config["draft_vocab_size"]].sort().values
    named["d2t"] = ids - torch.arange(len(ids))
    named["t2d"] = torch.isin(torch.arange(vocab), ids)
    return named


def make(name: str) -> None:
    """Writes golden_eagle/<name>: the head, and expected.npz with inputs and results.

    Inputs are `tokens` [T + 1], whose last is the root, `hidden` [3, T, Et] and matrices of the
    target, `target_embedding` and `target_output` [V, Et]. Results are `logits` [5, V] and `chain`
    [5], and `tree_tokens` and `tree_parents` [12].
    """
    case = CASES[name]
    config = {**case.config.get("transformer_layer_config", {}), **case.config}
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = random_tensors(case, config, draw)
    vocab, width = config["vocab_size"], config.get("target_hidden_size") or config["hidden_size"]
    target_embedding, target_output = draw(vocab, width), draw(vocab, width) / math.sqrt(width)
    text = torch.randint(0, vocab, (TEXT + 1,), generator=generator)
    hidden = torch.stack([scale * draw(TEXT, width) for scale in (0.5, 1.0, 2.0)])

    embedding = tensors.get("embed_tokens.weight", target_embedding)
    output = tensors.get("lm_head.weight")
    if output is None:
        output = target_output[torch.arange(len(tensors["d2t"])) + tensors["d2t"]]
    joined = torch.cat(list(hidden), -1)
    reference = Reference(config, tensors, embedding, output, text.tolist(), joined)
    chain_tokens, logits = chain(reference.logits)
    tree_tokens, tree_parents = tree(reference.logits)

    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=2) + "\n")
    stored = {key.replace("midlayer.", case.layer): x.contiguous() for key, x in tensors.items()}
    data = safetensors.torch.save(stored, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=text.numpy().astype(np.int32),
        hidden=hidden.numpy(),
        target_embedding=target_embedding.numpy(),
        target_output=target_output.numpy(),
        logits=logits.numpy().astype(np.float32),
        chain=np.array(chain_tokens, np.int32),
        tree_tokens=np.array(tree_tokens, np.int32),
        tree_parents=np.array(tree_parents, np.int32),
    )


if __name__ == "__main__":
    for case_name in sys.argv[1:] or CASES:
        make(case_name)
