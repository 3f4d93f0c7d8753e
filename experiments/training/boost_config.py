"""The settings of a boost-tuning file: strict, typed, documented."""

import dataclasses
import pathlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from experiments.schema.fields import Many, Positive, Strict, read_mapping, validated
from experiments.schema.paths import from_working_directory
from experiments.training.generated_text import Generated
from experiments.training.trainer import Schedule


class Shape(Strict):
    """Sizes of a draft; vocabulary, positions and rotary embedding are the target's."""

    hidden_size: Positive = Field(description="E, the width.")
    intermediate_size: Positive = Field(description="F, the width of the MLP.")
    num_layers: Positive = Field(description="L.")
    num_heads: Positive = Field(description="H, query heads.")
    num_kv_heads: Positive = Field(description="K, key/value heads.")
    head_dim: Positive = Field(description="D, the size of a head.")
    draft_vocab_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Embeddings, of the text's most frequent tokens; null: of all tokens."
    )


class Boosting(BaseModel):
    """A target, the text that it labels, and the drafts tuned on the labels."""

    # Not strict: schedules are dataclasses, which YAML represents as mappings and lists.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    target: str
    """Directory of the target, which labels the text."""
    drafts: Positive
    """Number of drafts, each tuned on the labels that the earlier ones miss."""
    start: Annotated[list[str], Many] = Field([])
    """Directories of small models to tune: one for all drafts, or one per draft."""
    shape: Shape | None = None
    """Instead of `start`: sizes of a model that is first trained on the text."""
    text: Schedule | None = None
    """Schedule of that training."""
    labels: Schedule
    """Schedule of each draft's tuning on the labels; draft n adds n-1 to the seed."""
    labelled_tokens: Positive
    """Number of tokens that the target labels."""
    kept_share: float = Field(0.0, ge=0, le=1)
    """Share of the samples matched by earlier drafts that a later draft keeps; SpecInfer: 0."""
    corpus: str = ""
    """Folder of Python source; by default Python's standard library."""
    generated: Generated | None = None
    """Instead of a corpus: conversations that the target writes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the target, when it writes and labels text."""

    @field_validator("text", "labels")
    @classmethod
    def _has_steps(cls, schedule: Schedule | None) -> Schedule | None:
        if schedule and min((min(dataclasses.astuple(p)) for p in schedule.phases), default=0) < 1:
            raise ValueError("a schedule needs phases with context, batch and steps of at least 1")
        return schedule

    @model_validator(mode="after")
    def _one_text(self) -> "Boosting":
        if self.corpus and self.generated:
            raise ValueError("`corpus` has no effect with `generated`: remove one of them")
        return self

    @model_validator(mode="after")
    def _one_initial_model(self) -> "Boosting":
        if bool(self.start) == (self.shape is not None and self.text is not None):
            raise ValueError(
                "the drafts need initial models: give either `start`, or both `shape` and `text`"
            )
        if self.start and (self.shape or self.text):
            raise ValueError("`shape` and `text` have no effect with `start`: remove them")
        if self.start and len(self.start) not in (1, self.drafts):
            raise ValueError(
                f"start has {len(self.start)} models for drafts={self.drafts}: give one for all "
                "drafts, or one per draft"
            )
        return self


def read(path: pathlib.Path) -> Boosting:
    """Reads settings from a YAML file.

    Raises:
      ConfigError: the file is not a mapping, has an unknown key, or a value out of range.
    """
    raw = from_working_directory(read_mapping(path), path.parent, ("target",))
    return validated(Boosting, raw, str(path))
