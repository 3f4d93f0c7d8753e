"""A target with any drafter as a model of lm-evaluation-harness.

Greedy texts are plain decoding's and likelihoods the target's own, so scores must not depend on the
drafter. `python -m experiments.lm_eval.adapter --model magicjax ...` is the harness's own command
line with this model known to it; its versions that look for plugins know it without that.
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

import magicjax
from experiments.lm_eval.continuation import continue_until
from experiments.lm_eval.likelihood import log_likelihoods
from magicjax.drafters.spec import make_drafter
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
UNSAID_DEVICE = "cuda:0"  # the harness's default, whatever the machine
SAMPLING = ("temperature", "top_k", "top_p")
# Options that ask for what happens anyway, as some tasks write them.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "use_cache": True}


@dataclasses.dataclass(frozen=True)
class Options:
    """What a task asks of a continuation.

    Attributes:
      until: stop strings.
      max_new_tokens: of each row.
      sampling: arguments of `magicjax.generate`; none in greedy decoding.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: dict[str, Any]


def options_of(asked: dict[str, Any], max_new_tokens: int) -> Options:
    """Returns a task's generation options, read as the harness's own models read them.

    Args:
      asked: the harness's gen_kwargs. Without `do_sample`, a temperature above 0 is sampling. In
        greedy decoding `temperature`, `top_k` and `top_p` have no meaning.
      max_new_tokens: where it does not say.

    Raises:
      ValueError: an option that is not supported.
    """
    said = {name: value for name, value in asked.items() if value is not None}
    given: dict[str, Any] = dict(normalize_gen_kwargs(said, max_new_tokens))
    until, limit = given.pop("until"), given.pop("max_gen_toks")
    sampled = given.pop("do_sample") and given.get("temperature") != 0
    sampling = {name: given.pop(name) for name in SAMPLING if name in given}
    for name, value in given.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
            raise ValueError(
                f"gen_kwargs {name}={value!r} is not supported: leave it out (known: {known})"
            )
    return Options(tuple(until), limit, sampling | {"do_sample": True} if sampled else {})


def speculation(
    drafter: str | None, tree: str | None, load: Any
) -> tuple[magicjax.Ensemble | Any | None, Tree | None]:
    """Returns (drafter, tree) as `magicjax.generate` takes them.

    Args:
      drafter: as commands write it, self:streaming:256; several joined by +, an ensemble.
      tree: as commands write it, with / for a comma, which parts the harness's arguments:
        expansion:2/2/1. One for all drafters, or one for each, joined by +.
      load: gives the model of a directory.

    Raises:
      ValueError: none of them, or not as many trees as drafters.
    """
    trees = (
        [magicjax.parse_tree(text.replace("/", ",")) for text in tree.split("+")] if tree else []
    )
    if drafter is None:
        if trees:
            raise ValueError(f"tree={tree} needs a drafter: give one, or leave the tree out")
        return None, None
    if drafter == "auto":
        raise ValueError("drafter=auto chooses for speed, which is not measured here: name one")
    made = tuple(make_drafter(text, load) for text in drafter.split("+"))
    if len(made) == 1 and len(trees) < 2:
        return made[0], trees[0] if trees else None
    if len(trees) < 2:
        return magicjax.Ensemble(made), trees[0] if trees else None
    return magicjax.Ensemble(made, tuple(trees)), None


