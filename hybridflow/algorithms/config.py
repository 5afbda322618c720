"""`algorithm:` of a recipe: the settings of one of the algorithms, chosen by its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, SerializeAsAny, Tag, ValidatorFunctionWrapHandler, WrapValidator

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.own_files import is_own, load_own
from hybridflow.algorithms.registry import ALGORITHMS, is_known, known
from hybridflow.algorithms.settings import AlgorithmSettings

DEFAULT = "grpo"
_OWN = "file of the user"
_OTHERWISE = {"beta": "kl_coef"}
"""Key of this project by the name that other projects give it, for keys that only some algorithms have here."""


def load(name: str) -> Algorithm[Any]:
    """Import an algorithm.

    Raises:
        ValueError: it is in a file of the user, which cannot be imported or has no algorithm of this name.
    """
    if not is_own(name):
        algorithm: Algorithm[Any] = importlib.import_module(ALGORITHMS[name]).ALGORITHM
        return algorithm
    imported = load_own(name)
    if not isinstance(imported, Algorithm):
        raise ValueError(f"{name} is a {type(imported).__name__}, expected an Algorithm of hybridflow.algorithms.base")
    if not (isinstance(imported.settings, type) and issubclass(imported.settings, AlgorithmSettings)):
        raise ValueError(f"{name} has settings {imported.settings!r}, expected a subclass of AlgorithmSettings")
    return imported


def _name(data: Any) -> str:
    """Return the tag of the settings class that checks `data`: the default's for an unknown name, which it refuses."""
    name = data.get("name", DEFAULT) if isinstance(data, Mapping) else getattr(data, "name", DEFAULT)
    if not isinstance(name, str) or not is_known(name):
        return DEFAULT
    return _OWN if is_own(name) else name


def _own_settings(data: Any, validate: ValidatorFunctionWrapHandler) -> AlgorithmSettings:
    """Validate the settings of an algorithm in a file of the user."""
    if not isinstance(data, Mapping):
        return validate(data)  # type: ignore[no-any-return]
    settings, name = load(data["name"]).settings, known(data["name"])
    fields = settings.model_fields
    if unknown := [key for key in data if key not in fields]:
        raise ValueError(f"unknown key {unknown[0]} with name {name!r}, whose settings are {', '.join(fields)}")
    return settings.model_validate({**data, "name": name})


def _without_others(data: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Refuse, once all else is right, keys that only other algorithms have."""
    if not isinstance(data, Mapping):
        return validate(data)
    name = _name(data)
    if name == _OWN:
        return validate(data)
    of_others: dict[str, list[str]] = {}
    known_keys = load(name).settings.model_fields
    for other in ALGORITHMS:
        for key in load(other).settings.model_fields:
            if key in data and key not in known_keys:
                of_others.setdefault(key, []).append(other)
    settings = validate({key: value for key, value in data.items() if key not in of_others})
    if of_others:
        raise ValueError(
            "; ".join(
                f"{key} is set with name {name!r}, which does not use it; expected name "
                f"{' or '.join(map(repr, users))}, {_instead(key, known_keys)}or no {key}"
                for key, users in of_others.items()
            )
        )
    return settings


def _instead(key: str, known_keys: Mapping[str, Any]) -> str:
    return f"{_OTHERWISE[key]}, " if _OTHERWISE.get(key) in known_keys else ""


if TYPE_CHECKING:
    AnyAlgorithm = AlgorithmSettings
else:
    AnyAlgorithm = Annotated[
        Annotated[
            Union[
                *(Annotated[load(name).settings, Tag(name)] for name in ALGORITHMS),
                Annotated[SerializeAsAny[AlgorithmSettings], WrapValidator(_own_settings), Tag(_OWN)],
            ],
            Discriminator(_name),
        ],
        WrapValidator(_without_others),
    ]
"""Settings of any algorithm."""
