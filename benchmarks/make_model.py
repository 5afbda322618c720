"""The random model of a recipe, in a directory that several measurements can share.

    python benchmarks/make_model.py launch/recipes/qwen3-30b-a3b-4xh200.yaml --directory models/qwen3-30b [KEY=VALUE...]

writes what `model.create` of the recipe makes when a run starts, with its tokenizer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import Parser
from engine3d.errors import UserError
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import load_recipe


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="make_model.py", description="The random model of a recipe, in a directory.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--directory", type=Path, required=True, help="for the model; must not be there")
    try:
        options = parser.parse_intermixed_args(arguments)
        recipe = load_recipe(options.recipe, options.overrides)
        if recipe.model.create is None:
            raise UserError(f"{options.recipe}: model.create is null, there is no model to be made")
        if options.directory.exists():
            raise UserError(f"--directory: {options.directory} is there already")
        options.directory.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        create_model(recipe.model, options.directory, seed=recipe.seed)
    except UserError as error:
        print(f"make_model.py: {error}", file=sys.stderr)
        return 2
    nbytes = sum(path.stat().st_size for path in options.directory.glob("*.safetensors"))
    print(f"{options.directory}: {nbytes / 1e9:.1f} GB in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
