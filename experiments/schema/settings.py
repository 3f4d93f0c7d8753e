"""Settings of a cell, each declared once, as a field of `Experiment`.

From a field `name = setting(...)` follow the key of the YAML file and its validation, the axis of
grids, the field of a `Cell`, the column of summary.csv, and the labels in tables and figures.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field

NO_LIMITS: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is declared about a setting.

    Attributes:
      absent: the value in cells that the setting does not apply to.
      default: the value in other cells if the file does not set it; None: `absent`.
      needs: the setting without which it has no effect; "": none.
      column: its name in summary.csv; None: the setting's name; "": it has no column.
    """

    absent: Any
    default: Any = None
    needs: str = ""
    column: str | None = None

    def resolve(self, value: Any, applies: bool) -> Any:
        """Returns the value in a cell, where a file sets `value`."""
        if not applies:
            return self.absent
        if value is None:
            value = self.default
        return self.absent if value is None else value


def setting(
    absent: Any, *, help: str | None = None, limits: Mapping[str, Any] = NO_LIMITS, **declared: Any
) -> Any:
    """Returns a pydantic field that declares a `Setting`; its default is `absent`.

    `limits` are the field's `ge`, `gt` and `le`.
    """
    extra: Any = {"setting": Setting(absent, **declared)}
    return Field(absent, description=help, json_schema_extra=extra, **limits)


@functools.cache
def declared(settings_class: type[BaseModel]) -> dict[str, Setting]:
    """Returns the settings that a model declares, by name, in order."""
    fields = settings_class.model_fields.items()
    return {n: field.json_schema_extra["setting"] for n, field in fields if field.json_schema_extra}  # type: ignore[index,misc]


def columns_of(settings_class: type[BaseModel]) -> dict[str, str]:
    """Returns the settings of a model that are columns of summary.csv: {setting: column}."""
    return {
        name: name if setting.column is None else setting.column
        for name, setting in declared(settings_class).items()
        if setting.column != ""
    }
