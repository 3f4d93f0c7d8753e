"""Compares random GGUF files of models with gated delta nets with llama.cpp's reading of them.

    python -m tests.models.compare_llama_cpp PYTHON

PYTHON has numpy and xllamacpp, and does not need this project. Fails unless log-probabilities of
all tokens after texts of several lengths differ by at most 1e-5 of the largest logit. Controls omit
a step of llama.cpp's converter: both read the same other model.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

LENGTHS = (1, 2, 3, 7, 20, 40)
LIMIT = 1e-5


def theirs(folder: pathlib.Path) -> None:
    """Writes what llama.cpp computes; runs in the other environment."""
    import xllamacpp

    tokens = json.loads((folder / "tokens.json").read_text())
    for file in sorted(folder.glob("*.gguf")):
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 128, 1, 0, -1
        params.warmup = params.fit_params = False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        flash = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server, rows = xllamacpp.Server(params), []
        for length in LENGTHS:
            body = {"prompt": tokens[:length], "n_predict": 1, "n_probs": 300, "temperature": 0.0}
            answer = server.handle_completions(body)
            answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
            found = np.full(300, np.nan)  # of a text that ends at once there are none
            if logprobs := answer["choices"][0].get("logprobs"):
                for top in logprobs["content"][0]["top_logprobs"]:
                    found[top["id"]] = top["logprob"]
            rows.append(found)
        np.save(file.with_suffix(".npy"), rows)
        del server


def main(python: str) -> int:
    import jax

    import models
    from models.gguf.files import read_gguf, write_directory
    from tests import gguf_cases
    from tests.models import test_gguf_hybrids as hybrids
    from tests.models.conftest import logits_of, random_params

    tokens, failed = np.arange(40) * 37 % 300, False
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "tokens.json").write_text(json.dumps(tokens.tolist()))
        ours = {}
        for architecture, steps in hybrids.STEPS.items():
            module = models.build(hybrids.config_of(architecture))
            params = jax.tree.map(lambda x: 0.3 * x, random_params(module))
            models.save_checkpoint(folder / architecture, module, params)
            pre = gguf_cases.byte_level_metadata("qwen2" if "next" in architecture else "qwen35")
            right = np.asarray(logits_of(module, params, tokens[None]))[0]
            for omitted in (None, *(step for step in steps if step not in ("rate", "groups"))):
                case = architecture + (f", without {omitted}" if omitted else "")
                done = [step for step in steps if step != omitted]
                path = folder / f"{case}.gguf"
                hybrids.write(path, folder / architecture, architecture, done, tokenizer=pre)
                out = folder / f"read {case}"
                out.mkdir()
                write_directory(read_gguf(path), out)
                found = models.load_checkpoint(out, weights="none")
                read = np.asarray(logits_of(found.module, found.params, tokens[None]))[0]
                ours[case] = read, right
        subprocess.run([python, __file__, "--theirs", name], check=True)
        for case, both in ours.items():
            expected = np.load(folder / f"{case}.npy")
            errors = []
            for logits in both:
                rows = logits[np.array(LENGTHS) - 1].astype(np.float64)
                rows -= rows.max(1, keepdims=True)
                log = rows - np.log(np.exp(rows).sum(1, keepdims=True))
                errors.append(np.nanmax(np.abs(log - expected)) / np.abs(logits).max())
            print(f"{case}: error of the file {errors[0]:.1e}, of the directory {errors[1]:.1e}")
            failed |= errors[0] > LIMIT or (errors[1] > LIMIT) != ("without" in case)
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1] == "--theirs":
        theirs(pathlib.Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1]))
