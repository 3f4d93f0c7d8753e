"""Text that a target writes, recorded with the hidden states from which it chose every token."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Float, UInt16
from tqdm import tqdm

import magicjax
from experiments.schema import grid
from experiments.training import export
from experiments.training.generated_text import Generated, beginning
from magicjax.decoding import preparation
from magicjax.decoding.decoder import Decoder
from magicjax.decoding.request import RequestOptions
from magicjax.files import write_atomically
from magicjax.settings import StatsSpec
from magicjax.trees import token_tree
from magicjax.trees.proposal import Proposal

TOKEN_COLUMNS = 2  # a token's lower and upper 16 bits


@struct.dataclass
class Recorder(magicjax.Drafter):
    """Drafts nothing, and keeps inputs of the target's layers for every token.

    Attributes:
      layers: as in `StatsSpec.layer_inputs`.
    """

    layers: tuple[int, ...] = struct.field(pytree_node=False)

    def check(self, target, tree, depth, context) -> None:
        pass

    def draw_methods(self, tree) -> set[str]:
        return {"top"}

    def stats_spec(self) -> StatsSpec:
        return StatsSpec(layer_inputs=self.layers)

    def prefill(self, target, tokens, cache, stats, settings, previous=None) -> dict[int, Array]:
        def with_room(x: Float[Array, "B T E"]) -> Float[Array, "B S E"]:
            return jnp.pad(x, ((0, 0), (0, settings.capacity - x.shape[1]), (0, 0)))

        return {layer: with_room(stats.layer_inputs[layer]) for layer in self.layers}

    def propose(self, target, state, root, cache, sampling, settings) -> tuple[Proposal, None]:
        return Proposal(root[:, None], token_tree.ROOT_ONLY.array), None

    def commit(self, target, state, draft, proposal, outcome) -> dict[int, Array]:
        write = jax.vmap(lambda row, new, i: jax.lax.dynamic_update_slice_in_dim(row, new, i, 0))
        position = outcome.cache.lengths - outcome.committed
        return {
            layer: write(x, outcome.layer_inputs[layer][:, :1], position)
            for layer, x in state.items()
        }


def write(
    source: str, dtype: str, layers: tuple[int, ...], settings: Generated, work: pathlib.Path
) -> UInt16[np.ndarray, "R T C"]:
    """Returns rows of tokens and hidden states, memory-mapped; batch n is sampled with seed n.

    A killed run continues with the first batch that is not complete.

    Args:
      source, dtype: the target, as for `magicjax.load`.
      layers: whose inputs are recorded; the number of layers stands for the last one's output.
      settings: of the text.
      work: the folder of the file.

    Raises:
      ConfigError: the tokenizer has no beginning, or `work` has text of other settings.
    """
    work.mkdir(parents=True, exist_ok=True)
    record = f"{settings.model_dump_json()}\n{dtype} {layers} {grid.fingerprint(source)}\n"
    export.claim(work / "settings.txt", record)
    path, done_path = work / "recorded.npy", work / "batches_done.txt"
    batches = -(-settings.tokens // (settings.batch * settings.length))
    done = int(done_path.read_text()) if done_path.exists() else 0
    if done == batches:
        return np.load(path, mmap_mode="r")
    target = magicjax.load(source, dtype=dtype)
    start = beginning(target.tokenizer)
    positions = len(start) + settings.length - 1  # the last token was never read
    columns = TOKEN_COLUMNS + len(layers) * target.config.hidden_size
    shape = batches * settings.batch, positions, columns
    mode: Any = "r+" if done else "w+"
    rows = np.lib.format.open_memmap(path, mode, np.uint16, None if done else shape)
    bar = tqdm(total=batches, initial=done, desc="write text", unit="batch")
    for number in range(done, batches):
        first = number * settings.batch
        rows[first : first + settings.batch] = _batch(target, start, layers, settings, number)
        rows.flush()
        write_atomically(done_path, str(number + 1))
        bar.update()
    bar.close()
    return np.load(path, mmap_mode="r")


def _batch(
    target: magicjax.Model,
    start: list[int],
    layers: tuple[int, ...],
    settings: Generated,
    seed: int,
) -> UInt16[np.ndarray, "B T C"]:
    params = magicjax.SamplingParams(
        temperature=settings.temperature, seed=seed, max_tokens=settings.length
    )
    options = RequestOptions(
        drafter=Recorder(layers), tree=magicjax.chain(1), verifier="naive", eos_token_id=[]
    )
    request = preparation.prepare(target, [start] * settings.batch, params, options)
    decoder = Decoder(request)
    state = decoder.decode(decoder.start())
    positions = len(start) + settings.length - 1
    prompts = np.tile(np.array(start, np.int32), (settings.batch, 1))
    tokens = np.concatenate([prompts, np.asarray(state.output)[:, : settings.length - 1]], 1)
    hidden = [np.asarray(state.drafter[layer][:, :positions]) for layer in layers]
    bits = [x.astype(ml_dtypes.bfloat16).view(np.uint16) for x in hidden]
    halves = [tokens & 0xFFFF, tokens >> 16]
    return np.concatenate([*(x[..., None].astype(np.uint16) for x in halves), *bits], -1)


def unpacked(windows: UInt16[Array, "B T C"], layers: int) -> tuple[Array, Float[Array, "B T L E"]]:
    """Returns the tokens [B, T] and the hidden states, in float32, of recorded windows."""
    tokens = windows[..., 0].astype(jnp.int32) + (windows[..., 1].astype(jnp.int32) << 16)
    hidden = jax.lax.bitcast_convert_type(windows[..., TOKEN_COLUMNS:], jnp.bfloat16)
    size = hidden.shape[-1] // layers
    return tokens, hidden.reshape(*tokens.shape, layers, size).astype(jnp.float32)


def tokens_of(rows: UInt16[np.ndarray, "R T C"]) -> np.ndarray:
    """Returns the tokens of recorded rows, int32 [R, T]."""
    return rows[..., 0].astype(np.int32) + (rows[..., 1].astype(np.int32) << 16)
