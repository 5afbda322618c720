"""`hybridflow data`: shows the prompts of a recipe as the model reads them, without starting anything."""

from __future__ import annotations

import argparse

from engine3d.errors import shortened
from hybridflow.cli.recipe_arguments import add_recipe, loaded_recipes

_MOST_SHOWN = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow data`."""
    add_recipe(parser)
    parser.add_argument("--show", type=_count, default=3, metavar="N", help="prompts of each phase that are shown (3)")
    parser.add_argument(
        "--characters", type=_count, default=600, metavar="N", help="of each text that is shown, at most (600)"
    )


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: something is wrong with the data.
    """
    from hybridflow.planning.data_report import data_lines

    for name, recipe in loaded_recipes(parsed).items():
        lines = data_lines(recipe, show=parsed.show, characters=parsed.characters)
        print("\n".join([*([f"actor {name}"] if name else []), *lines]))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_SHOWN * 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shortened(text)}")
    return int(text)
