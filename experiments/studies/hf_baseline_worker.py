"""Generates with Hugging Face transformers, for `experiments.studies.hf_baseline`, in another
environment.

Run by an interpreter that has torch and transformers and nothing of this project. Requests come
as JSON lines on stdin, answers leave as JSON lines on stdout; whatever libraries print goes to
stderr.
"""

import copy
import json
import os
import sys
import time
import traceback
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Stopwatch(StoppingCriteria):
    """Never stops anything; notes when how many tokens stood there.

    Called first when the prompt is done and the first tokens are out, so that what lies between
    its first and its last note is decoding alone.
    """

    def __init__(self):
        self.notes: list[tuple[float, int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.notes.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Worker:
    """Holds the loaded models; one method for each request."""

    def __init__(self):
        self.models = {}

    def start(self, threads: int) -> dict:
        """Returns the versions, having set the number of threads."""
        torch.set_num_threads(threads)
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(
        self,
        directory: str,
        prompts: list[list[int]],
        new_tokens: int,
        cache: str,
        compiled: bool = False,
        assistant: str = "",
        assistant_tokens: int = 0,
    ) -> dict:
        """Returns new tokens and the stopwatch's notes, of one greedy call of `generate`.

        An assistant drafts with the library's own settings, or `assistant_tokens` at a time if
        that is not 0.
        """
        model = self._model(directory)
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        if cache == "static":
            options["cache_implementation"] = "static"
        if compiled:
            options["compile_config"] = transformers.CompileConfig(fullgraph=False)
            options["compile_config"]._compile_all_devices = True
        if assistant:
            drafter = self._model(assistant)
            kept = drafter.generation_config
            drafter.generation_config = copy.deepcopy(kept)
            if assistant_tokens:
                drafter.generation_config.num_assistant_tokens = assistant_tokens
                drafter.generation_config.num_assistant_tokens_schedule = "constant"
                drafter.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = drafter
        tokens = torch.tensor(prompts)
        watch = Stopwatch()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                stopping_criteria=StoppingCriteriaList([watch]),
                **options,
            )
        end = time.perf_counter()
        if assistant:
            drafter.generation_config = kept
        return {
            "tokens": out[:, tokens.shape[1] :].tolist(),
            "notes": [(at - begin, length - tokens.shape[1]) for at, length in watch.notes],
            "total_s": end - begin,
        }

    def _model(self, directory: str):
        """Returns a model in float32 that goes on past end tokens."""
        if directory not in self.models:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            self.models[directory] = model
        return self.models[directory]


def main():
    """Answers requests until stdin ends; an error is an answer too, with its trace."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # the driver raises it again on its side
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
