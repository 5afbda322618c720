"""Reward functions of verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info).

verl calls them with these names, for one sample, and with their plurals for a batch. They return a number, or a
dictionary whose `score` is the number; the other numbers in it become figures. Coroutines run side by side.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
SOURCE = "(source)"
"""Column of the name of each row's source; no field of data is called so by chance."""
_FIGURE = re.compile(r"[A-Za-z]\w{0,59}", re.ASCII)
_MOST_FIGURES = 32


def adapted(function: Callable[..., Any]) -> ComputeScore | None:
    """A function of verl's signature as one that is called here; None of any other."""
    parameters = inspect.signature(function).parameters.keys()
    for suffix in ("", "s"):
        own = {f"{name}{suffix}" for name in NAMES}
        if {f"solution_str{suffix}", f"ground_truth{suffix}"} <= parameters and next(iter(parameters)) in own:
            return ComputeScore(function, suffix)
    return None


class ComputeScore:
    """A function of verl's signature, called as a function of this project is.

    Args:
        function: with arguments of its settings.
        suffix: of verl's names in its parameters: "s" for a batch, else nothing.
    """

    needs_answers = True

    def __init__(self, function: Callable[..., Any], suffix: str) -> None:
        self._function, self._suffix = function, suffix
        self._fields: Sequence[str] = ()
        parameters = inspect.signature(function).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._names = [name for name in NAMES if any_name or f"{name}{suffix}" in parameters]

    def prepare(self, fields: Sequence[str] | None) -> list[str]:
        """The columns that are needed. Raises ValueError for a parameter that nothing is passed for."""
        own = {f"{name}{self._suffix}" for name in NAMES}
        if given := sorted(own & getattr(self._function, "keywords", {}).keys()):
            raise ValueError(f"gets {given[0]!r} of each sample, expected another of its arguments in the settings")
        for name, each in inspect.signature(self._function).parameters.items():
            required = each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            if required and (name not in own or each.kind is each.POSITIONAL_ONLY):
                raise ValueError(
                    f"requires an argument {name!r}, expected {', '.join(sorted(own))}, or arguments for it"
                )
        self._fields = list(fields or ())
        columns = ["answers", "data_source" if "data_source" in self._fields else SOURCE]
        if "extra_info" in self._names:
            columns += ["extra_info"] if "extra_info" in self._fields else self._fields
        return list(dict.fromkeys(columns))

    def __call__(self, generated_texts: Sequence[str], *, timeout_s: float, **columns: Sequence[Any]) -> dict[str, Any]:
        """Score so many texts, each by itself or all at once, as the function's parameters are named."""
        del timeout_s  # the parent ends what takes longer
        samples = [self._sample(text, row, columns) for row, text in enumerate(generated_texts)]
        if self._suffix:
            call = {f"{name}s": [sample[name] for sample in samples] for name in self._names}
            found = asyncio.run(_gathered([self._function(**call)]))[0]
        else:
            found = asyncio.run(_gathered([self._function(**sample) for sample in samples]))
        if hasattr(found, "tolist"):
            found = found.tolist()
        if not isinstance(found, list | tuple) or len(found) != len(samples):
            return {"rewards": found}
        scores = [each.get("score", each) if isinstance(each, Mapping) else each for each in found]
        return {"rewards": scores, "figures": _figures(found)}

    def _sample(self, text: str, row: int, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        values = {name: column[row] for name, column in columns.items()}
        if "extra_info" in self._fields:
            extra = values.get("extra_info") or {}
        else:
            extra = {name: values[name] for name in self._fields if name in values}
        source = values.get("data_source") if "data_source" in self._fields else values[SOURCE]
        known = dict(zip(NAMES, (source, text, values["answers"], extra), strict=True))
        return {name: known[name] for name in self._names}


async def _gathered(results: Sequence[Any]) -> list[Any]:
    """Results, those that are awaited side by side."""

    async def value(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    return list(await asyncio.gather(*map(value, results)))


def _figures(found: Sequence[Any]) -> dict[str, list[float | None]]:
    """The numbers next to the scores, by name; None for a sample without one."""
    others = [{k: v for k, v in each.items() if k != "score"} if isinstance(each, Mapping) else {} for each in found]
    names = [
        name
        for name in dict.fromkeys(name for each in others for name in each)
        if isinstance(name, str)
        and _FIGURE.fullmatch(name)
        and name not in ("mean", "failed")
        and any(_number(each.get(name)) is not None for each in others)
    ]
    return {name: [_number(each.get(name)) for each in others] for name in names[:_MOST_FIGURES]}


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    finite = isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e30
    return float(value) if finite else None
