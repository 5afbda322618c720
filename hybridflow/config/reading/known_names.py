"""Names that other systems have for settings, commands, modules and names to import; see `known_names.yaml`.

A dotted name of a setting is that of one section; a name without a dot is known wherever it stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml

_SET_IN_RECIPE = 'in the recipe, as recipe={"group": {"key": ...}}'


class Names(Mapping[str, str]):
    """Texts by name, read from the file when a name is looked for first.

    Args:
        texts: makes the mapping.
    """

    def __init__(self, texts: Callable[[], Mapping[str, str]]) -> None:
        self._texts = functools.cache(texts)

    def __getitem__(self, name: str) -> str:
        return self._texts()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts())

    def __len__(self) -> int:
        return len(self._texts())


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = yaml.load(
        Path(__file__).with_name("known_names.yaml").read_bytes(), yaml.CSafeLoader
    )
    return tables


def _table(name: str) -> Names:
    return Names(lambda: _tables()[name])


VERL = _table("verl")
NEMO_RL = _table("nemo_rl")
PRIME_RL = _table("prime_rl")
ANYWHERE = _table("anywhere")
EARLIER = _table("earlier")
API_ONLY = _table("api")
COMMANDS = _table("commands")
OPTIONS = _table("options")
MODULES = _table("modules")
ATTRIBUTES = _table("attributes")
METHODS = _table("methods")

RECIPE_NAMES = Names(lambda: {**VERL, **NEMO_RL, **PRIME_RL, **ANYWHERE, **EARLIER})
"""Settings of a recipe."""


def _api_names() -> dict[str, str]:
    of_recipes = {
        name: f"{text} ({_SET_IN_RECIPE})" if text.startswith("here ") else text for name, text in ANYWHERE.items()
    }
    return {**of_recipes, **API_ONLY}


API_NAMES = Names(_api_names)
"""Settings and arguments of the Python API."""


def no_attribute(kind: type, name: str) -> AttributeError:
    """Return the error of a class of the Python API that has no attribute of this name."""
    public = ", ".join(attribute for attribute in vars(kind) if not attribute.startswith("_"))
    text = METHODS.get(f"{kind.__name__}.{name}", f"it has {public}")
    return AttributeError(f"{kind.__name__} has no attribute {name!r}: {text}", name=name)


def import_text(name: str) -> str | None:
    """Return the text of a module or a name in one, or of the package that it is in.

    Args:
        name: below this package, such as "trainer.main_ppo" or "data.DataProto".
    """
    names = name.split(".")
    if (text := ATTRIBUTES.get(names[-1])) and name not in MODULES:
        return text
    within = (".".join(names[:length]) for length in range(len(names), 0, -1))
    return next((MODULES[module] for module in within if module in MODULES), None)
