"""Settings of a cell, each declared once, as a field of `Experiment` or `Method`.

From a field `name = setting(...)` follow the key of the YAML file and its validation, the field of
a `Cell`, the column of summary.csv, and the labels in tables and figures. A setting of `Experiment`
is also an axis of grids. An option of `Method` is also an argument of the drafters it names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field


@dataclasses.dataclass(frozen=True)
class Policies:
    """The cache policies that an option has an effect with.

    Attributes:
      remedy: what to set instead, for error messages.
      include: whether a policy, given by name, is one of them.
    """

    remedy: str
    include: Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is declared about a setting.

    Attributes:
      absent: the value in cells that the setting does not apply to.
      default: the value in other cells if the file does not set it; None: `absent`.
      defaults: defaults of single drafts, instead of `default`.
      many: whether a method takes a list of values, with one cell for each.
      drafters: values of `draft` that the option applies to; empty: a setting of the experiment.
      policies: the policies it applies to; None: all. A list must suit every policy of its method,
        a single value is dropped in cells with another policy.
      argument: "drafter" or "policy", whichever takes the option as a keyword argument, or "".
      sampled: whether it applies only under sampling.
      in_cell: whether it is a field of `Cell` under its name.
      column: its name in summary.csv; None: the setting's name; "": it has no column.
      label: its part of a method's name, such as "refresh {}"; see `describe`.
    """

    absent: Any
    default: Any = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    many: bool = False
    drafters: tuple[str, ...] = ()
    policies: Policies | None = None
    argument: str = "drafter"
    sampled: bool = False
    in_cell: bool = True
    column: str | None = None
    label: str = ""

    def resolve(self, value: Any, draft: str = "", policy: str = "", sampled: bool = True) -> Any:
        """Returns the value in a cell of this draft and policy, where a file sets `value`."""
        if draft not in (self.drafters or ("",)) or (self.sampled and not sampled):
            return self.absent
        if self.drafters:
            value = value or None  # "", [] and 0 mean that the option is not set
        applies = self.policies is None or self.policies.include(policy)
        if applies and value is None:
            value = self.defaults.get(draft, self.default)
        if value is None or not (applies or self.many):
            return self.absent
        return tuple(value) if isinstance(value, list) else value

    def describe(self, value: Any) -> str:
        """Returns the label of a value, "" of settings without a label.

        The default has no label either, unless a method can list other values next to it.
        """
        hidden = (None, self.absent) if self.many else (None, self.absent, self.default)
        return "" if value in hidden else self.label.format(value)


def setting(absent: Any, *, help: str | None = None, many: bool = False, **declared: Any) -> Any:
    """Returns a pydantic field that declares a `Setting`; its default is `absent`, if `many` []."""
    value = tuple(absent) if isinstance(absent, list) else absent
    extra: Any = {"setting": Setting(value, many=many, **declared)}
    return Field([] if many else absent, description=help, json_schema_extra=extra)


@functools.cache
def declared(kind: type[BaseModel]) -> dict[str, Setting]:
    """Returns the settings that a model declares, by name, in order."""
    fields = kind.model_fields.items()
    return {n: field.json_schema_extra["setting"] for n, field in fields if field.json_schema_extra}  # type: ignore[index,misc]


def columns_of(kind: type[BaseModel]) -> dict[str, str]:
    """Returns the settings of a model that are columns of summary.csv: {setting: column}."""
    return {
        name: name if known.column is None else known.column
        for name, known in declared(kind).items()
        if known.in_cell and known.column != ""
    }
