"""Defaults of a recipe without a placement: all devices of the machine, and what fits them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridflow.algorithms.config import DEFAULT, load
from hybridflow.algorithms.registry import ALGORITHMS

_SHARED_MEMORY = 0.3
"""The part of a GPU's free memory that an engine takes where it shares the GPU with training."""

Path = tuple[str, ...]
"""A key in a recipe, from the outermost group on."""


def machine_defaults(get: Callable[[Path], Any], gpus: int) -> Iterator[tuple[Path, Any]]:
    """Actor and engines on all GPUs of a machine in bfloat16, or on one CPU slot in float32.

    Args:
        get: the value that a key has, None where it has none.
        gpus: of the machine.
    """
    actor = get(("placement", "actor")) or (f"cuda:0-{gpus - 1}" if gpus else "cpu:0")
    rollout = get(("placement", "rollout")) or actor
    dtype = get(("train", "dtype")) or ("bfloat16" if gpus else "float32")
    yield ("placement", "actor"), actor
    yield ("placement", "rollout"), rollout
    yield ("train", "dtype"), dtype
    yield ("rollout", "engine", "dtype"), dtype
    if gpus and rollout == actor:
        yield ("rollout", "engine", "mem_fraction_static"), _SHARED_MEMORY


def placed_on_machine(data: Mapping[str, Any], gpus: Callable[[], int]) -> Mapping[str, Any]:
    """A recipe's content with these defaults; as it is where it has devices for its actor, pools, or a cluster."""
    placement = data.get("placement")
    if isinstance(placement, Mapping):
        placed = any(placement.get(name) for name in ("actor", "pools", "cluster"))
    else:
        placed = placement is not None
    if placed:
        return data
    engines = _needs_engines(data.get("algorithm"))
    recipe = data
    for key, value in machine_defaults(lambda key: _value(data, key), gpus()):
        if (engines or "rollout" not in key) and _value(data, key) is None:
            recipe = _with(recipe, key, value)
    return recipe


def _needs_engines(algorithm: Any) -> bool:
    """True if engines generate for an algorithm, or its settings are wrong, which another check reports."""
    given = algorithm if isinstance(algorithm, Mapping) else {}
    name = given.get("name", DEFAULT)
    if not isinstance(name, str) or name not in ALGORITHMS:
        return True
    settings = load(name).settings
    try:
        return settings.model_validate({key: given[key] for key in given if key in settings.model_fields}).needs_engines
    except ValueError:
        return True


def _value(data: Mapping[str, Any], key: Path) -> Any:
    value: Any = data
    for name in key:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _with(data: Mapping[str, Any], key: Path, value: Any) -> Mapping[str, Any]:
    """A copy with a value, but as it is where something on the way to it is no group."""
    if len(key) == 1:
        return {**data, key[0]: value}
    group = data.get(key[0])
    if group is not None and not isinstance(group, Mapping):
        return data
    return {**data, key[0]: _with(group or {}, key[1:], value)}
