"""Times a layer of experts by the number of tokens, beside the bytes that the cost model predicts.

    python -m experiments.studies.expert_reads [--experts X] [--chosen K] [--weights FORMAT]

The layer has random weights, and the tokens are random and different, so that experts are chosen
almost independently. Tokens of one text share more of them.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import models
from magicjax.benchmarks.tables import record_table
from magicjax.decoding.runner import timed
from magicjax.prediction.cost_model import sizes_of
from models import experts
from models.decoder import MixtureOfExperts
from sharding import array_bytes

TOKENS = (1, 2, 3, 5, 9, 17, 33)
REPEATS = 15


def measure(config: models.DecoderConfig, weights: models.WeightFormat | None) -> list[dict]:
    """Returns for each number of tokens the experts that are used, bytes and milliseconds."""
    formats = models.blocks_in(config, weights).within("layers_0/mlp")
    module = MixtureOfExperts(config, jnp.bfloat16, weights=formats)
    x = jnp.zeros((1, 1, config.hidden_size), jnp.bfloat16)
    params = jax.jit(lambda key: nn.meta.unbox(module.init(key, x)))(jax.random.key(0))
    of_experts = [params["params"][name] for name in ("gate", "up", "down")]
    size = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(of_experts))
    assert config.num_experts is not None
    sizes = sizes_of(config, weights=weights)
    router = params["params"]["router"]["weight"]
    apply, rng, rows = jax.jit(module.apply), np.random.default_rng(0), []
    for count in TOKENS:
        seconds, used = [], []
        for _ in range(1 + REPEATS):
            drawn = rng.standard_normal((1, count, config.hidden_size))
            tokens = jnp.asarray(drawn, jnp.bfloat16)
            chosen, _ = experts.choose(tokens[0] @ router.T, config.experts_per_token, True)
            used.append(len(np.unique(chosen)))
            seconds.append(timed(apply, params, tokens)[1])
        share = statistics.mean(used) / config.num_experts
        rows.append(
            {"tokens": count, "experts used": statistics.mean(used), "MB read": share * size / 1e6}
            | {"MB predicted": sizes.active_share(count) * size / 1e6}
            | {"ms": 1e3 * statistics.median(seconds[1:])}
        )
    for row in rows:
        row["GB/s"] = row["MB read"] / row["ms"]
        row["ms / first"] = row["ms"] / rows[0]["ms"]
        row["predicted / first"] = row["MB predicted"] / rows[0]["MB predicted"]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.studies.expert_reads",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add: Any = parser.add_argument
    add("--experts", type=int, default=128, help="of the layer")
    add("--chosen", type=int, default=8, help="experts of a token")
    add("--hidden", type=int, default=2048, help="width of a token")
    add("--intermediate", type=int, default=768, help="width of an expert")
    add("--weights", default="none", help="of the experts: none (bfloat16), int8, int4, int4:32")
    options = parser.parse_args(arguments)
    try:
        form = models.rounded_format(models.parse_weights(options.weights))
        config = dataclasses.replace(
            models.preset("qwen3-30b-a3b"),
            num_layers=1,
            hidden_size=options.hidden,
            intermediate_size=options.intermediate,
            num_experts=options.experts,
            experts_per_token=options.chosen,
        )
        print(record_table(measure(config, form)))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
