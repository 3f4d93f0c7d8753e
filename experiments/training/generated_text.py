"""Texts that a model writes, for its draft models, without a corpus.

The prompt is the chat template up to the user's message: the model writes the message, the answer
and later turns. Source: Magpie, arXiv 2406.08464. A model without a template writes documents.
"""

import hashlib
import io
import pathlib
from typing import Any

import numpy as np
from pydantic import Field
from tqdm import tqdm

import magicjax
from experiments.prompts import corpus
from experiments.schema import grid
from experiments.schema.fields import ConfigError, Positive, Strict
from experiments.training import export
from magicjax.files import write_atomically

HELD_OUT_EVERY = 16  # one row in 16 is held out


class Generated(Strict):
    """How the target writes its text."""

    tokens: Positive = Field(description="Number of tokens, rounded up to a whole batch.")
    batch: Positive = Field(64, description="Rows that are generated together.")
    length: Positive = Field(384, description="New tokens of a row.")
    temperature: float = Field(0.8, gt=0, description="Of the sampling.")


def beginning(tokenizer: Any) -> list[int]:
    """Returns the tokens of a conversation up to the user's first word.

    Without a chat template, it is the token that ends a document.

    Raises:
      ConfigError: the tokenizer has neither.
    """
    if not getattr(tokenizer, "chat_template", None):
        end = getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ConfigError(
                "generated text needs a target with a chat template or an end of text: use "
                "another target, or a corpus"
            )
        return [end]
    question = "QUESTION"
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer(text[: text.index(question)], add_special_tokens=False)["input_ids"]


def write(
    source: str, dtype: str, settings: Generated, work: pathlib.Path
) -> corpus.TokenizedCorpus:
    """Returns the text that a model writes; batch n is sampled with seed n.

    Every batch is stored in `work`, from which a killed run resumes.

    Raises:
      ConfigError: the tokenizer has no beginning, or `work` has text of other settings.
    """
    target = magicjax.load(source, dtype=dtype)
    start = beginning(target.tokenizer)
    work.mkdir(parents=True, exist_ok=True)
    record = f"{settings.model_dump_json(exclude={'tokens'})}\n{dtype} {grid.fingerprint(source)}\n"
    export.claim(work / "settings.txt", record)
    batches = -(-settings.tokens // (settings.batch * settings.length))
    parts = []
    for number in tqdm(range(batches), desc="write text", unit="batch"):
        path = work / f"{number:04d}.npy"
        if not path.exists():
            output = magicjax.generate(
                target,
                [start] * settings.batch,
                magicjax.SamplingParams(
                    temperature=settings.temperature, seed=number, max_tokens=settings.length
                ),
                eos_token_id=[],
            )
            buffer = io.BytesIO()
            np.save(buffer, np.array(output.sequences, np.int32))
            write_atomically(path, buffer.getvalue())
        parts.append(np.load(path))
    rows = np.concatenate(parts)
    is_held_out = np.arange(len(rows)) % HELD_OUT_EVERY == 0
    held_out = rows[is_held_out].ravel()
    return corpus.TokenizedCorpus(
        train=rows[~is_held_out].ravel(),
        held_out=held_out,
        bytes_per_token=len(target.tokenizer.decode(held_out).encode()) / held_out.size,
        digest=hashlib.sha256(rows.tobytes()).hexdigest(),
        source=f"conversations that {source} wrote",
        selection=f"one conversation in {HELD_OUT_EVERY}",
    )
