"""The plan of a checkpoint is what the ranks of a real optimizer hold, and adds up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.checkpoint.writing.plan import CheckpointPlan, RankPlan, plan_checkpoint
from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, load_model_spec, model_spec
from tests.support.distributed import run_distributed
from tests.support.tiny_families import CONFIGS, DEEPSEEK, MOE, has_experts

LAYOUTS = [Layout(tp=2), Layout(ep=2, dp=2), Layout(pp=2, vpp=2), Layout(dp=2)]
MODELS = ("deepseek_v3", "qwen3-tied", "qwen3_moe-biases")
CASES = {
    2: [(name, layout) for layout in LAYOUTS for name in MODELS if layout.ep == 1 or has_experts(name)],
    4: [
        ("qwen3-tied", Layout(pp=2, dp=2, stages=(1, 3))),
        ("deepseek_v3", Layout(tp=2, ep=2, dp=2)),
        ("deepseek_v3", Layout(cp=2, ep=2, dp=2)),
    ],
}


@dataclass(frozen=True)
class _Real:
    """Bytes that a rank's optimizer has to write and to read, writes of each element, and a real save."""

    written: int
    read: int
    times: dict[str, torch.Tensor]
    saved: int
    host: int
    files: int


@pytest.mark.processes
@pytest.mark.parametrize("world_size", CASES)
def test_ranks_write_and_read_what_their_optimizer_has(tmp_path: Path, world_size: int) -> None:
    for name in MODELS:
        initialise_random(model_spec(CONFIGS[name]), tmp_path / name, seed=1, dtype=torch.float32)
    by_rank = run_distributed(_saved_by_all, world_size, tmp_path, world_size, timeout_s=240)
    for name, layout in CASES[world_size]:
        spec = load_model_spec(tmp_path / name)
        plan = plan_checkpoint(spec, layout, transformer_engine=torch.cuda.is_available())
        ranks: list[_Real] = [rank[name, str(layout)] for rank in by_rank]
        for planned, real in zip(plan.ranks, ranks, strict=True):
            assert (planned.written, planned.read) == (real.written, real.read), (name, layout)
            assert (planned.written, planned.files) == (real.saved, real.files), (name, layout)
            # Each copy begins on a multiple of a few bytes.
            assert planned.host <= real.host < planned.host + 64 * planned.chunks, (name, layout)
        for tensor, shape in ((tensor.name, tensor.shape) for tensor in spec.hf_tensors.values()):
            # Each element by one rank, once.
            times = torch.stack([real.times.get(tensor, torch.zeros(shape)) for real in ranks]).sum(dim=0)
            assert torch.equal(times, torch.ones(shape)), (name, layout, tensor)


def _saved_by_all(directory: Path, world_size: int) -> dict[tuple[str, str], _Real]:
    from engine3d.checkpoint.writing.save import EngineCheckpoint
    from engine3d.training.config import TrainConfig
    from engine3d.training.engine import TrainEngine
    from engine3d.training.passes.sequences import Sequences

    def loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return outputs.logprobs.sum(), None

    saved = {}
    for name, layout in CASES[world_size]:
        engine = TrainEngine(directory / name, TrainConfig(dtype="bfloat16"), layout)
        engine.update(Sequences.of([[5, 6, 7], [8, 9]]), loss)  # only then there are moments
        checkpoint = EngineCheckpoint(engine)
        role = directory / f"{name} {layout}"
        role.mkdir(exist_ok=True)
        begun = checkpoint.begin(role, background=True)
        files = [entry.path for entry in checkpoint.finish() if entry.path.endswith(".distcp")]
        saved[name, str(layout)] = _Real(*_written_and_read(engine), begun.nbytes, begun.host_bytes, len(files))
        engine.close()
    return saved


