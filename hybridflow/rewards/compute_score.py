"""Reward functions of verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info).

verl calls them with these names, for one sample, and with their plurals for a batch. They return a number, or a
dictionary whose `score` is the number; its other numbers become metrics. Coroutines run at the same time.
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
_METRIC = re.compile(r"[A-Za-z]\w{0,59}", re.ASCII)
_MOST_METRICS = 32


def adapted(function: Callable[..., Any]) -> ComputeScore | None:
    """Adapter of a function of verl's signature. None for any other function."""
    parameters = inspect.signature(function).parameters.keys()
    for suffix in ("", "s"):
        names = {f"{name}{suffix}" for name in NAMES}
        if {f"solution_str{suffix}", f"ground_truth{suffix}"} <= parameters and next(iter(parameters)) in names:
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
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = [name for name in NAMES if any_name or f"{name}{suffix}" in parameters]

    def prepare(self, fields: Sequence[str] | None) -> list[str]:
        """Columns that the function needs. Raises ValueError for a parameter without an argument."""
        names = {f"{name}{self._suffix}" for name in NAMES}
        if given := sorted(names & getattr(self._function, "keywords", {}).keys()):
            raise ValueError(f"gets {given[0]!r} of each sample, expected another of its arguments in the settings")
        for name, parameter in inspect.signature(self._function).parameters.items():
            required = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if required and (name not in names or parameter.kind is parameter.POSITIONAL_ONLY):
                raise ValueError(
                    f"requires an argument {name!r}, expected {', '.join(sorted(names))}, or arguments for it"
                )
        self._fields = list(fields or ())
        columns = ["answers", "data_source" if "data_source" in self._fields else SOURCE]
        if "extra_info" in self._names:
            columns += ["extra_info"] if "extra_info" in self._fields else self._fields
        return list(dict.fromkeys(columns))

    def __call__(self, generated_texts: Sequence[str], *, timeout_s: float, **columns: Sequence[Any]) -> dict[str, Any]:
        """Score texts, each by itself or all at once, depending on the function's parameters."""
        del timeout_s  # the parent ends what takes longer
        samples = [self._sample(text, row, columns) for row, text in enumerate(generated_texts)]
        if self._suffix:
            call = {f"{name}s": [sample[name] for sample in samples] for name in self._names}
            returned = asyncio.run(_gathered([self._function(**call)]))[0]
        else:
            returned = asyncio.run(_gathered([self._function(**sample) for sample in samples]))
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        if not isinstance(returned, list | tuple) or len(returned) != len(samples):
            return {"rewards": returned}
        scores = [result.get("score", result) if isinstance(result, Mapping) else result for result in returned]
        return {"rewards": scores, "metrics": _metrics(returned)}

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
    """Await results at the same time. Others are returned as they are."""

    async def value(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    return list(await asyncio.gather(*map(value, results)))


def _metrics(returned: Sequence[Any]) -> dict[str, list[float | None]]:
    """The numbers next to the scores, by name; None for a sample without one."""
    others = [
        {k: v for k, v in result.items() if k != "score"} if isinstance(result, Mapping) else {} for result in returned
    ]
    names = [
        name
        for name in dict.fromkeys(name for extra in others for name in extra)
        if isinstance(name, str)
        and _METRIC.fullmatch(name)
        and name not in ("mean", "failed")
        and any(_number(extra.get(name)) is not None for extra in others)
    ]
    return {name: [_number(extra.get(name)) for extra in others] for name in names[:_MOST_METRICS]}


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    finite = isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e30
    return float(value) if finite else None
