"""`algorithm:` of a recipe: the settings of one of the algorithms, chosen by its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag, ValidatorFunctionWrapHandler, WrapValidator

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.settings import AlgorithmSettings

DEFAULT = "grpo"
_OTHERWISE = {"beta": "kl_coef"}
"""What others call by the name of a key that only some algorithms have here."""


def load(name: str) -> Algorithm[Any]:
    """Import an algorithm."""
    found: Algorithm[Any] = importlib.import_module(ALGORITHMS[name]).ALGORITHM
    return found


def _name(data: Any) -> str:
    """Of the class that data is checked by. The default's where there is no such algorithm: it refuses the name."""
    name = data.get("name", DEFAULT) if isinstance(data, Mapping) else getattr(data, "name", DEFAULT)
    return name if isinstance(name, str) and name in ALGORITHMS else DEFAULT


def _without_others(data: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Refuse, once all else is right, keys that only other algorithms have."""
    if not isinstance(data, Mapping):
        return validate(data)
    name = _name(data)
    of_others: dict[str, list[str]] = {}
    own = load(name).settings.model_fields
    for other in ALGORITHMS:
        for key in load(other).settings.model_fields:
            if key in data and key not in own:
                of_others.setdefault(key, []).append(other)
    found = validate({key: value for key, value in data.items() if key not in of_others})
    if of_others:
        raise ValueError(
            "; ".join(
                f"{key} is set with name {name!r}, which does not use it; expected name "
                f"{' or '.join(map(repr, users))}, {_instead(key, own)}or no {key}"
                for key, users in of_others.items()
            )
        )
    return found


def _instead(key: str, own: Mapping[str, Any]) -> str:
    return f"{_OTHERWISE[key]}, " if _OTHERWISE.get(key) in own else ""


if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmSettings
else:
    AnyAlgorithm = Annotated[
        Annotated[
            Union[tuple(Annotated[load(name).settings, Tag(name)] for name in ALGORITHMS)],  # noqa: UP007
            Discriminator(_name),
        ],
        WrapValidator(_without_others),
    ]
"""Settings of any algorithm."""
