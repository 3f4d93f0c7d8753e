"""Times magicjax, Hugging Face transformers, llama.cpp and OpenVINO on the same models and prompts.

    python -m experiments.studies.peers FILE [--environments FOLDER] [--peer NAME] [--compiled]
                                        [--key value]

`make peers` creates the environments. All runs are interleaved and greedy, and only decoding is
timed: a peer's from its first new tokens, after prefill, to the last. llama.cpp and OpenVINO decode
one row of a target that is a GGUF file: its stored weights, or with `target_weights: none` the same
values in the experiment's dtype (OpenVINO: in float16, as it reads no bfloat16), which transformers
decodes, too. A process of llama.cpp of its own converts them once. llama.cpp also drafts with the
GGUF file of a method's small model. Every peer holds the weights in memory until the end: `--peer`,
which can be repeated, leaves out the others. Results of several values of `prompt_seed` are pooled.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

import models
from experiments.runner import exactness
from experiments.runner.provenance import device_name
from experiments.runner.workload import Bench
from experiments.schema import config, grid, store
from experiments.schema.fields import ConfigError
from experiments.studies.peers.process import Peer, Run, run_magicjax, run_peer
from experiments.training import draft_vocab
from magicjax.benchmarks.tables import markdown_table
from magicjax.downloads import DOWNLOADS
from magicjax.files import write_atomically
from magicjax.sources import Source
from models.quantized import NONE

PROG = "python -m experiments.studies.peers"
ENVIRONMENTS = pathlib.Path(".venv-peers")
PLAIN = "magicjax plain"
HEADER = (
    *("batch", "context", "prompts", "method", "weights", "tok/s", "over plain", "prefill s"),
    *("equal", "ties"),
)

# Arguments of `generate` in huggingface.py by name in the table. assistant_tokens: 0 for an
# assistant with the library's settings, else the tokens it drafts at a time.
HF: dict[str, dict[str, Any]] = {
    "HF static cache": {"cache": "static"},
    "HF static cache, compiled": {"cache": "static", "compiled": True},
    "HF dynamic cache": {"cache": "dynamic"},
    "HF prompt lookup, 4 tokens": {"cache": "dynamic", "lookup_tokens": 4},
    "HF assisted, its settings": {"cache": "dynamic", "assistant_tokens": 0},
    "HF assisted, 4 tokens": {"cache": "dynamic", "assistant_tokens": 4},
}
SPECULATIVE = {"lookup_tokens", "assistant_tokens"}  # which transformers supports for one row only

# Names in the table of peers that read GGUF files, by module.
READERS = {"llama": "llama.cpp", "genai": "OpenVINO GenAI"}
PEERS = ("huggingface", *READERS)  # their modules, and environments
DTYPES = {"genai": "float16"}  # of unquantized files, if it reads no others
DRAFTED_TOKENS = 4  # at a time, by these modules

Calls = dict[str, Callable[[], Run]]


def is_gguf(target: str) -> bool:
    """Returns whether the target is stored as a GGUF file."""
    return target in DOWNLOADS or target.endswith(".gguf")


def has_float_weights(cell: grid.Cell) -> bool:
    """Returns whether transformers decodes a cell, which it does with floating-point weights."""
    return cell.target_weights == (NONE if is_gguf(cell.target) else "")


def magicjax_calls(bench: Bench, group: list[grid.Cell]) -> Calls:
    """Returns the runs of a group's cells."""
    return {f"magicjax {c.method}": functools.partial(run_magicjax, bench, c) for c in group}


