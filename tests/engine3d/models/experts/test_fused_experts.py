"""Fused experts against one expert after another, and their layers against Megatron-Core's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from benchmarks.reshard_plan import named_model
from engine3d.errors import EngineError, UserError
from engine3d.layout import Coordinates, Layout
from engine3d.models import build_model, load_model_spec, load_weights
from engine3d.models.experts import row_capacity
from engine3d.models.experts.fused_experts import Weights, fused_experts
from engine3d.models.experts.load_balance import Routing
from engine3d.models.experts.moe_layer import FusedMoELayer, predict_capacity
from engine3d.models.experts.permutation import row_maps
from engine3d.models.experts.router import load_balance
from engine3d.models.experts.row_capacity import PredictedCapacity, RowCapacity
from engine3d.models.experts.token_dispatcher import (
    CopyEngineDispatcher,
    PendingTensor,
    TokenDispatcher,
    copy_engine_dispatcher,
    release,
)
from engine3d.platform import platform
from engine3d.platform.cpu.memory import CpuPeerMemory
from engine3d.platform.peer_memory import Copy
from engine3d.training.config import TrainConfig
from engine3d.training.megatron import parallel
from tests.engine3d.models.experts.test_load_balance import LOSSES
from tests.support import tiny_families
from tests.support.distributed import meet_others, run_distributed

TOKENS, HIDDEN, WIDTH, EXPERTS, TOPK = 10, 16, 24, 4, 2
"""Tokens of a rank, what they are, how wide an expert is, experts over all ranks, experts of a token."""

CASES = {
    "even": [0, 1, 2, 3],
    "some experts without tokens": [0, 3],
    "all of the last rank's experts without tokens": [0, 1],
    "of one expert": [2],
}
"""The experts that tokens choose from."""


def _drawn(world: int, dtype: torch.dtype, chosen: list[int]) -> dict[str, Tensor]:
    """All ranks' tokens, routing and gradients, and all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(len(chosen))
    count = world * TOKENS

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    logits = torch.full((count, EXPERTS), -torch.inf)
    logits[:, chosen] = draw(count, len(chosen))
    routing = torch.zeros(count, EXPERTS, dtype=torch.bool)
    routing.scatter_(1, logits.topk(min(TOPK, len(chosen)), dim=1).indices, True)
    routing[3] = False  # a token without experts
    probabilities = torch.where(routing, draw(count, EXPERTS).sigmoid(), 0.0)
    probabilities[5] = 0.0  # probabilities that underflow still route
    return {
        "hidden": draw(count, HIDDEN).to(dtype),
        "probabilities": probabilities,
        "routing": routing,
        "first": (draw(EXPERTS, 2 * WIDTH, HIDDEN) / 4).to(dtype),
        "last": (draw(EXPERTS, HIDDEN, WIDTH) / 4).to(dtype),
        "gradient": draw(count, HIDDEN).to(dtype),
    }


