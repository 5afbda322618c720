"""Cost of checkpoints.

    python benchmarks/checkpoint.py --plan-only --model deepseek-v3 --train pp=16,ep=32,dp=32

prints one JSON object on stdout: bytes, files and host memory of the ranks, from shapes alone. Without --plan-only

    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --model qwen3-30b-a3b --layers 12 --train ep=4,dp=4 \
        --directory /some/disk/new

saves and loads for real, and prints what that took (`checkpoint_run.py`). One rank needs torchrun too.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoint_plan import plan_figures
from benchmarks.reshard_plan import Parser, named_model, parse_layout, versions
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="checkpoint.py", description="Saving and loading the state of a trained model.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--train", required=True, help="sizes of the trainer, such as tp=1,pp=16,ep=32,dp=32")
    parser.add_argument("--plan-only", action="store_true", help="figures of the plan, from shapes alone")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--precision-aware", action="store_true", help="Adam's moments in bf16, not fp32")
    parser.add_argument("--threads", type=int, default=4, help="that write on each rank")
    real = parser.add_argument_group("for real")
    real.add_argument("--layers", type=int, help="of the model, where not all of them fit")
    real.add_argument("--directory", type=Path, help="to be made on the disk that is measured, and removed again")
    real.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    real.add_argument("--step-tokens", type=int, default=2**21, help="of a training step, over all ranks")
    real.add_argument("--sequence", type=int, default=2048, help="tokens of each sequence")
    real.add_argument("--micro-batch-tokens", type=int, default=16384)
    real.add_argument("--rounds", type=int, default=3, help="of plain writes and reads, a save and a load")
    real.add_argument("--saves", type=int, default=4, help="asynchronous ones")
    try:
        options = parser.parse_args(arguments)
        layout, spec = parse_layout(options.train), named_model(options.model)
        if not options.plan_only:
            return _run(options, layout, spec)
        with redirect_stdout(sys.stderr):
            stats = plan_figures(
                spec,
                layout,
                gpus_per_node=options.gpus_per_node,
                precision_aware=options.precision_aware,
                threads=options.threads,
            )
    except UserError as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2
    described = {
        "model": options.model,
        "train": str(layout),
        "gpus_per_node": options.gpus_per_node,
        "precision_aware": options.precision_aware,
    }
    print(json.dumps(described | stats | {"versions": versions()}, indent=2))
    return 0


def _run(options: argparse.Namespace, layout: Layout, spec: ModelSpec) -> int:
    if options.directory is None:
        raise UserError("--directory is missing: where to save to; or --plan-only")
    if options.directory.exists():
        raise UserError(f"--directory: {options.directory} exists already, expected a new directory")
    from benchmarks.checkpoint_run import Case, measure

    config = dict(spec.hf_config)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    stats = measure(
        Case(
            config=config,
            layout=layout,
            directory=options.directory,
            tokens=options.step_tokens,
            sequence=options.sequence,
            micro_batch_tokens=options.micro_batch_tokens,
            rounds=options.rounds,
            saves=options.saves,
            threads=options.threads,
            dtype=options.dtype,
            precision_aware=options.precision_aware,
        )
    )
    if stats is not None:
        command = " ".join(["benchmarks/checkpoint.py", *sys.argv[1:]])
        print(json.dumps({"command": command} | stats | {"versions": versions()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