@functools.cache
def hf_directory(source: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns a directory that transformers can load.

    It is a copy in `folder` of a model with a draft vocabulary, with an embedding for every token,
    and of a converted GGUF file, without its quantization.
    """
    directory = Source(source).checkpoint_directory
    is_draft = getattr(models.load_config(directory), "draft_vocab_size", None) is not None
    if not is_draft and not is_gguf(source):
        return directory
    model = models.load_checkpoint(directory, weights="none")
    made = model.module, model.params
    if is_draft:
        made = draft_vocab.expanded(*made)
    path = folder / directory.name
    special = {"eos_token_ids": model.eos_token_ids, "pad_token_id": model.pad_token_id}
    tokenizer = models.load_tokenizer(directory)
    models.save_checkpoint(path, *made, **special, tokenizer=tokenizer, overwrite=True)
    return path


def hf_calls(
    peer: Peer, compiled: bool, group: list[grid.Cell], prompts: list, folder: pathlib.Path
) -> Calls:
    """Returns the runs of transformers that support the group's batch and have their models."""
    plain = group[0]
    assistants = [cell.model for cell in group if cell.draft == "small"]
    run = functools.partial(
        run_peer, peer, prompts, plain.new_tokens, plain.dtype, dtype=plain.dtype
    )
    calls: Calls = {}
    for name, setting in HF.items():
        arguments = setting | {"directory": str(hf_directory(plain.target, folder).resolve())}
        if "assistant_tokens" in setting and assistants:
            arguments["assistant"] = str(hf_directory(assistants[0], folder).resolve())
        if (
            (compiled or "compiled" not in setting)
            and (plain.batch == 1 or not SPECULATIVE & setting.keys())
            and ("assistant_tokens" not in setting or assistants)
        ):
            calls[name] = functools.partial(run, **arguments)
    return calls


def reader_calls(
    readers: dict[str, Peer], group: list[grid.Cell], prompts: list, environments: pathlib.Path
) -> Calls:
    """Returns the runs of peers that read GGUF files, which decode one row."""
    plain = group[0]
    if not readers or plain.batch > 1:
        return {}
    arguments: dict[str, dict[str, Any]] = {
        "plain": {},
        f"prompt lookup, {DRAFTED_TOKENS} tokens": {"drafted_tokens": DRAFTED_TOKENS},
    }
    # `_parse` allows one small model.
    draft = next((c.model for c in group if c.draft == "small" and is_gguf(c.model)), None)
    calls: Calls = {}
    for module, peer in readers.items():
        dtype = DTYPES.get(module, plain.dtype)
        file, weights = gguf_file(plain, dtype, environments)
        run = functools.partial(run_peer, peer, prompts, plain.new_tokens, weights, file=str(file))
        for name, setting in arguments.items():
            calls[f"{READERS[module]} {name}"] = functools.partial(run, **setting)
        if draft is not None and module == "llama":  # OpenVINO reads no GGUF file as a draft
            calls[f"{READERS[module]} draft model, {DRAFTED_TOKENS} tokens"] = functools.partial(
                run, drafted_tokens=DRAFTED_TOKENS, draft=str(stored_file(draft))
            )
    return calls


def stored_file(source: str) -> pathlib.Path:
    """Returns the GGUF file of a model."""
    if source in DOWNLOADS:
        return Source(source).checkpoint_directory / DOWNLOADS[source].file
    return pathlib.Path(source)


def gguf_file(cell: grid.Cell, dtype: str, environments: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Returns a file with the target's weights, and their type.

    For a cell with `target_weights: none`, llama.cpp converts them to `dtype`, in a file beside the
    environments that later calls find.
    """
    stored = stored_file(cell.target)
    if cell.target_weights != NONE:
        return stored, stored.stem.rpartition(".")[2]
    content = f"{stored.resolve()} {stored.stat().st_size} {stored.stat().st_mtime_ns}"
    converted = environments / f"{stored.stem}-{store.digest(content)[:8]}.{dtype}.gguf"
    if not converted.is_file():
        partial = converted.with_suffix(".partial")
        with contextlib.closing(Peer(environments, "llama")) as llama:
            llama.request("convert", file=str(stored), out=str(partial), dtype=dtype)
        partial.rename(converted)
    return converted, dtype


def time_calls(prompts: list[Calls], repeats: int, bar: tqdm) -> dict[str, list[list[Run]]]:
    """Returns the runs [prompt][repeat] by name; all are interleaved.

    Every call first runs once on the first prompts, which compiles and warms up.
    """

    def run(name: str, call: Callable[[], Run]) -> Run:
        bar.set_description(name)
        bar.update()
        return call()

    for name, call in prompts[0].items():
        run(name, call)
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in prompts[0]}
    for number, calls in enumerate(prompts):
        for _ in range(repeats):
            for name, call in calls.items():
                runs[name][number].append(run(name, call))
    return runs


def compare(bench: Bench, cells: list[grid.Cell], runs: dict[str, list[list[Run]]]) -> list[dict]:
    """Returns a row for each name; `cells` are those of plain decoding of each prompt.

    The rate is that of all prompts' tokens, with the median of the repeats of each prompt.
    """
    rows = []
    for name, timed in runs.items():
        pairs = zip(cells, runs[PLAIN], timed, strict=True)
        matches = [
            exactness.compare(bench.target_of(c), bench.prompts(c), plain[0].tokens, own[0].tokens)
            for c, plain, own in pairs
        ]
        divergences = [d for match in matches for d in match.divergences]
        medians = [statistics.median(run.tokens_per_s for run in own) for own in timed]
        rows.append(
            {
                "batch": cells[0].batch,
                "context": cells[0].context,
                "prompts": cells[0].prompts,
                "target_weights": cells[0].target_weights,
                "method": name,
                "weights": timed[0][0].weights,
                "tok_s": statistics.harmonic_mean(medians),
                "prefill_s": statistics.median(run.prefill_s for own in timed for run in own),
                "equal": statistics.mean(match.exact for match in matches),
                "ties": sum(match.ties for match in matches),
                "divergences": [str(d) for d in divergences],
                "runs_tok_s": [[run.tokens_per_s for run in own] for own in timed],
            }
        )
    return rows


def _key(row: dict[str, Any]) -> tuple:
    return row["batch"], row["context"], row["prompts"], row["target_weights"]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the comparison; `over plain` divides by plain decoding of magicjax."""
    plain = {_key(r): r["tok_s"] for r in rows if r["method"] == PLAIN}
    return markdown_table(
        HEADER,
        (
            [r["batch"], r["context"], r["prompts"], r["method"], r["weights"]]
            + [f"{r['tok_s']:.1f}"]
            + [f"{r['tok_s'] / plain[_key(r)]:.2f}×", f"{r['prefill_s']:.2f}"]
            + [f"{r['equal']:.3f}", r["ties"]]
            for r in rows
        ),
    )


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, config.Experiment]:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--environments", type=pathlib.Path, default=ENVIRONMENTS, help="what `make peers` creates"
    )
    parser.add_argument(
        "--peer", dest="peers", action="append", choices=PEERS, help="repeatable; default: all"
    )
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile")
    options, overrides = parser.parse_known_args(arguments)
    options.peers = options.peers or PEERS
    experiment = config.from_command_line(overrides, PROG)
    if experiment.repeats < 1:
        raise ConfigError("repeats=0 times nothing: choose at least 1")
    for group in grid.groups(experiment):
        cell = group[0]
        if cell.num_requests > cell.batch:
            raise ConfigError(
                "requests is not supported here, where a cell is one batch: remove it, and list "
                "several values of prompt_seed"
            )
        for name in ("temperature", "mesh", "offload", "target_kv_dtype"):
            if getattr(cell, name):
                raise ConfigError(f"{name} is not supported here, where peers lack it: remove it")
        if is_gguf(cell.target) and cell.target_weights not in ("", NONE):
            raise ConfigError(
                f"target_weights={cell.target_weights} is not supported here, where peers read the "
                "same file: set none for its values in dtype, or remove it"
            )
        if len({each.model for each in group if each.draft == "small"}) > 1:
            raise ConfigError("several draft models are not supported here: give one")
        if not _peers_of(cell, options.peers):
            raise ConfigError(
                f"{', '.join(options.peers)} cannot decode {cell.target}: huggingface decodes "
                "floating-point weights, and llama and genai decode GGUF files"
            )
    return options, experiment


