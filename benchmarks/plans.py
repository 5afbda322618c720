"""Plan of a large run from shapes alone: layout, memory of each pipeline stage, seconds of an update and of a transfer.

    python benchmarks/plans.py --model deepseek-v3 --gpus 512 --tokens 131072 > plan.json

gives half of the GPUs to the trainer and half to the engines, proposes a layout of the trainer for sequences of that
length (`hybridflow/planning/search/layouts.py`), makes the plan of the weight transfer, and prints one line of JSON. It
takes no weights and no GPU. Several numbers of GPUs and tokens, such as `--gpus 64,256`, are a plan and a line for each
pair. What does not fit is a line with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import (
    EngineRanks,
    Parser,
    Placement,
    Rollout,
    Tensors,
    Trace,
    import_sglang,
    named_model,
    parse_layout,
    parse_rollout,
    plan_figures,
    trace_with_sglang,
    versions,
)
from engine3d.errors import UserError
from engine3d.memory.overhead import CONTEXT_BYTES, DRIVER_BYTES, engine_workspace
from engine3d.memory.serving import absorbed_weights, cache_of_a_token
from engine3d.models import ModelSpec
from engine3d.training.config import OptimizerConfig, TrainConfig
from hybridflow.planning.search.layout_memory import USED_SHARE, StageMemory
from hybridflow.planning.search.layouts import LayoutSearch, Proposal
from hybridflow.planning.time.hardware import Hardware, load_profile
from hybridflow.planning.time.training import Batch

_BF16 = 2
_ENGINE_SHARE = 0.6
"""Share of a GPU's memory that an engine's weights may take where `--rollout` does not say how they are sharded."""

_REQUESTS = 64
"""Requests that an engine runs at once."""

_CONFIG = TrainConfig(optimizer=OptimizerConfig(precision_aware=True, offload=True), logits_tokens=4096)


def main(arguments: list[str] | None = None, trace: Trace = trace_with_sglang) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="plans.py", description="Plan of a large run, from shapes alone.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--gpus", type=_numbers, required=True, help="of trainer and engines together")
    parser.add_argument("--colocated", action="store_true", help="trainer and engines each on all GPUs")
    parser.add_argument("--tokens", type=_numbers, required=True, help="of the longest sequence, prompt and response")
    parser.add_argument("--update-tokens", type=int, default=2**25, help="of an update, over all ranks")
    parser.add_argument("--train", help="sizes of the trainer, such as tp=2,cp=8,pp=8,vpp=2,ep=8; searched if left out")
    parser.add_argument("--recompute", default="full", choices=("none", "selective", "full"), help="with --train")
    parser.add_argument("--rollout", help="sizes of the engines, such as tp=16,ep=16,engines=32")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-gb", type=float, default=141.0, help="memory of a GPU, in 1e9 bytes")
    parser.add_argument("--node-gb-s", type=float, default=390.0, help="of a GPU to others of its node, one way")
    parser.add_argument("--network-gb-s", type=float, default=45.0, help="of a GPU to other nodes, one way")
    try:
        options = parser.parse_args(arguments)
        for option in ("update_tokens", "gpus_per_node", "gpu_gb", "node_gb_s", "network_gb_s"):
            if getattr(options, option) <= 0:
                name = option.replace("_", "-")
                raise UserError(f"--{name}: expected a number above 0, found {getattr(options, option)}")
        spec = named_model(options.model)
        hardware = replace(
            load_profile("h200").hardware,
            memory=round(options.gpu_gb * 1e9),
            gpus_per_node=options.gpus_per_node,
            node_rate=options.node_gb_s * 1e9,
            network_rate=options.network_gb_s * 1e9,
        )
        trace, pairs = _once(trace), list(product(options.gpus, options.tokens))
        for gpus, tokens in pairs:
            described = {"model": options.model, "gpus": gpus, "tokens": tokens, "colocated": options.colocated}
            batch = Batch(max(1, options.update_tokens // tokens), tokens)
            try:
                with redirect_stdout(sys.stderr):
                    described |= _planned(options, spec, hardware, gpus, batch, trace)
            except UserError as error:
                if len(pairs) == 1:
                    raise
                described |= {"refused": str(error)}
            print(json.dumps(described | {"assumed": asdict(hardware), "versions": versions()}), flush=True)
    except UserError as error:
        print(f"plans.py: {error}", file=sys.stderr)
        return 2
    return 0


def _once(trace: Trace) -> Trace:
    """Keep the trace of engines of the same sizes: all plans are of one model."""
    traced: dict[tuple[int, int], EngineRanks] = {}

    def cached(hf_config: dict[str, Any], tensors: Tensors, tp: int, ep: int) -> EngineRanks:
        if not traced and trace is trace_with_sglang:
            import_sglang(hf_config)
        if (tp, ep) not in traced:
            traced[tp, ep] = trace(hf_config, tensors, tp, ep)
        return traced[tp, ep]

    return cached


def _numbers(text: str) -> list[int]:
    numbers = [int(number) if number.isdecimal() else 0 for number in text.split(",")]
    if not all(numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers above 0, found {text!r}")
    return numbers


def _planned(
    options: argparse.Namespace, spec: ModelSpec, hardware: Hardware, gpus: int, batch: Batch, trace: Trace
) -> dict[str, Any]:
    share = gpus if options.colocated else gpus // 2
    engines = parse_rollout(options.rollout) if options.rollout else _engines(spec, share, hardware)
    # Engines keep their weights while the trainer computes: stages of other nodes cannot write into released memory.
    beside = _BF16 * spec.parameter_count() // engines.tp if options.colocated else 0
    search = LayoutSearch(spec, _CONFIG, hardware)
    if options.train is None:
        proposal = search.best(share, batch, beside)
    else:
        config = _CONFIG.model_copy(update={"recompute": options.recompute})
        proposal = _given(search, config, batch, share, options.train)
    placement = Placement(hardware.gpus_per_node, colocated=options.colocated)
    transfer = plan_figures(spec, proposal.layout, engines, placement, trace)
    weights = transfer["bytes_held"] // engines.ranks
    return {
        "parameters": spec.parameter_count(),
        "max_positions": spec.sizes.max_positions,
        "train": str(proposal.layout),
        "rollout": f"tp={engines.tp},ep={engines.ep},engines={engines.engines}",
        "update": _update(search, proposal),
        "memory": _memory(search, proposal, hardware),
        "engine": _engine(spec, engines, proposal.heaviest if options.colocated else None, hardware, weights),
        "transfer": _transfer(transfer, hardware),
    }


def _given(search: LayoutSearch, config: TrainConfig, batch: Batch, gpus: int, train: str) -> Proposal:
    """Return the layout that was given, if it fits or not."""
    layout = parse_layout(train)
    search.spec.check_layout(layout)
    if layout.world_size != gpus:
        raise UserError(f"--train: {layout} has {layout.world_size} ranks, expected the trainer's {gpus} GPUs")
    cost = search.costs.update(layout, config, batch)
    return Proposal(layout, config, batch, cost, search.memory.heaviest(layout, config, batch))


def _engines(spec: ModelSpec, gpus: int, hardware: Hardware) -> Rollout:
    """Choose engines of as few ranks as hold the model."""
    tp = 1
    while _BF16 * spec.parameter_count() / tp > _ENGINE_SHARE * hardware.memory:
        tp *= 2
    if tp > gpus:
        raise UserError(f"{gpus} GPUs for engines: expected at least {tp}, which an engine's weights need")
    return Rollout(tp=tp, ep=tp if spec.sizes.experts else 1, engines=gpus // tp)


def _update(search: LayoutSearch, proposal: Proposal) -> dict[str, Any]:
    batch, cost = proposal.batch, proposal.cost
    tokens = batch.sequences * batch.tokens
    return {
        "sequences": batch.sequences,
        "sequences_of_a_micro_batch": batch.together,
        "micro_batches": batch.micro_batches(proposal.layout),
        "recompute": proposal.config.recompute,
        "seconds": round(cost.seconds, 3),
        "seconds_of": {name: round(seconds, 3) for name, seconds in asdict(cost).items()},
        "tokens_per_gpu_s": round(tokens / cost.seconds / proposal.layout.world_size, 1),
        "mfu": round(search.costs.utilisation(proposal.layout, cost, batch), 3),
    }


def _memory(search: LayoutSearch, proposal: Proposal, hardware: Hardware) -> dict[str, Any]:
    """Count the bytes of a rank of each stage at the peak of an update, and of a node's memory."""
    layout = proposal.layout
    stages = [search.memory.stage(layout, stage, proposal.config, proposal.batch) for stage in range(layout.pp)]
    heaviest = max(stages, key=lambda stage: stage.total)
    return {
        "heaviest_stage": heaviest.stage,
        "fits": heaviest.total <= USED_SHARE * hardware.memory,
        "bytes": heaviest.total,
        "host_bytes_of_a_node": min(hardware.gpus_per_node, layout.world_size)
        * max(stage.resident.offloaded for stage in stages),
        "stages": [
            {
                "layers": [len(chunk) for chunk in search.spec.rules.rank_layers(layout, stage.stage)],
                "bytes": stage.total,
                "weights": stage.resident.weights,
                "gradients": stage.resident.gradients,
                "optimizer_on_gpu": stage.resident.optimizer - stage.resident.offloaded,
                "activations": stage.working.activations,
                "logits": stage.working.logits,
                "layer": stage.working.layer,
                "overhead": stage.overhead,
            }
            for stage in stages
        ],
    }


