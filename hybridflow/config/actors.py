"""A recipe of several actors: `actors:` holds what each has on top of all else that the recipe says.

    algorithm: {name: ippo}
    actors:
      adder: {placement: {actor: cpu:0, rollout: cpu:0}}
      brief: {placement: {actor: cpu:1, rollout: cpu:1}, reward: {...}, model: {...}}

Each is then a recipe of its own, whose run lies in `<run_dir>/<name>/<actor>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine3d.errors import shortened
from hybridflow.config.reading.yaml_loader import SettingsError, build_settings, merged, read_with_overrides
from hybridflow.config.recipe import Recipe
from hybridflow.rundir.yaml_reader import Key

ACTORS = "actors"
MOST_ACTORS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OF_THE_RUN = ("name", "run_dir", ACTORS, "actor")
"""Keys that are not an actor's own."""


def load_recipes(path: Path | str, overrides: Sequence[str] = (), actor: str | None = None) -> dict[str, Recipe]:
    """The recipe of each actor, by its name; that of one without `actors` under the empty name.

    Args:
        path: of the file.
        overrides: `dotted.key=value`; `actors.NAME.KEY=value` is for one actor, `KEY=value` for all that do not say.
        actor: only this one.

    Raises:
        SettingsError: with one line for every error found.
    """
    data, locations = read_with_overrides(Path(path), overrides)
    if ACTORS not in data:
        if actor is not None:
            raise SettingsError([f"{path}: --actor {shortened(actor)}, and the recipe has no actors"])
        return {"": build_settings(Recipe, data, locations, str(path))}
    actors = _checked(data[ACTORS], locations.get((ACTORS,), str(path)))
    if actor is not None and actor not in actors:
        raise SettingsError([f"{path}: --actor {shortened(actor)}: expected one of {', '.join(actors)}"])
    recipes, lines = {}, []
    for name in actors if actor is None else [actor]:
        try:
            recipes[name] = build_settings(Recipe, *_of_actor(name, data, locations), str(path))
        except SettingsError as error:
            lines += [f"actor {name}: {line}" for line in error.lines]
    if lines:
        raise SettingsError(list(dict.fromkeys(lines)))
    return recipes


def load_one_recipe(path: Path | str, overrides: Sequence[str] = (), actor: str | None = None) -> Recipe:
    """The recipe of a run, or that of one of its actors.

    Raises:
        SettingsError: as `load_recipes`; or there are several.
    """
    recipes = load_recipes(path, overrides, actor)
    if len(recipes) > 1:
        raise SettingsError([f"{path}: the recipe has the actors {', '.join(recipes)}, expected one of them alone"])
    return next(iter(recipes.values()))


def _checked(actors: Any, location: str) -> dict[str, dict[str, Any]]:
    """The mapping of `actors`. Raises SettingsError."""
    if not isinstance(actors, dict) or not 1 < len(actors) <= MOST_ACTORS:
        given = f"{len(actors)} of them" if isinstance(actors, dict) else shortened(repr(actors))
        raise SettingsError(
            [f"{location}: actors: found {given}, expected 2 to {MOST_ACTORS} names, each with its settings"]
        )
    lines = []
    for name, settings in actors.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            lines.append(f"{location}: actors: {shortened(repr(name))} is no name, expected letters, digits and ._-")
        elif not isinstance(settings, dict):
            lines.append(f"{location}: actors.{name}: found {shortened(repr(settings))}, expected settings of a recipe")
        else:
            of_the_run = [key for key in _OF_THE_RUN if key in settings]
            lines += [f"{location}: actors.{name}.{key} is set, which is of the whole run" for key in of_the_run]
    if lines:
        raise SettingsError(lines)
    return actors


def _of_actor(name: str, data: dict[str, Any], locations: dict[Key, str]) -> tuple[dict[str, Any], dict[Key, str]]:
    """All that the recipe of an actor says, and where."""
    shared = {key: value for key, value in data.items() if key != ACTORS}
    run = Path(str(shared.get("run_dir", Recipe.model_fields["run_dir"].default))) / str(shared.get("name", ""))
    settings = merged(shared, data[ACTORS][name]) | {"name": name, "run_dir": str(run), "actor": name}
    prefix = (ACTORS, name)
    of_actor = {key[len(prefix) :]: location for key, location in locations.items() if key[: len(prefix)] == prefix}
    return settings, {key: location for key, location in locations.items() if key[0] != ACTORS} | of_actor
