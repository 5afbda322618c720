"""The plan of a checkpoint on any number of ranks, made on this machine, in figures."""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

from engine3d.checkpoint.writing.plan import plan_checkpoint
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec


def plan_figures(
    spec: ModelSpec, layout: Layout, *, gpus_per_node: int = 8, precision_aware: bool = False, threads: int = 4
) -> dict[str, Any]:
    """The figures of a plan, with the CPU seconds that making it took.

    Args:
        spec: the model.
        layout: of the trainer.
        gpus_per_node: ranks that share a host's memory.
        precision_aware: moments in bf16, not fp32.
        threads: that write on each rank.

    Raises:
        UserError: the layout does not fit the model, or a number is below 1.
        EngineError: the plan does not add up, or a rank writes or reads more than its share.
    """
    for option, value in (("--gpus-per-node", gpus_per_node), ("--threads", threads)):
        if value < 1:
            raise UserError(f"{option}: expected a whole number of at least 1, found {value}")
    started = time.process_time()
    plan = plan_checkpoint(spec, layout, precision_aware=precision_aware, threads=threads)
    seconds = time.process_time() - started
    ranks = plan.ranks
    nodes = plan.node_host(gpus_per_node)
    return {
        "parameters": spec.parameter_count(),
        "ranks": len(ranks),
        "nodes": len(nodes),
        "state_bytes": plan.state,
        "bytes_written": sum(rank.written for rank in ranks),
        "bytes_read": sum(rank.read for rank in ranks),
        **_spread("rank_state_bytes", [rank.state for rank in ranks]),
        **_spread("rank_bytes_written", [rank.written for rank in ranks]),
        **_spread("rank_bytes_read", [rank.read for rank in ranks]),
        "max_written_of_state": round(max(rank.written / rank.state for rank in ranks), 6),
        "max_read_of_state": round(max(rank.read / rank.state for rank in ranks), 6),
        "max_host_of_state": round(max(rank.host / rank.state for rank in ranks), 6),
        "files": sum(rank.files for rank in ranks),
        "max_rank_files": max(rank.files for rank in ranks),
        "pieces": sum(rank.chunks for rank in ranks),
        "max_rank_pieces": max(rank.chunks for rank in ranks),
        **_spread("rank_host_bytes", [rank.host for rank in ranks]),
        **_spread("node_host_bytes", nodes),
        "plan_seconds": round(seconds, 3),
    }


def _spread(name: str, values: list[int]) -> dict[str, int]:
    return {f"max_{name}": max(values), f"mean_{name}": round(fmean(values))}