def _engine(
    spec: ModelSpec, engines: Rollout, beside: StageMemory | None, hardware: Hardware, weights: int
) -> dict[str, Any]:
    """Count the bytes of an engine's rank, and the tokens of KV cache that fit next to them and to a trainer's rank."""
    weights += absorbed_weights(spec.sizes, engines.tp, _BF16)
    of_token = cache_of_a_token(spec.sizes, engines.tp, _BF16)
    others = DRIVER_BYTES + CONTEXT_BYTES if beside is None else beside.staying
    workspace = engine_workspace(
        requests=_REQUESTS, vocabulary=spec.vocab_size, layers=spec.sizes.layers, graphs=_REQUESTS // 2, tp=engines.tp
    )
    left = USED_SHARE * hardware.memory - others - workspace - weights
    return {
        "weights": weights,
        "workspace": workspace,
        "cache_of_a_token": of_token,
        "cache_tokens": max(0, int(left // of_token)),
    }


def _transfer(plan: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """Count the bytes of a weight transfer, and the seconds of the busiest rank at the rates of its links."""
    network, within = plan["max_rank_network_bytes"], plan["max_rank_bytes"] - plan["max_rank_network_bytes"]
    names = ("held", "aliased", "moved", "same_device", "same_node", "between_nodes")
    return {
        "seconds": round(max(network / hardware.network_rate, within / hardware.node_rate), 3),
        **{f"bytes_{name}": plan[f"bytes_{name}"] for name in names},
        **{name: plan[name] for name in ("max_rank_bytes", "max_rank_network_bytes", "transfers", "pieces")},
        "plan_seconds": round(plan["plan_seconds"] - plan["plan_seconds_of_trace"], 3),
    }


if __name__ == "__main__":
    sys.exit(main())
