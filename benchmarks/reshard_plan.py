"""The plan of a weight transfer between a trainer and engines of any size, made on this machine, in figures."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec, load_model_spec
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.reshard.plan.aliases import find_aliases
from engine3d.reshard.plan.planner import make_plan
from engine3d.reshard.plan.stats import plan_stats

MODELS = Path(__file__).parent / "models"
"""Configs of published models, without weights."""

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
EngineRanks = list[tuple[tuple[Buffer, ...], tuple[Holding, ...]]]
"""Buffers of each rank of one engine, and what they hold."""

Trace = Callable[[dict[str, Any], Tensors, int, int], EngineRanks]
"""Function of a model's config, its tensors, tp and ep."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Engines of tp ranks each, with the experts cut over ep groups of them."""

    tp: int = 1
    ep: int = 1
    engines: int = 1
    hosts: int = 1
    """Hosts of each engine: where transfers are made, parts of it on this machine."""

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.engines, self.hosts) < 1 or self.tp % self.ep or self.tp % self.hosts:
            raise UserError(
                f"--rollout: tp={self.tp},ep={self.ep},engines={self.engines},hosts={self.hosts}: "
                "expected numbers of at least 1, with ep and hosts divisors of tp"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.engines


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of ranks to GPUs.

    Args:
        gpus_per_node: of every node.
        colocated: the engines' ranks are on the trainer's GPUs in order; else on the nodes after the trainer's.
    """

    gpus_per_node: int = 8
    colocated: bool = False

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise UserError(f"--gpus-per-node: expected a whole number of at least 1, found {self.gpus_per_node}")

    def trainer(self, rank: int) -> Location:
        return self._location(0, rank)

    def engine(self, rank: int, trainer_ranks: int) -> Location:
        nodes = -(-trainer_ranks // self.gpus_per_node)
        return self._location(0 if self.colocated else nodes, rank)

    def _location(self, first_node: int, rank: int) -> Location:
        node, gpu = divmod(rank, self.gpus_per_node)
        return Location(f"node {first_node + node}", f"gpu {gpu}")


class Parser(argparse.ArgumentParser):
    """Parser of a benchmark's arguments. Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def named_model(name: str) -> ModelSpec:
    """A model of `benchmarks/models` by name, or of a directory with a config.json.

    Raises:
        UserError: neither is there.
    """
    known = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
    if name in known:
        return load_model_spec(MODELS / name)
    path = Path(name)
    directory = path.parent if path.name == "config.json" else path
    if not (directory / "config.json").is_file():
        raise UserError(f"--model: {name} is neither a directory with a config.json nor one of {', '.join(known)}")
    return load_model_spec(directory)


def parse_layout(text: str) -> Layout:
    """A trainer's layout from such as "tp=1,pp=16,ep=32,dp=32"."""
    sizes: dict[str, Any] = _sizes("--train", text, ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"))
    return Layout(**sizes)


def parse_rollout(text: str) -> Rollout:
    """Engines from such as "tp=32,ep=32,engines=8,hosts=4"."""
    return Rollout(**_sizes("--rollout", text, ("tp", "ep", "engines", "hosts")))


def _sizes(option: str, text: str, names: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name not in names or name in sizes or not value.isdecimal():
            raise UserError(
                f"{option}: found {setting!r}, expected name=number with each name once, of {', '.join(names)}"
            )
        sizes[name] = int(value)
    return sizes


def trace_with_sglang(hf_config: dict[str, Any], tensors: Tensors, tp: int, ep: int) -> EngineRanks:
    """Trace where SGLang's own loader puts each tensor."""
    from engine3d.reshard.describe.simulate import trace_engine_layout

    traces = trace_engine_layout(hf_config, tensors, tp, ep, torch.bfloat16)
    return [(trace.buffers, trace.holdings) for trace in traces]


def import_sglang(hf_config: dict[str, Any]) -> None:
    """Import all that a trace of the model needs, which takes longer than the trace: one layer of it is built."""
    import sglang.srt.layers.sampler  # noqa: F401  before `engine_rank` makes torch's logger ask for a rank

    from engine3d.reshard.describe.simulate import build_model, engine_rank

    with engine_rank(1, 1, 0):
        build_model({**hf_config, "num_hidden_layers": 1}, torch.bfloat16, "meta")


def plan_figures(
    spec: ModelSpec, layout: Layout, rollout: Rollout, placement: Placement, trace: Trace = trace_with_sglang
) -> dict[str, Any]:
    """The figures of a plan for bf16 weights, with the CPU seconds that making it took, imports not counted.

    Raises:
        UserError: the layouts do not fit the model, or the engines have more ranks than the trainer whose GPUs they
            share.
    """
    spec.check_layout(layout)
    if placement.colocated and rollout.ranks > layout.world_size:
        raise UserError(
            f"--colocated: the engines' {rollout.tp}*{rollout.engines} = {rollout.ranks} ranks are more than "
            f"the trainer's {layout.world_size}"
        )
    if trace is trace_with_sglang:
        import_sglang(spec.hf_config)
    started = time.process_time()
    spec = spec.of_trainer(layout, transformer_engine=True)
    tensors = {
        name: (tensor.shape, torch.float32 if tensor.buffer else torch.bfloat16)
        for name, tensor in spec.hf_tensors.items()
    }
    planned = PlannedTrainer(spec, layout, torch.bfloat16)
    sources = [planned.shards(rank, placement.trainer(rank)) for rank in range(layout.world_size)]
    shards_done = time.process_time()
    ranks = trace(spec.hf_config, tensors, rollout.tp, rollout.ep)
    trace_done = time.process_time()
    targets = []
    for number in range(rollout.ranks):
        engine, rank = divmod(number, rollout.tp)
        location = placement.engine(number, layout.world_size)
        target = RankShards(f"engine {engine} rank {rank}", number, location, *ranks[rank])
        targets.append(replace(target, aliases=find_aliases(sources, target)))
    aliases_done = time.process_time()
    plan = make_plan(sources, targets, {name: shape for name, (shape, _) in tensors.items()})
    done = time.process_time()
    return {
        "parameters": spec.parameter_count(),
        "train_ranks": layout.world_size,
        "rollout_ranks": rollout.ranks,
        **plan_stats(plan, sources, targets, tensors),
        "plan_seconds": round(done - started, 3),
        "plan_seconds_of_shards": round(shards_done - started, 3),
        "plan_seconds_of_trace": round(trace_done - shards_done, 3),
        "plan_seconds_of_aliases": round(aliases_done - trace_done, 3),
        "plan_seconds_of_plan": round(done - aliases_done, 3),
    }


def versions() -> dict[str, str]:
    packages = ("torch", "megatron-core", "sglang", "transformers", "numpy")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
