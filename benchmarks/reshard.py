"""How fast weights go from Megatron-Core to SGLang, and how many bytes that takes.

    python benchmarks/reshard.py --plan-only --model deepseek-v3 --train pp=16,ep=32,dp=32 \\
        --rollout tp=32,ep=32,engines=8

prints one JSON object on stdout: the figures of the plan (engine3d/reshard/figures.py says what each is), made from
shapes alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import (
    Placement,
    named_model,
    parse_layout,
    parse_rollout,
    plan_figures,
    versions,
)
from engine3d.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = _Parser(prog="reshard.py", description="Weight transfer from Megatron-Core to SGLang.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--train", required=True, help="sizes of the trainer, such as tp=1,pp=16,ep=32,dp=32")
    parser.add_argument("--rollout", required=True, help="sizes of the engines, such as tp=32,ep=32,engines=8")
    parser.add_argument("--colocated", action="store_true", help="the engines are on the trainer's GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument(
        "--plan-only", action="store_true", required=True, help="figures of the plan, from shapes alone"
    )
    try:
        options = parser.parse_args(arguments)
        placement = Placement(options.gpus_per_node, options.colocated)
        layout, rollout = parse_layout(options.train), parse_rollout(options.rollout)
        with redirect_stdout(sys.stderr):
            figures = plan_figures(named_model(options.model), layout, rollout, placement)
    except UserError as error:
        print(f"reshard.py: {error}", file=sys.stderr)
        return 2
    described = {
        "model": options.model,
        "train": str(layout),
        "rollout": options.rollout,
        "colocated": options.colocated,
        "gpus_per_node": options.gpus_per_node,
    }
    print(json.dumps(described | figures | {"versions": versions()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