def _peers_of(cell: grid.Cell, names: Sequence[str]) -> list[str]:
    """Returns which of the peers decode a cell's weights."""
    floating, file = has_float_weights(cell), is_gguf(cell.target)
    return [name for name in names if (floating if name == "huggingface" else file)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if the settings are invalid."""
    try:
        measure(*_parse(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measure(options: argparse.Namespace, experiment: config.Experiment) -> None:
    """Writes and prints the comparison; raises ConfigError if a peer has no environment."""
    groups = [
        [grid.plain_of(group[0]), *(cell for cell in group if not cell.is_plain)]
        for group in grid.groups(experiment)
    ]
    names = {name for group in groups for name in _peers_of(group[0], options.peers)}
    peers = {name: Peer(options.environments, name) for name in PEERS if name in names}
    bench = Bench()
    pooled = collections.defaultdict(list)  # groups that differ only in their prompts
    for group in groups:
        pooled[dataclasses.replace(group[0], prompt_seed=0)].append(group)
    rows: list[dict[str, Any]] = []
    folder = pathlib.Path(experiment.results) / experiment.name
    with tqdm(unit="run", dynamic_ncols=True) as bar:
        for same in pooled.values():
            calls = []
            for group in same:
                prompts = bench.prompts(group[0]).tolist()
                made = magicjax_calls(bench, group)
                chosen = {name: peers[name] for name in _peers_of(group[0], options.peers)}
                if hf := chosen.pop("huggingface", None):
                    made |= hf_calls(hf, options.compiled, group, prompts, folder)
                made |= reader_calls(chosen, group, prompts, options.environments)
                calls.append(made)
            runs = time_calls(calls, experiment.repeats, bar)
            rows += compare(bench, [group[0] for group in same], runs)
    versions = {name: v for peer in peers.values() for name, v in peer.versions.items()}
    path = folder / "peers.json"
    record = {"peers": list(peers), "versions": versions, "device": device_name(), "rows": rows}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(table(rows))
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
