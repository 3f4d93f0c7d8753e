"""A model of lm-evaluation-harness: a target with any drafter.

Greedy texts equal plain decoding's and likelihoods are the target's, so scores do not depend on the
drafter. `python -m experiments.lm_eval run --model magicjax ...` is the harness's command line with
this model registered. Versions of the harness with plugins register it themselves.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import magicjax
from experiments.lm_eval.likelihood import bucket, log_likelihoods
from magicjax.drafters import Drafter
from magicjax.drafters.spec import resolve
from magicjax.engine.handle import Handle, Result
from magicjax.trees.token_tree import Tree

try:
    from lm_eval.api import registry
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the adapter needs lm-evaluation-harness ({error}): pip install 'magicjax[lm-eval]'"
    ) from error

logger = logging.getLogger("magicjax.experiments")

NAME = "magicjax"
DEFAULT_DEVICE = "cuda:0"  # of the harness, on every machine
SAMPLING = ("temperature", "top_k", "top_p")
# Options that some tasks set to their defaults.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "use_cache": True}


def parse_options(gen_kwargs: dict[str, Any], max_tokens: int) -> magicjax.SamplingParams:
    """Returns a task's generation options, interpreted like the harness's models do.

    Args:
      gen_kwargs: the harness's options. Without `do_sample`, a temperature above 0 means sampling.
        In greedy decoding `temperature`, `top_k` and `top_p` have no effect.
      max_tokens: the default of new tokens per row.

    Raises:
      ValueError: an option is not supported.
    """
    set_options = {name: value for name, value in gen_kwargs.items() if value is not None}
    remaining: dict[str, Any] = dict(normalize_gen_kwargs(set_options, max_tokens))
    until, limit = remaining.pop("until"), remaining.pop("max_gen_toks")
    sampled = remaining.pop("do_sample")
    sampling = {name: remaining.pop(name) for name in SAMPLING if name in remaining}
    for name, value in remaining.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
            raise ValueError(
                f"gen_kwargs {name}={value!r} is not supported: omit it (supported: {known})"
            )
    sampling = {"temperature": 1.0} | sampling
    if not sampled or sampling["temperature"] == 0:
        sampling = {}
    return magicjax.SamplingParams(
        max_tokens=limit, stop=[stop for stop in until if stop], **sampling
    )


def _limit(params: magicjax.SamplingParams) -> int:
    """Returns the limit of new tokens, which every task has."""
    assert params.max_tokens is not None
    return params.max_tokens


def speculation(
    drafter: str | None, tree: str | None, load: Any
) -> tuple[Drafter | None, Tree | None]:
    """Returns the `drafter` and `tree` arguments of `magicjax.generate`.

    Args:
      drafter: a specification such as self:streaming:256; several joined by + make an ensemble, and
        two joined by -> a cascade.
      tree: a specification with / instead of commas, which separate the harness's arguments, such
        as expansion:2/2/1. One for all drafters, or one per drafter joined by +.
      load: loads the model in a directory.

    Raises:
      ValueError: a specification is invalid, or the numbers of trees and drafters differ.
    """
    if drafter is None:
        if tree:
            raise ValueError(f"tree={tree} needs a drafter: give one, or omit the tree")
        return None, None
    if drafter == "auto":
        raise ValueError(
            "drafter=auto depends on timings, which are not measured here: name a drafter"
        )
    return resolve(" + ".join(drafter.split("+")), tree and tree.replace("/", ","), load)


class MagicJaxLM(TemplateLM):
    """A target with speculative decoding as a model of the harness.

    Args:
      target: a directory in Hugging Face format, or a loaded model; with a tokenizer.
      drafter, tree: see `speculation`; None for plain decoding.
      dtype: dtype of the models; None for the stored one.
      weights, offload: of a target in a directory, as for `magicjax.load`.
      backend: as for `magicjax.generate`.
      batch_size: texts that are decoded or scored at once.
      max_gen_toks: default number of new tokens.
      max_length: maximal length of prompt and new text; None for the target's positions. Longer
        prompts are truncated at the beginning with a warning, as in the harness.
      seed: sampling seed.
      max_batch_size: not supported, nor is an automatic batch_size.
      device: the device that JAX uses, or the harness's default.

    Raises:
      ValueError: an argument is not supported, or the target has no tokenizer.
    """

    def __init__(
        self,
        target: str | magicjax.Model,
        drafter: str | None = None,
        tree: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        offload: bool = False,
        backend: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        backend_device = jax.default_backend()
        if device not in (None, DEFAULT_DEVICE, backend_device):
            raise ValueError(
                f"device={device!r}: JAX uses {backend_device}; set JAX_PLATFORMS instead"
            )
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size={batch_size!r}, max_batch_size={max_batch_size!r}: give batch_size as "
                "a whole number of at least 1, and omit max_batch_size"
            )

        def load(source: str, **options) -> magicjax.Model:
            return magicjax.load(source, dtype=dtype, **options)

        if isinstance(target, str):
            target = load(target, weights=weights, offload=offload)
        elif weights is not None or offload:
            raise ValueError(
                f"weights={weights!r}, offload={offload!r} apply to a target in a directory, and "
                "this one is loaded: pass them to magicjax.load"
            )
        self.target = target
        self.tokenizer = self.target.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"target={target.name} has no tokenizer: give a directory with one")
        self.drafter, self.tree = speculation(drafter, tree, load)
        self.attention, self.batch_size, self.seed = backend, int(batch_size), int(seed)
        positions = self.target.config.max_positions
        self.max_gen_toks = int(max_gen_toks)
        self.max_length = positions if max_length is None else int(max_length)
        if not 1 <= self.max_length <= positions:
            raise ValueError(
                f"max_length={max_length} is out of range: give 1 to {positions}, the positions of "
                "the target"
            )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the BOS token, or else the EOS token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the tokens of a text.

        Special tokens are added by default, unless a chat template has added the BOS token.
        """
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the history formatted with the tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is greedy.

        A request has its arguments (None for a window of a longer text) and the tokens of context
        and continuation.
        """
        # The last token is scored, but not an input.
        pairs = [
            (self._newest(context, self.max_length + 1 - len(continuation)), continuation)
            for _, context, continuation in requests
        ]
        scored = log_likelihoods(self.target, pairs, self.batch_size, progress=not disable_tqdm)
        answers: list[tuple[float, bool]] = [*scored]
        for (arguments, _, _), answer in zip(requests, answers, strict=True):
            if arguments is not None:
                self.cache_hook.add_partial("loglikelihood", arguments, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text; each token has as much context as fits."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        flat = list(itertools.chain.from_iterable(windows))
        scored = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        sums = [sum(log for log, _ in itertools.islice(scored, len(part))) for part in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the new text of each request up to its first stop string.

        Greedy requests share an engine, and so do sampled ones; `batch_size` is its slots.
        """
        params = [parse_options(request.args[1], self.max_gen_toks) for request in requests]
        prompts = [self._prompt(r.args[0], one) for r, one in zip(requests, params, strict=True)]
        results: dict[int, Result] = {}
        with tqdm(total=len(requests), disable=disable_tqdm) as progress:
            for sampled in (False, True):
                indices = [i for i, one in enumerate(params) if one.greedy != sampled]
                handles = self._submitted(indices, prompts, params, sampled)
                for i, handle in handles.items():
                    results[i] = handle.result()
                    self.cache_hook.add_partial("generate_until", requests[i].args, results[i].text)
                    progress.update()
        stats = [result.stats for result in results.values()]
        rounds = sum(one.rounds for one in stats)
        tau = sum(one.tau * one.rounds for one in stats) / max(rounds, 1)
        logger.info("%d texts, τ %.2f", len(results), tau)
        return [results[i].text or "" for i in range(len(requests))]

    def _submitted(
        self,
        indices: list[int],
        prompts: list[list[int]],
        params: list[magicjax.SamplingParams],
        sampled: bool,
    ) -> dict[int, Handle]:
        """Returns the requests of some indices in a new engine.

        A request's samples depend on the seed and its index. Capacities are powers of two, so that
        a benchmark compiles few programs.
        """
        if not indices:
            return {}
        limits = {i: _limit(params[i]) for i in indices}
        longest = max(len(prompts[i]) + limit for i, limit in limits.items())
        config = magicjax.EngineConfig(
            slots=self.batch_size,
            capacity=min(bucket(longest), self.target.config.max_positions),
            max_tokens=max(limits.values()),
            sampling=sampled,
            queue_limit=len(indices),
            backend=self.attention,
        )
        engine = magicjax.Engine(self.target, self.drafter, self.tree, config)
        handles = {}
        for i in indices:
            own = params[i]
            if sampled:
                seed = int(np.random.SeedSequence([self.seed, i]).generate_state(1)[0])
                own = dataclasses.replace(own, seed=seed)
            handles[i] = engine.submit(prompts[i], own)
        return handles

    def _prompt(self, text: str, params: magicjax.SamplingParams) -> list[int]:
        tokens = self.tok_encode(text) or [self.prefix_token_id]
        return self._newest(tokens, self.max_length - _limit(params))

    def _newest(self, tokens: list[int], limit: int) -> list[int]:
        """Returns the last `limit` tokens of a context."""
        if limit < 1:
            raise ValueError(
                f"max_length={self.max_length} is too small: the task's continuation takes "
                f"{self.max_length - limit} tokens: request fewer new tokens"
            )
        if len(tokens) > limit:
            excess = len(tokens) - limit
            logger.warning("truncated the first %d of %d context tokens", excess, len(tokens))
        return tokens[-limit:]


def register() -> None:
    """Registers the model with the harness, unless a plugin has done so."""
    try:
        registry.get_model(NAME)
    except (KeyError, ValueError):
        registry.register_model(NAME)(MagicJaxLM)


def main() -> None:
    """Runs the harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()
