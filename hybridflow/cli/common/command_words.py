"""The words of a command, also as other programs write them: `--config FILE`, `--resume`, `--learning_rate`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from engine3d.errors import shortened
from engine3d.startup.imports import quick_imports
from hybridflow.config.reading.known_names import COMMANDS, OPTIONS, RECIPE_NAMES

_ALIKE = 0.75
"""Likeness of a mistyped option or command to the one that was meant."""
_RECIPE = ("--config", "-c", "--recipe", "@")
_SETTINGS = {"--resume": "resume=auto", "--overwrite": "overwrite=true"}


def as_settings(words: Sequence[str]) -> list[str]:
    """The words with the recipe first and settings in place of these options.

    `--config FILE`, `-c FILE` and `@ FILE` are FILE, `--resume` is resume=auto, `--resume DIRECTORY` is
    resume=DIRECTORY, `--overwrite` is overwrite=true. All other words stay as they are.
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


def told_of_arguments(message: str, options: Collection[str], takes_settings: bool) -> str | None:
    """Explain argparse's message about a command or an option; None where nothing is known of it.

    Args:
        options: of the command.
        takes_settings: the command takes key=value.
    """
    if message.startswith("the following arguments are required: "):
        return message.replace(", key=value", "")  # which may be none
    if chosen := re.match(r"argument (COMMAND|launcher): invalid choice: '([^']+)' \(choose from (.*)\)", message):
        name, choices = chosen[2], re.findall("'([^']+)'", chosen[3])
        near = difflib.get_close_matches(name, choices, n=1, cutoff=_ALIKE)
        from hybridflow.algorithms.registry import ALGORITHMS

        of_algorithm = f"here it is hybridflow train RECIPE algorithm.name={name}" if name in ALGORITHMS else None
        text = COMMANDS.get(name.replace("_", "-"), of_algorithm)
        meant = f"did you mean {near[0]}?" if near else f"expected {', '.join(choices)}"
        return f"there is no command {shortened(name)}: {text or meant}"
    if (unknown := re.match(r"unrecognized arguments: (-\S+)", message)) is None:
        return None
    option = unknown[1].partition("=")[0]
    if near := difflib.get_close_matches(option, options, n=1, cutoff=_ALIKE):
        return f"{option}: no such option; did you mean {near[0]}?"
    name = option.lstrip("-").replace("-", "_")
    text = OPTIONS.get(name) or RECIPE_NAMES.get(option.lstrip("-")) or RECIPE_NAMES.get(name)
    if text:
        return f"{option}: {text}"
    return _of_a_setting(option) if takes_settings else f"{option}: no such option"


def _of_a_setting(option: str) -> str:
    """The line about an option that is no name of another system's, and may be a setting's."""
    with quick_imports():
        from hybridflow.config.reading.error_messages import suggestion
        from hybridflow.config.recipe import Recipe

    text = suggestion(Recipe, tuple(option.lstrip("-").replace("-", "_").split(".")), None, None)
    if text.startswith("here "):
        return f"{option}: {text}"
    meant = re.fullmatch(r"did you mean (\S+)\?", text)
    example = f"{meant[1]}=..." if meant else "seed=1"
    return f"{option}: no such option; settings stand behind the recipe as key=value, such as {example}"
