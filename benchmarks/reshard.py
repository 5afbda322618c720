"""Speed of weight transfers from Megatron-Core to SGLang, and their bytes.

    python benchmarks/reshard.py --plan-only --model deepseek-v3 --train pp=16,ep=32,dp=32 \\
        --rollout tp=32,ep=32,engines=8

prints one JSON object on stdout: the figures of the plan (engine3d/reshard/plan/stats.py says what each is), made
from shapes alone. Without --plan-only the transfers are made, on the GPUs of this machine or on CPU slots:

    python benchmarks/reshard.py --model qwen3-30b-a3b --train tp=2,pp=2,ep=2 --rollout tp=4,engines=1 --colocated \
        --ways one_sided,collective,baseline
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import (
    Parser,
    Placement,
    Rollout,
    named_model,
    parse_layout,
    parse_rollout,
    plan_figures,
    versions,
)
from benchmarks.reshard_run import WAYS, Case, measure
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.models.precision import check_shards
from engine3d.platform import platform


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="reshard.py", description="Weight transfer from Megatron-Core to SGLang.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--train", required=True, help="sizes of the trainer, such as tp=1,pp=16,ep=32,dp=32")
    parser.add_argument("--rollout", required=True, help="sizes of the engines, such as tp=32,ep=32,engines=8")
    parser.add_argument("--colocated", action="store_true", help="the engines are on the trainer's GPUs")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--plan-only", action="store_true", help="figures of the plan, from shapes alone")
    parser.add_argument("--ways", default="one_sided,collective,baseline", help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--repeats", type=int, default=10, help="transfers of each way; the median counts")
    parser.add_argument("--warm-ups", type=int, default=2, help="transfers of each way before those")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--precision", choices=("fp8",), help="of quantised weights of the engines")
    parser.add_argument("--layers", type=int, help="of the model, where not all of them fit")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where the export for the proof lies")
    parser.add_argument("--no-verify", action="store_true", help="do not compare what arrives with an export")
    try:
        options = parser.parse_args(arguments)
        placement = Placement(options.gpus_per_node, options.colocated)
        layout, rollout = parse_layout(options.train), parse_rollout(options.rollout)
        spec = named_model(options.model)
        with redirect_stdout(sys.stderr):
            if options.plan_only and rollout.hosts > 1:
                raise UserError("--rollout: hosts with --plan-only, whose engines are where --gpus-per-node says")
            if options.plan_only and options.precision:
                raise UserError("--plan-only: plans weights in bfloat16; expected no --precision")
            if options.plan_only:
                stats = plan_figures(spec, layout, rollout, placement)
            else:
                stats = _measured(options, spec, layout, rollout)
    except UserError as error:
        print(f"reshard.py: {error}", file=sys.stderr)
        return 2
    described = {
        "model": options.model,
        "train": str(layout),
        "rollout": options.rollout,
        "colocated": options.colocated,
        "gpus_per_node": options.gpus_per_node,
        "layers": options.layers or spec.sizes.layers,
        "precision": options.precision,
    }
    print(json.dumps(described | stats | {"versions": versions()}, indent=2))
    return 0


def _measured(options: argparse.Namespace, spec: ModelSpec, layout: Layout, rollout: Rollout) -> dict[str, Any]:
    ways = tuple(options.ways.split(","))
    if options.precision is not None:
        check_shards(spec, layout, transformer_engine=platform.has_transformer_engine)
    if unknown := [way for way in ways if way not in WAYS]:
        raise UserError(f"--ways: {unknown[0]} is not one of {', '.join(WAYS)}")
    if options.precision is not None and (shared := {"share", "baseline"} & set(ways)):
        raise UserError(f"--ways: {min(shared)} with --precision, whose engines use no memory of the trainer's")
    assert spec.directory is not None
    with tempfile.TemporaryDirectory() as scratch:
        layers = {"num_hidden_layers": options.layers} if options.layers else {}
        (Path(scratch) / "config.json").write_text(json.dumps(dict(spec.hf_config) | layers))
        return _measured_case(options, Path(scratch), layout, rollout, ways)


def _measured_case(
    options: argparse.Namespace, model: Path, layout: Layout, rollout: Rollout, ways: tuple[str, ...]
) -> dict[str, Any]:
    case = Case(
        model=model,
        train=layout,
        tp=rollout.tp,
        ep=rollout.ep,
        engines=rollout.engines,
        hosts=rollout.hosts,
        colocated=options.colocated,
        ways=ways,
        repeats=options.repeats,
        warm_ups=options.warm_ups,
        dtype=options.dtype,
        scratch=options.scratch,
        verify=not options.no_verify,
        precision=options.precision,
    )
    return {"command": " ".join(["python", *sys.argv]), **measure(case)}


if __name__ == "__main__":
    sys.exit(main())
