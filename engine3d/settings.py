"""The base of every settings class of the project."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

SMALLEST, LARGEST = 1e-30, 1e30
"""Magnitudes of numbers other than 0 with which float32 can compute."""
LONGEST_S = 1e8
"""Largest limit of time, three years: clocks have a range."""
MOST_TOKENS = 1 << 30
"""Largest sequence, and largest vocabulary."""
MOST_SAMPLES = 1 << 20
"""Most samples of a step: the driver has a record of each."""
MOST_RANKS = 1 << 17
_LARGEST_INTEGER = 1 << 53

_LONGEST_PATH, _LONGEST_NAME = 4000, 255
"""Bytes that Linux takes for a path, less some for the files of a run below it, and for a name in it."""


def _absolute(path: Path) -> Path:
    absolute = path.absolute()
    if (size := len(os.fsencode(absolute))) > _LONGEST_PATH:
        raise ValueError(f"a path of {size:,} bytes, expected at most {_LONGEST_PATH:,}")
    if (size := max(len(os.fsencode(name)) for name in absolute.parts)) > _LONGEST_NAME:
        raise ValueError(f"a path with a name of {size:,} bytes, expected at most {_LONGEST_NAME}")
    return absolute


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
"""A path that is absolute once it is read: settings that are written mean the same wherever they are read again."""


class Settings(BaseModel):
    """A frozen group of settings: unknown keys are refused, each setting has one default at most.

    A boolean is no number, a number is one that float32 can hold, and no text has a null character.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    other_names: ClassVar[Mapping[str, str]] = {}
    """Names of other systems for settings of this group and of those in it, with the advice for each."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(entry, str | PurePath) and "\0" in str(entry) for entry in values):
            raise ValueError("a null character in a text, expected none")
        if any(isinstance(entry, bool) for entry in values) and info.field_name is not None:
            kinds = set(_leaves(cls.model_fields[info.field_name].annotation))
            if not kinds & {bool, Any, object} and (number := kinds & {int, float}):
                raise PydanticKnownError("float_type" if float in number else "int_type")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _is_a_size(cls, value: Any) -> Any:
        """Check magnitudes after the setting's own limits, which say more."""
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
                most = LARGEST if isinstance(number, float) else _LARGEST_INTEGER
                if number > most:
                    raise PydanticKnownError("less_than_equal", {"le": most})
                if number < -most:
                    raise PydanticKnownError("greater_than_equal", {"ge": -most})
                if 0 < abs(number) < SMALLEST:
                    raise PydanticKnownError("greater_than_equal", {"ge": SMALLEST})
        return value


def _leaves(annotation: Any) -> typing.Iterator[Any]:
    """The types that an annotation is made of."""
    arguments = typing.get_args(annotation)
    if not arguments or typing.get_origin(annotation) is typing.Literal:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)