def _written_and_read(engine: Any) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Bytes that this rank's optimizer has to write and to read, and how often each element is written."""
    from engine3d.models.files.weights import rank_parameters

    ranges: dict[Any, Any] = {}
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for by_dtype in optimizer.gbuf_ranges:
            for buckets in by_dtype.values():
                for bucket in buckets:
                    ranges |= {parameter: owned["param"] for parameter, owned in bucket["param_map"].items()}
    written = read = 0
    times: dict[str, torch.Tensor] = {}
    for local, parameter in rank_parameters(engine.module, engine.spec, engine.layout, engine.coordinates):
        owned = torch.zeros(local.shape)
        if local.buffer:
            owned.fill_(1)
        elif parameter in ranges:
            owned.view(-1)[ranges[parameter].start : ranges[parameter].end] = 1
        bytes_each, writes = (4, local.owner) if local.buffer else (12, local.primary)
        for region in local.slices:
            elements = owned[tuple(slice(*side) for side in region.local_box)]
            read += bytes_each * int(elements.sum())
            if writes:
                written += bytes_each * int(elements.sum())
                tensor = times.setdefault(region.hf_name, torch.zeros(engine.spec.hf_shape(region.hf_name)))
                tensor[tuple(slice(*side) for side in region.hf_box)] += elements
    return written, read, times


def test_a_rank_alone_has_everything() -> None:
    spec = model_spec(DEEPSEEK)
    buffers = sum(tensor.shape[0] for tensor in spec.hf_tensors.values() if tensor.buffer)
    assert buffers == 3 * 8
    plan = plan_checkpoint(spec, Layout(), threads=3)
    [rank] = plan.ranks
    assert plan.state == rank.written == rank.read == 12 * spec.parameter_count() + 4 * buffers
    assert rank.files == 3 and rank.chunks == 3 * (len(spec.hf_tensors) - 3) + 3
    assert plan_checkpoint(spec, Layout(), precision_aware=True).state == 8 * spec.parameter_count() + 4 * buffers


def test_copies_of_other_tensor_parallel_ranks_are_read_and_not_written() -> None:
    spec = model_spec(MOE)
    first, second = plan_checkpoint(spec, Layout(tp=2, etp=2)).ranks
    replicated = sum(_replicated(spec))
    assert replicated > 0
    # The first also has a row more of the 97 of the vocabulary's two matrices: 49 and 48.
    assert first.written == first.read == second.read + 12 * 2 * spec.sizes.hidden
    assert second.read - second.written == 12 * replicated


def _replicated(spec: Any) -> list[int]:
    rules = [*spec.rules.first, *(rule for layer in spec.rules.layers for rule in layer), *spec.rules.last]
    return [torch.Size(tensor.shape).numel() for rule in rules if rule.cut.replicated for tensor in rule.cut.tensors]


def test_host_memory_of_nodes_is_that_of_their_ranks() -> None:
    plan = plan_checkpoint(model_spec(MOE), Layout(pp=2, dp=3))
    written = [rank.written for rank in plan.ranks]
    assert [rank.host for rank in plan.ranks] == written
    assert plan.node_host(4) == [sum(written[:4]), sum(written[4:])]


def test_a_plan_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^checkpoint plan: 20 bytes are written of a state of 24$"):
        CheckpointPlan(24, (RankPlan(20, 20, 20, 20),)).check()
    with pytest.raises(EngineError, match=r"^checkpoint plan: rank 1 writes 12 bytes, reads 8 and copies 8 to host"):
        CheckpointPlan(24, (RankPlan(12, 12, 12, 12), RankPlan(8, 12, 8, 8))).check()
    with pytest.raises(EngineError, match=r"^checkpoint plan: rank 0 writes 12 bytes, reads 12 and copies 13 to host"):
        CheckpointPlan(12, (RankPlan(12, 12, 12, 13),)).check()


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"^layout: tp=3: expected a divisor of num_attention_heads=4$"):
        plan_checkpoint(model_spec(MOE), Layout(tp=3))
