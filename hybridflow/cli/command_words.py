"""The words of a command that takes a recipe, also as other programs write them: `--config FILE`, `--resume`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_RECIPE = ("--config", "--recipe")
_SETTINGS = {"--resume": "resume=auto", "--overwrite": "overwrite=true"}


def as_settings(words: Sequence[str]) -> list[str]:
    """The words with the recipe first and settings in place of these options.

    `--config FILE` is FILE, `--resume` is resume=auto, `--resume DIRECTORY` is resume=DIRECTORY, `--overwrite` is
    overwrite=true. All other words stay as they are.
    """
    recipe: list[str] = []
    others: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if option in _RECIPE and (equals or left):
            recipe.append(value if equals else left.pop(0))
        elif option == "--resume" and (equals or (left and Path(left[0]).is_dir())):
            others.append(f"resume={value if equals else left.pop(0)}")
        elif not equals and option in _SETTINGS:
            others.append(_SETTINGS[option])
        else:
            others.append(f"{option}{equals}{value}")
    return [*recipe, *others]