def _one_by_one(drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """The result and all gradients by autograd, in float64."""
    hidden, probabilities, first, last = (
        drawn[name].double().requires_grad_() for name in ("hidden", "probabilities", "first", "last")
    )
    result = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        gate, up = (hidden @ first[expert].T).chunk(2, dim=1)
        made = (F.silu(gate) * up) @ last[expert].T
        result = result + torch.where(drawn["routing"][:, expert, None], made * probabilities[:, expert, None], 0.0)
    result.backward(drawn["gradient"].double())  # type: ignore[no-untyped-call]
    results = {"result": result.detach(), "hidden": hidden.grad, "probabilities": probabilities.grad}
    return {
        name: tensor
        for name, tensor in (results | {"first": first.grad, "last": last.grad}).items()
        if tensor is not None
    }


def _check_fused(
    chosen: list[int], dtype: torch.dtype, device: str, dispatcher: TokenDispatcher, capacity: RowCapacity | None
) -> None:
    """Assert that this rank's results and gradients are right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = _drawn(world, dtype, chosen)
    expected = _one_by_one(drawn)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    experts = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    hidden, probabilities = (drawn[name][mine].to(device).requires_grad_() for name in ("hidden", "probabilities"))
    values = [drawn[name][experts].to(device) for name in ("first", "last")]
    # What earlier micro-batches left.
    gradients = [torch.ones_like(weight, dtype=torch.float32) for weight in values]
    weights = [
        Weights(value, grown, torch.nn.Parameter(value[0].clone()))
        for value, grown in zip(values, gradients, strict=True)
    ]

    def made(first: Weights, last: Weights) -> Tensor:
        routing = drawn["routing"][mine].to(device)
        return fused_experts(
            hidden,
            probabilities,
            routing,
            first,
            last,
            topk=TOPK,
            dispatcher=dispatcher,
            gathered=dispatcher.gather_ahead(hidden.detach()),
            capacity=capacity,
        )

    if capacity is not None:
        with torch.no_grad():
            made(weights[0], weights[1])  # as many rows as the next ones, which have a larger capacity
        # A rank with all experts predicts nothing.
        assert (capacity.of([1000], 1, 1) is not None) == (world > 1 and bool(drawn["routing"][:, experts].any()))
    result = made(weights[0], weights[1])
    result.backward(drawn["gradient"][mine].to(device))  # type: ignore[no-untyped-call]
    limit = 1e-5 if dtype == torch.float32 else 3e-2

    def alike(actual: Any, name: str, rows: slice) -> None:
        right = expected[name][rows]
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            actual.cpu().double(), right, rtol=limit, atol=limit * scale, msg=lambda m: f"{name}: {m}"
        )

    assert result.dtype == dtype
    alike(result.detach(), "result", mine)
    alike(hidden.grad, "hidden", mine)
    # A probability that no expert sees has no gradient, which autograd's zeros agree with.
    alike(probabilities.grad, "probabilities", mine)
    for name, grown in zip(("first", "last"), gradients, strict=True):
        alike(grown - 1, name, experts)
        idle = [number for number in range(EXPERTS) if number not in chosen]
        for number in idle:
            if experts.start <= number < experts.stop:
                assert torch.equal(grown[number - experts.start], torch.ones_like(grown[0]))
    frozen = [Weights(value, None, torch.nn.Parameter(value[0], requires_grad=False)) for value in values]
    with torch.no_grad():
        assert torch.equal(made(*frozen), result)
    hidden.grad = None
    made(*frozen).backward(drawn["gradient"][mine].to(device))  # type: ignore[no-untyped-call]
    alike(hidden.grad, "hidden", mine)


def _all_cases(device: str) -> None:
    group = meet_others(device)
    dispatchers = [TokenDispatcher(group), copy_engine_dispatcher(group, 60.0)]
    assert isinstance(dispatchers[1], CopyEngineDispatcher) == (group.size() > 1)
    row_capacity.LEAST_TOKENS, row_capacity.LEAST_CHUNKS, row_capacity.MOST_OF_EVEN = 1, 1, 100
    # What nobody has written, such as rows that are of no token, is no number.
    torch.use_deterministic_algorithms(device == "cpu")
    predicted = PredictedCapacity(torch.device(device))
    for dispatcher in dispatchers:
        for chosen in CASES.values():
            for dtype in (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,):
                for capacity in (None, RowCapacity(predicted)):
                    _check_fused(chosen, dtype, device, dispatcher, capacity)
    assert not predicted.overflowed()
    release()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_fused_experts_equal_experts_one_by_one(world: int) -> None:
    run_distributed(_all_cases, world, "cpu", timeout_s=300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [1, 2])
def test_fused_experts_equal_experts_one_by_one_on_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    run_distributed(_all_cases, world, "cuda", timeout_s=300)


def _complete(pending: PendingTensor, value: Tensor | None = None) -> Tensor:
    """The tensor with this rank's local tokens."""
    complete = (pending.value() if value is None else value).clone()
    assert pending.local is not None
    complete[pending.local.first :][: len(pending.local.tokens)] = pending.local.tokens
    return complete


def _compare_dispatchers(device: str) -> None:
    """Assert that copies bring what collective operations do, for tensors that grow, each kept while the next comes."""
    group = meet_others(device)
    mine, ranks = dist.get_rank(), group.size()

    def late() -> None:
        """Half of the ranks read and send later than the others."""
        if mine % 2:
            torch.cuda._sleep(10**7) if device == "cuda" else time.sleep(0.02)

    if device == "cpu":
        copy = CpuPeerMemory.copy

        def copy_late(memory: CpuPeerMemory, copies: Sequence[Copy]) -> Callable[[], None]:
            local = memory.of(mine, (memory.nbytes,), torch.uint8).untyped_storage().data_ptr()
            assert local not in [target.untyped_storage().data_ptr() for target, _ in copies]
            late()
            return copy(memory, copies)

        setattr(CpuPeerMemory, "copy", copy_late)  # noqa: B010
    dispatcher, other = CopyEngineDispatcher(group, 60.0), TokenDispatcher(group)
    dtype = torch.bfloat16
    for tokens in (3, 1, 40, 40, 7):
        generator = torch.Generator().manual_seed(tokens)
        drawn = torch.randn(2, ranks, tokens, 8, generator=generator).to(device, dtype)
        first, last, more = (dispatcher.gather(drawn[number, mine]) for number in (0, 1, 0))
        with pytest.raises(EngineError, match="more than 3 tensors are in flight"):
            dispatcher.gather(drawn[0, mine])
        assert torch.equal(_complete(more), drawn[0].flatten(0, 1))
        more.done()
        given = first.value()
        late()
        given = _complete(first, given)
        first.done()
        assert torch.equal(given, drawn[0].flatten(0, 1))
        partials = torch.randn(ranks, ranks * tokens, 8, generator=generator).to(device, dtype)
        sums = dispatcher.reduce_scatter(partials[mine])
        assert torch.equal(_complete(last), other.gather(drawn[1, mine]).value())
        last.done()
        right = torch.zeros(tokens, 8, device=device)
        for addend in partials.unflatten(1, (ranks, -1))[:, mine]:
            right += addend.float()
        assert torch.equal(sums.value(), right.to(dtype))
        alone = dispatcher.gather(drawn[1, mine])
        assert torch.equal(_complete(alone), drawn[1].flatten(0, 1))
        alone.done()
        target = torch.empty(tokens, 8, dtype=dtype, device=device)
        assert dispatcher.reduce_scatter(partials[mine], target).value() is target
        assert torch.equal(target, right.to(dtype))
    assert dispatcher.nbytes == 3 * ranks * 40 * 8 * dtype.itemsize
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_copies_are_collective_operations(world: int) -> None:
    run_distributed(_compare_dispatchers, world, "cpu", timeout_s=300)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_are_collective_operations_on_gpus() -> None:
    run_distributed(_compare_dispatchers, min(4, torch.cuda.device_count()), "cuda", timeout_s=300)


def _time_copies() -> None:
    """Assert that what is queued after copies does not wait for them, with the one queue that Megatron-Core wants."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    group = meet_others("cuda")
    dispatcher = CopyEngineDispatcher(group, 60.0)
    tokens = torch.zeros(1 << 16, 4096, dtype=torch.bfloat16, device="cuda")  # more than a millisecond
    for _ in range(3):  # the first one takes the memory
        begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        coming = [dispatcher.gather(tokens), dispatcher.gather(tokens)]
        between.record()
        for pending in coming:
            pending.value()
            pending.done()
        end.record()
        torch.cuda.synchronize()
    assert begin.elapsed_time(between) < 0.5 * begin.elapsed_time(end)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_is_queued_after_copies_does_not_wait_for_them() -> None:
    run_distributed(_time_copies, min(4, torch.cuda.device_count()), timeout_s=300)


def _queue_ahead() -> None:
    """Assert that a rank that has all experts queues both passes while its GPU is at work."""
    group = meet_others("cuda")
    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    probabilities = torch.rand(64, EXPERTS, device="cuda")
    routing = torch.zeros(64, EXPERTS, dtype=torch.bool, device="cuda").scatter_(
        1, probabilities.topk(TOPK).indices, True
    )
    values = [torch.randn(EXPERTS, *of, device="cuda", dtype=torch.bfloat16) for of in ((512, 128), (128, 256))]
    first, last = (Weights(value, torch.zeros_like(value), torch.nn.Parameter(value[0].clone())) for value in values)
    for at_work in (False, True):  # the first time kernels are compiled
        torch.cuda.synchronize()
        if at_work:
            torch.cuda._sleep(3_000_000_000)  # cycles: more than a second
        result = fused_experts(
            hidden, probabilities, routing, first, last, topk=TOPK, dispatcher=TokenDispatcher(group)
        )
        result.sum().backward()  # type: ignore[no-untyped-call]
        is_over = torch.cuda.current_stream().record_event()
        assert not at_work or not is_over.query()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rank_with_all_experts_does_not_wait_for_its_gpu() -> None:
    run_distributed(_queue_ahead, 1, timeout_s=300)


def _refuse_two_hosts() -> None:
    group = meet_others("cpu")
    platform.__dict__["node"] = f"host-{dist.get_rank()}"
    with pytest.raises(UserError, match="share experts are on host-0 and on host-1; expected one host, or false"):
        CopyEngineDispatcher(group, 60.0)
    dist.destroy_process_group()


@pytest.mark.processes
def test_copies_need_one_host() -> None:
    run_distributed(_refuse_two_hosts, 2, timeout_s=300)


def test_overflow_is_reported_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_capacity, "LEAST_TOKENS", 4)
    monkeypatch.setattr(row_capacity, "LEAST_CHUNKS", 2)
    capacity = RowCapacity(PredictedCapacity(torch.device("cpu")))
    few, many = torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8)
    few[0, 0] = 0.5
    for scores, rows in ((few, 8), (few, 8), (few, 9), (many, 9)):  # known first, then one more, as for all that follow
        [mapped] = row_maps(scores, 2, capacity=capacity)()
        assert len(mapped.token) == len(mapped.score_index) == rows
        assert int(mapped.ends[-1]) == min(rows, 8 if scores is few else 16) and int(mapped.token_rows.max()) < rows
        assert scores is many or mapped.score_index[8:].tolist() == [16] * (rows - 8)
    assert capacity.predicted.overflow and len(row_maps(many, 2, capacity=capacity)()[0].token) == 16
    assert capacity.of([8], 2, 1.0) is None  # too uneven to have such a capacity for all
    for _ in range(row_capacity.MOST_CHUNKS):
        capacity.observe([8], [8])
    assert capacity.of([8], 2, 1.0) == [9]
    with capacity.predicted.waiting():
        assert len(row_maps(few, 2, capacity=capacity)()[0].token) == 8
    assert len(row_maps(few[:, :, :3].contiguous(), 2, capacity=capacity)()[0].token) == 3  # too few to tell


def test_a_rank_with_all_experts_has_topk_rows_a_token() -> None:
    capacity = RowCapacity(PredictedCapacity(torch.device("cpu")))
    scores = torch.rand(1, 4, 5, generator=torch.Generator().manual_seed(1))
    scores[scores < scores.topk(2, dim=1).values[:, -1:]] = -torch.inf
    for topk, chunks, sizes in ((2, 1, [10]), (2, 2, [6, 4]), (3, 1, [15])):
        maps = row_maps(scores, topk, chunks, capacity, complete=True)()
        assert [len(mapped.token) for mapped in maps] == sizes
        known = row_maps(scores, topk, chunks)()
        for its_rows, its_known in zip(maps, known, strict=True):
            count = len(its_known.token)
            for name in ("token", "score_index", "score"):
                assert torch.equal(getattr(its_rows, name)[:count], getattr(its_known, name)), name
            for name in ("ends", "token_rows", "row_counts"):
                assert torch.equal(getattr(its_rows, name), getattr(its_known, name)), name
            assert its_rows.score_index[count:].tolist() == [scores.numel()] * (len(its_rows.token) - count)
    assert not capacity.predicted.overflow and capacity.of([5000], 2, 2.0) is None


def test_a_router_that_is_no_number_shows() -> None:
    scores = torch.full((1, 2, 3), -torch.inf)
    scores[0, 1, 2] = torch.nan
    assert row_maps(scores, 1)()[0].token.tolist() == [2]


def test_rows_of_chunks_are_those_of_their_tokens_alone() -> None:
    scores = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1))
    scores[scores < 0.4] = -torch.inf
    maps = row_maps(scores, 3, 2)()
    assert [len(chunk.row_counts) for chunk in maps] == [2 * 3, 2 * 2]
    for chunk, its_scores in zip(maps, (scores[:, :, :3], scores[:, :, 3:]), strict=True):
        [alone] = row_maps(its_scores.contiguous(), 3)()
        for name in ("ends", "token", "score", "token_rows", "row_counts"):
            assert torch.equal(getattr(chunk, name), getattr(alone, name)), name
        assert torch.equal(scores.view(-1)[chunk.score_index], chunk.score) and len(chunk.score)


class _Stacked:
    """The weights of experts that Megatron-Core has one by one."""

    def __init__(self, linear: list[Any]) -> None:
        self.values = torch.stack([expert.weight.detach() for expert in linear])
        self.gradients = torch.zeros_like(self.values)
        self.parameter = linear[0].weight

    def together(self, dtype: torch.dtype) -> Weights:
        assert dtype == self.values.dtype
        return Weights(self.values, self.gradients, self.parameter)


def _layers(
    directory: Path,
    layout: Layout,
    coordinates: Coordinates,
    overrides: dict[str, Any],
    copies_s: float | None,
    predicted: PredictedCapacity | None,
) -> None:
    """Assert that a model with fused layers is Megatron-Core's, forward and backward, with losses of routers."""
    spec = load_model_spec(directory)
    model = build_model(spec, layout, torch.float32, overrides=overrides)
    load_weights(model, spec, layout, coordinates, directory)
    generator = torch.Generator().manual_seed(coordinates.dp)
    tokens = torch.randint(spec.vocab_size, (2, 12), generator=generator)
    slope = torch.randn(2, 12, spec.padded_vocabulary(layout) // layout.tp, generator=generator)

    balance = load_balance(model, model.config, spec, layout)
    sequences = torch.tensor([[0] * 5 + [1] * 6 + [-1], [2] * 12], dtype=torch.int32)

    def passed() -> Tensor:
        return model(tokens, torch.arange(12).expand_as(tokens), None, padding_mask=sequences)  # type: ignore[no-any-return]

    def train() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.no_grad(), balance.counting():
            passed()
        with balance.update(tokens=23.0 * layout.dp, sequences=3):
            result = passed()
            (result * slope).sum().backward()
            losses.append(balance.finish())
        return result.detach(), {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    losses: list[Routing] = []
    expected, gradients = train()
    stacked: dict[str, _Stacked] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            module.__class__ = FusedMoELayer
            module.copies_timeout_s = copies_s
            for linear in ("linear_fc1", "linear_fc2"):
                weights = _Stacked([getattr(expert, linear) for expert in module.experts.local_experts])
                setattr(module.experts, linear, weights)
                stacked |= {f"{name}.experts.local_experts.{{}}.{linear}.weight": weights}
    if predicted is not None:
        predict_capacity(model, predicted)  # for as many rows as the pass that counts has
    actual, mine = train()
    if predicted is not None:
        capacities = [module.capacity for module in model.modules() if isinstance(module, FusedMoELayer)]
        assert capacities and all(capacity is not None and capacity.of([1000], 1, 1.0) for capacity in capacities)
        assert not predicted.overflowed()
    for name, weights in stacked.items():
        mine |= {name.format(number): gradient for number, gradient in enumerate(weights.gradients)}
    assert len(stacked) >= 4
    assert losses[0].loads == losses[1].loads and len(set(losses[0].loads[0])) > 1
    for name in ("z", "sequence", "update"):
        assert 0 < getattr(losses[1], name) == pytest.approx(getattr(losses[0], name), rel=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4, msg=partial("{}: {}".format, name))


def _all_layers(directory: Path, ep: int, settings: list[dict[str, Any]]) -> None:
    layout = Layout(ep=ep, dp=ep)
    coordinates = parallel.initialise(layout, seed=1, timeout_s=300)
    row_capacity.LEAST_TOKENS, row_capacity.LEAST_CHUNKS, row_capacity.MOST_OF_EVEN = 1, 1, 100
    between: list[tuple[float | None, PredictedCapacity | None]] = [(None, None)]
    if ep > 1:
        between += [(60.0, None), (60.0, PredictedCapacity(torch.device("cpu")))]
    gathering = {"moe_token_dispatcher_type": "allgather", "calculate_per_token_loss": True}
    for number, overrides in enumerate(settings):
        # What is computed again is dispatched as it was: with predicted capacities alone.
        for copies_s, predicted in between[-1:] if number else between:
            _layers(directory, layout, coordinates, overrides | gathering | LOSSES, copies_s, predicted)
    parallel.release()


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_layers_are_megatron_cores(name: str, ranks: int, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    run_distributed(_all_layers, ranks, tmp_path / "model", ranks, [{}, again], timeout_s=300)


def test_layers_that_are_not_fused() -> None:
    sizes = named_model("qwen3-30b-a3b").sizes
    gathering = {"moe_token_dispatcher_type": "allgather"}

    def fused(layout: Layout, **settings: Any) -> bool:
        return TrainConfig(**settings).has_fused_experts(sizes, layout)

    assert fused(Layout()) and fused(Layout(tp=2)) and fused(Layout(ep=2, dp=2), megatron=gathering)
    assert not fused(Layout(ep=2, dp=2))
    assert not fused(Layout(tp=2, etp=2)) and not fused(Layout(tp=2), sequence_parallel=False)
    assert not fused(Layout(), dtype="float32") and not fused(Layout(), fused_experts=False)
    with pytest.raises(
        UserError, match="sequence_parallel=false with tp=2: expected true, because the model has experts"
    ):
        TrainConfig(sequence_parallel=False).check_trained(sizes, Layout(tp=2))
    TrainConfig(sequence_parallel=False).check_trained(named_model("llama-3-70b").sizes, Layout(tp=2))
