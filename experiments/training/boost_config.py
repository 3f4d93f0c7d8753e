"""What a boost-tuning file may say: strict, typed, every field documented."""

import dataclasses
import pathlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from experiments.schema.fields import STRICT, Many, Positive, checked, read_mapping
from experiments.training.trainer import Schedule


class Shape(BaseModel):
    """Sizes of a draft; everything else of it (vocabulary, positions, rotation) is the target's."""

    model_config = STRICT

    hidden_size: Positive = Field(description="E, the width.")
    intermediate_size: Positive = Field(description="F, the width of the MLP.")
    num_layers: Positive = Field(description="L.")
    num_heads: Positive = Field(description="H, query heads.")
    num_kv_heads: Positive = Field(description="K, key/value heads.")
    head_dim: Positive = Field(description="D, the size of a head.")


class Boosting(BaseModel):
    """A target, the text it labels, and how many drafts are tuned on the labels in which way."""

    # Not strict as a whole: schedules are dataclasses, which YAML gives as mappings and lists.
    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(description="Directory of the target, which labels the text.")
    drafts: int = Field(
        description="How many drafts are tuned, each on what the earlier ones miss."
    )
    start: Annotated[list[str], Many] = Field(
        [],
        description="Directories of the small models to tune: one for all drafts, or one for each.",
    )
    shape: Shape | None = Field(
        None,
        description="Instead of `start`: sizes of a model that is first trained on text.",
    )
    text: Schedule | None = Field(None, description="That first training, on the text itself.")
    labels: Schedule = Field(
        description="Each draft's tuning on the target's choices; the n-th draft adds n-1 to the "
        "seed."
    )
    labelled_tokens: Positive = Field(description="How much of the text the target labels.")
    kept_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the samples matched by earlier drafts that a later one keeps; "
        "0 drops all of them, as in SpecInfer.",
    )
    corpus: str = Field(
        "", description="Folder of Python source; not given: Python's standard library."
    )

    @field_validator("drafts")
    @classmethod
    def _some(cls, drafts: int) -> int:
        if drafts < 1:
            raise ValueError("boost-tuning needs at least one draft: set drafts to 1 or more")
        return drafts

    @field_validator("text", "labels")
    @classmethod
    def _some_steps(cls, schedule: Schedule | None) -> Schedule | None:
        if schedule and min((min(dataclasses.astuple(p)) for p in schedule.phases), default=0) < 1:
            raise ValueError("a schedule needs phases, each of one context, batch and step or more")
        return schedule

    @model_validator(mode="after")
    def _one_beginning(self) -> "Boosting":
        if bool(self.start) == (self.shape is not None and self.text is not None):
            raise ValueError(
                "say what the drafts begin from: either `start`, directories of small models, or "
                "both `shape` and `text`, to train one"
            )
        if self.start and (self.shape or self.text):
            raise ValueError("`shape` and `text` have no meaning beside `start`: remove them")
        if self.start and len(self.start) not in (1, self.drafts):
            raise ValueError(
                f"start names {len(self.start)} models for drafts={self.drafts}: give one for "
                "all drafts, or one for each"
            )
        return self


def read(path: pathlib.Path) -> Boosting:
    """Returns the settings in a YAML file.

    Raises:
      ConfigError: the file is no mapping, has a key that does not exist, or a value out of range.
    """
    return checked(Boosting, read_mapping(path), str(path))
