"""Predicted traffic of a rank against the collectives of real updates."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from engine3d.layout import Layout
from engine3d.memory.traffic import MicroBatchTraffic, micro_batch_traffic, update_traffic
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from tests.engine3d.checkpoint.writing.test_save import build_engine
from tests.support import tiny_families
from tests.support.distributed import run_distributed

GATHERS = {"moe_token_dispatcher_type": "allgather"}
CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [
        ("qwen3_moe", {"tp": 2}, {}),
        ("qwen3_moe", {"tp": 2}, {"recompute": "full"}),
        ("qwen3_moe", {"tp": 2}, {"recompute": "full", "recompute_layers": 1}),
        ("deepseek_v3", {"tp": 2}, {}),
        ("qwen3_moe", {"ep": 2}, {}),
        ("qwen3_moe", {"ep": 2}, {"recompute": "full"}),
        ("qwen3_moe", {"pp": 2}, {}),
        ("qwen3_moe", {"pp": 2, "vpp": 2}, {}),
    ],
    4: [
        ("qwen3_moe", {"tp": 2, "pp": 2}, {}),
        ("deepseek_v3", {"tp": 2, "ep": 2}, {}),
    ],
}
TOKENS = 64


@dataclass(frozen=True)
class _Sent:
    """Bytes that a rank sent in an update, and the predicted ones.

    Args:
        measured, predicted: of the micro-batch.
        of_update, predicted_of_update: to ranks with the same parameters.
        rows, even_rows: rows of its tokens for experts of other ranks, and as many if loads were even.
    """

    measured: MicroBatchTraffic
    predicted: MicroBatchTraffic
    of_update: float
    predicted_of_update: float
    rows: int
    even_rows: float


class _Collectives(TorchDispatchMode):
    """Bytes that this rank sends by kind of operation, of floating-point tensors with at least a value a token."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = func._schema.name.split("::")[1]
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if tensors and all(tensor.is_floating_point() for tensor in tensors):
                self.sent[kind] += self._bytes(kind, tensors, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _bytes(kind: str, tensors: list[torch.Tensor], args: Any) -> int:
        sizes = sorted(tensor.numel() * tensor.element_size() for tensor in tensors)
        if "allgather" in kind or "reduce_scatter" in kind:
            return sizes[-1] - sizes[0]  # the complete tensor but for a rank's own share of it
        if kind == "alltoall_base_":
            splits, rank = args[4], dist.get_rank()
            group = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[2]))
            rows = sum(count for index, count in enumerate(splits) if group[index] != rank)
            sent = tensors[1]
            return rows * (sent.numel() // max(1, len(sent))) * sent.element_size()
        return sum(sizes) if kind == "send" else 0


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
    return -(outputs.logprobs * columns["weights"]).sum(), None


def _updates(directory: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[_Sent]:
    """One update of each case, on one micro-batch a data-parallel rank."""
    return [_update(directory / family, sizes, settings) for family, sizes, settings in cases]


def _update(directory: Path, sizes: dict[str, Any], settings: dict[str, Any]) -> _Sent:
    from engine3d.models.experts.router import Router

    layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **sizes)
    engine = build_engine(directory, sizes, micro_batch_tokens=TOKENS, **settings)
    generator = torch.Generator().manual_seed(engine.coordinates.dp)
    samples = [torch.randint(0, 60, (TOKENS // 2,), generator=generator).tolist() for _ in range(2)]
    sequences = Sequences.of(samples, weights=torch.full((TOKENS,), 1 / TOKENS))
    group = torch.distributed.get_process_group_ranks(_expert_group())
    rows = 0

    def count(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        nonlocal rows
        for index, routing in enumerate(output[1].chunk(len(group), dim=1)):
            rows += int(routing.sum()) if group[index] != dist.get_rank() else 0

    routers = [module for module in engine.module.modules() if isinstance(module, Router)]
    engine.update(sequences, _loss)
    hooks = [router.register_forward_hook(count) for router in routers]
    with _Collectives() as collectives:
        engine.update(sequences, _loss)
    for hook in hooks:
        hook.remove()
    sent = collectives.sent
    spec, config, at = engine.spec, engine.config, engine.coordinates
    engine.close()
    even = len(routers) * TOKENS / layout.tp * spec.sizes.experts_per_token * (layout.ep - 1) / layout.ep
    return _Sent(
        MicroBatchTraffic(
            tp=sent["_allgather_base_"] + sent["_reduce_scatter_base_"],
            ep=sent["alltoall_base_"],
            cp=0.0,
            pp=sent["send"],
        ),
        micro_batch_traffic(spec, layout, at, config, tokens=TOKENS, transformer_engine=False),
        sent["allgather_into_tensor_coalesced_"] + sent["reduce_scatter_tensor_coalesced_"],
        update_traffic(spec, layout, at, config, transformer_engine=False),
        rows,
        even,
    )


def _expert_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in ("qwen3_moe", "deepseek_v3"):
        tiny_families.make(name, directory / name)
    return directory


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_predicted_bytes_are_those_of_an_update(models: Path, world_size: int) -> None:
    cases = CASES[world_size]
    ranks = run_distributed(_updates, world_size, models, cases, timeout_s=300)
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        for result in results:
            assert result.measured.tp == result.predicted.tp, case
            assert result.measured.pp == result.predicted.pp, case
            assert result.of_update == result.predicted_of_update, case
        # Loads are not even. What the ranks send together follows the rows of all.
        rows, even_rows = (sum(getattr(result, name) for result in results) for name in ("rows", "even_rows"))
        measured, predicted = (
            sum(getattr(result, name).ep for result in results) for name in ("measured", "predicted")
        )
        if even_rows:
            forwards = 2 if case[2].get("recompute") == "full" else 1
            assert measured == pytest.approx(predicted * rows / forwards / even_rows), case
        else:
            assert measured == predicted == 0, case


def _columns(results: list[_Sent]) -> tuple[list[MicroBatchTraffic], list[MicroBatchTraffic]]:
    return [result.measured for result in results], [result.predicted for result in results]


def test_keys_and_values_go_around_a_ring() -> None:
    spec = tiny_spec()
    layout = Layout(tp=2, cp=4)
    sent = micro_batch_traffic(spec, layout, layout.coordinates(0), TrainConfig(), tokens=40)
    assert sent.cp == 4 * 3 * 10 * 3 * (2 * 16) * 2  # layers, ranks, tokens, passes, a key and a value head, bf16
    alone = micro_batch_traffic(spec, Layout(tp=2), layout.coordinates(0), TrainConfig(), tokens=10)
    assert sent.tp == alone.tp and alone.cp == 0


def test_experts_that_gather_tokens_send_more_than_all_to_all_on_many_ranks() -> None:
    spec = tiny_spec()
    config = TrainConfig(layout=LayoutConfig(ep=8), megatron=GATHERS)
    layout = Layout(ep=8, dp=8)
    at = layout.coordinates(0)
    gathered = micro_batch_traffic(spec, layout, at, config, tokens=10).ep
    assert gathered == 10 * 3 * 7 * 5 * 32 * 2  # three layers of experts, bf16
    exchanged = micro_batch_traffic(spec, layout, at, TrainConfig(layout=LayoutConfig(ep=8)), tokens=10).ep
    assert exchanged == 10 * 3 * spec.sizes.experts_per_token * 7 / 8 * (4 * 32 * 2 + 8)


def tiny_spec() -> Any:
    from engine3d.models import model_spec

    return model_spec(tiny_families.CONFIGS["qwen3_moe"])
