"""Settings of an algorithm that change from step to step: a pure function of the step's number.

    algorithm:
      entropy_coef: 0.01
      kl_coef: 0.1
      schedules:
        entropy_coef: {shape: cosine, to: 0.0, over: 200, after: 20}
        kl_coef: {shape: steps, at: {100: 0.05, 300: 0.0}}

A setting starts from its own value, so nothing is said twice. Nothing has to be remembered to resume.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Literal, Self

import annotated_types
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from engine3d.settings import Settings

_BOUNDS = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.Interval)


class Schedule(Settings):
    """Change of a setting from step to step."""

    shape: Literal["linear", "cosine", "steps"]
    """Straight, or as half a cosine wave, from the setting's own value to another; or other values from given steps."""
    to: float | None = None
    """The value at the end, which stays. Not with steps."""
    over: int | None = Field(default=None, gt=0)
    """Steps from the first value to the last. Not with steps."""
    after: int = Field(default=0, ge=0)
    """First steps that keep the first value. Not with steps."""
    at: dict[Annotated[int, Field(gt=1)], float] | None = Field(default=None, min_length=1)
    """Value from each of these steps on, with shape steps."""

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Self:
        by_steps = self.shape == "steps"
        gradual = {"to": self.to is not None, "over": self.over is not None, "after": self.after > 0}
        needed, unused = (("at",), [*gradual]) if by_steps else (("to", "over"), ["at"])
        given = {name for name, is_set in (gradual | {"at": self.at is not None}).items() if is_set}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"no {' and no '.join(missing)} with shape {self.shape!r}, which needs it")
        if spare := [name for name in unused if name in given]:
            raise ValueError(f"{' and '.join(spare)} with shape {self.shape!r}, which does not use it")
        return self

    def value(self, step: int, first: float) -> float:
        """Return the value in a step, counted from 1.

            p = min(max((step - 1 - after) / over, 0), 1)
            linear:  first + (to - first) * p
            cosine:  first + (to - first) * (1 - cos(pi p)) / 2
            steps:   that of the last step of `at` that has come; `first` before all of them

        So step 1 has the first value, and step 1 + after + over the last.

        Args:
            step: its number.
            first: the setting's own value.
        """
        if self.shape == "steps":
            come = [begin for begin in self.at or {} if begin <= step]
            return self.at[max(come)] if self.at and come else first
        assert self.to is not None
        assert self.over is not None
        share = min(max((step - 1 - self.after) / self.over, 0.0), 1.0)
        if share in (0.0, 1.0):  # exactly, however the sum below rounds
            return self.to if share else first
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return first + (self.to - first) * share

    @property
    def turns(self) -> Sequence[int]:
        """Steps between which the value stays, or moves in one direction."""
        return sorted(self.at) if self.at else [1 + self.after, 1 + self.after + (self.over or 0)]


Schedules = Mapping[str, Schedule]
"""Schedules by the setting that changes."""


def in_force[C: BaseModel](config: C, schedules: Schedules, step: int) -> C:
    """Return the settings of a step, counted from 1: every scheduled one has its value, and there are no schedules."""
    if not schedules:
        return config
    values = {name: schedule.value(step, getattr(config, name)) for name, schedule in schedules.items()}
    return config.model_copy(update={**values, "schedules": {}})


def largest(first: float, schedule: Schedule | None) -> float:
    """Return the largest value in any step of a setting with this value of its own."""
    return first if schedule is None else max([first, *(schedule.value(step, first) for step in schedule.turns)])


def schedulable(settings: type[BaseModel], unscheduled: Set[str]) -> list[str]:
    """Return the settings that may have a schedule: bounded numbers, but for those that a schedule cannot change."""
    bounded = (name for name, field in settings.model_fields.items() if _is_bounded(field))
    return [name for name in bounded if name not in unscheduled]


def schedule_errors(
    config: BaseModel,
    schedules: Schedules,
    *,
    unscheduled: Set[str],
    unused: Mapping[str, str],
    controllers: Mapping[str, str],
) -> Iterator[str]:
    """Yield the errors of the schedules of settings that are right without them.

    Args:
        config: the settings.
        schedules: of some of them.
        unscheduled: the settings that a schedule cannot change.
        unused: the settings without a use, with the setting that disables them and the one that would enable them.
        controllers: for settings that may have a controller, the setting with "fixed" or "adaptive".
    """
    names = schedulable(type(config), unscheduled)
    expected = f"expected one of {', '.join(names)}"
    for name in schedules:
        controller = controllers.get(name)
        if name in unscheduled:
            yield f"schedules.{name}: {name} cannot change during a run; {expected}"
        elif name not in names:
            yield f"schedules.{name}: {name} is no number with a bound of this algorithm; {expected}"
        elif name in unused:
            yield f"schedules.{name} is set with {unused[name]}, or no schedule"
        elif getattr(config, name) is None:
            yield f"schedules.{name}: {name} is null, expected a number to start from"
        elif controller is not None and getattr(config, controller) == "adaptive":
            yield f"schedules.{name} is set with {controller} 'adaptive', which moves {name} too; expected one of them"
        else:
            continue
        return
    yield from _errors_on_the_way(config, schedules)


def _errors_on_the_way(config: BaseModel, schedules: Schedules) -> Iterator[str]:
    """Yield the error of the first step with settings that a recipe could not have."""
    for step in sorted({turn for schedule in schedules.values() for turn in schedule.turns}):
        try:
            type(config).model_validate(in_force(config, schedules, step).model_dump())
        except ValidationError as error:
            first = error.errors()[0]
            what = str(first.get("ctx", {}).get("error", first["msg"][:1].lower() + first["msg"][1:]))
            where = f"{first['loc'][0]} is {first['input']:g}: " if first["loc"] else ""
            yield f"schedules: in step {step}, {where}{what}"
            return


def _is_bounded(field: FieldInfo) -> bool:
    """True if a setting is a number with a bound, null allowed or not."""
    annotation, metadata = field.annotation, list(field.metadata)
    kinds = [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is Annotated:
        kind, *inner = typing.get_args(kinds[0])
        kinds, metadata = [kind], metadata + inner
    return kinds == [float] and any(isinstance(constraint, _BOUNDS) for constraint in metadata)