class MagicJaxLM(TemplateLM):
    """The harness's view of a target that decodes speculatively.

    Args:
      target: a directory in Hugging Face format, or a loaded model; with a tokenizer.
      drafter, tree: who proposes what, as in `speculation`; None: plain decoding.
      dtype: of the models; None: as stored.
      backend: of the attention; None: xla.
      batch_size: rows of every batch.
      max_gen_toks: new tokens where a task does not say.
      max_length: of prompt and new text; None: the target's positions. Longer prompts lose their
        beginning, as the harness does it, with a warning.
      seed: of sampling.
      max_batch_size: refused, as is an automatic batch_size.
      device: what JAX has chosen, or what the harness says if it was not told.

    Raises:
      ValueError: an argument that is not supported, or a target without a tokenizer.
    """

    def __init__(
        self,
        target: str | magicjax.Model,
        drafter: str | None = None,
        tree: str | None = None,
        dtype: str | None = None,
        backend: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        seed: int = 0,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        here = jax.default_backend()
        if device not in (None, UNSAID_DEVICE, here):
            raise ValueError(f"device={device!r}: JAX has chosen {here}; set JAX_PLATFORMS instead")
        if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size={batch_size!r}, max_batch_size={max_batch_size!r}: give a whole "
                "number of rows, at least 1, as batch_size alone"
            )

        def load(source: str) -> magicjax.Model:
            return magicjax.load(source, dtype=dtype)

        self.target = load(target) if isinstance(target, str) else target
        self.tokenizer = self.target.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"target={target} has no tokenizer: give a directory that has one")
        self.drafter, self.tree = speculation(drafter, tree, load)
        self.attention, self.batch_size, self.seed = backend, int(batch_size), int(seed)
        positions = self.target.config.max_positions
        self.max_gen_toks = int(max_gen_toks)
        self.max_length = positions if max_length is None else int(max_length)
        if not 1 <= self.max_length <= positions:
            raise ValueError(
                f"max_length={max_length}: the target has {positions} positions: give 1 to that"
            )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: the first token, or else the end's."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the tokens of a text, by default with those that the tokenizer itself adds.

        A chat template has written the first token already.
        """
        first = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (first and string.startswith(first))
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the history as the tokenizer's template writes it."""
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
        """Returns (log-probability of the continuation, whether it is greedy) of each request.

        A request is (its arguments, None within a longer text, tokens of context, continuation).
        """
        # The last token is asked about, and not read.
        pairs = [
            (self._newest(context, self.max_length + 1 - len(continuation)), continuation)
            for _, context, continuation in requests
        ]
        scored = log_likelihoods(self.target, pairs, self.batch_size, progress=not disable_tqdm)
        found = [(likelihood.log, likelihood.greedy) for likelihood in scored]
        for (asked, _, _), answer in zip(requests, found, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, every token with as much context as fits."""
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
        found = iter(self._loglikelihood_tokens(flat, disable_tqdm=disable_tqdm))
        sums = [sum(log for log, _ in itertools.islice(found, len(own))) for own in windows]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns each request's new text, before its first stop string."""
        texts: list[str] = [""] * len(requests)
        alike: dict[str, list[int]] = {}  # requests by their options
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        emitted = rounds = 0
        with tqdm(total=len(requests), disable=disable_tqdm) as progress:
            for asked, numbers in alike.items():
                options = options_of(json.loads(asked), self.max_gen_toks)
                prompts = {i: self._prompt(requests[i].args[0], options) for i in numbers}
                numbers.sort(key=lambda i: -len(prompts[i]))  # a batch's lengths are similar
                for start in range(0, len(numbers), self.batch_size):
                    part = numbers[start : start + self.batch_size]
                    done = self._continue([prompts[i] for i in part], part, options)
                    emitted, rounds = emitted + done.emitted, rounds + done.rounds
                    for i, text in zip(part, done.texts, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    progress.update(len(part))
        logger.info("%d texts, τ %.2f", len(texts), emitted / rounds if rounds else 0.0)
        return texts

    def _continue(self, prompts: list[list[int]], numbers: list[int], options: Options) -> Any:
        return continue_until(
            self.target,
            prompts,
            options.until,
            max_new_tokens=options.max_new_tokens,
            rows=self.batch_size,
            places=numbers,
            drafter=self.drafter,
            tree=self.tree,
            backend=self.attention,
            seed=self.seed,
            **options.sampling,
        )

    def _prompt(self, text: str, options: Options) -> list[int]:
        tokens = self.tok_encode(text) or [self.prefix_token_id]
        return self._newest(tokens, self.max_length - options.max_new_tokens)

    def _newest(self, tokens: list[int], most: int) -> list[int]:
        """Returns the newest tokens of a context that has room for `most`."""
        if most < 1:
            raise ValueError(
                f"max_length={self.max_length} leaves no room for a context: the task's "
                f"continuation takes {self.max_length - most} tokens; ask for fewer new tokens"
            )
        if len(tokens) > most:
            logger.warning(
                "a context of %d tokens loses its first %d", len(tokens), len(tokens) - most
            )
        return tokens[-most:]


def register() -> None:
    """Makes the model known to the harness by its name, where no plugin has."""
    try:
        registry.get_model(NAME)
    except (KeyError, ValueError):
        registry.register_model(NAME)(MagicJaxLM)


def main() -> None:
    """Runs the harness's own command line."""
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
