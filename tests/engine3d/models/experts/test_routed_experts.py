"""Experts in one step against one expert after another, and layers of them against Megatron-Core's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
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
from engine3d.models.experts import room as expert_room
from engine3d.models.experts.load_balance import Routing
from engine3d.models.experts.moe_layer import MoELayerInOneStep, make_room
from engine3d.models.experts.room import Room, RowsAhead
from engine3d.models.experts.routed_experts import Weights, routed_experts
from engine3d.models.experts.router import load_balance
from engine3d.models.experts.rows import rows_of
from engine3d.models.experts.ways import Coming, CopyingWay, Way, copying_way, release
from engine3d.platform import platform
from engine3d.platform.cpu.peer_memory import CpuPeerMemory
from engine3d.platform.peer_memory import Copy
from engine3d.training import parallel
from engine3d.training.config import TrainConfig
from tests.engine3d.models.experts.test_load_balance import LOSSES
from tests.support import tiny_families
from tests.support.distributed import meet_others, run_distributed

TOKENS, HIDDEN, WIDTH, EXPERTS, MOST = 10, 16, 24, 4, 2
"""Tokens of a rank, what they are, how wide an expert is, experts over all ranks, experts of a token."""

CASES = {
    "even": [0, 1, 2, 3],
    "some experts without tokens": [0, 3],
    "all of the last rank's experts without tokens": [0, 1],
    "of one expert": [2],
}
"""Which experts are chosen from."""


def _drawn(world: int, dtype: torch.dtype, chosen: list[int]) -> dict[str, Tensor]:
    """All ranks' tokens, routing and gradients, and all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(len(chosen))
    count = world * TOKENS

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    logits = torch.full((count, EXPERTS), -torch.inf)
    logits[:, chosen] = draw(count, len(chosen))
    routing = torch.zeros(count, EXPERTS, dtype=torch.bool)
    routing.scatter_(1, logits.topk(min(MOST, len(chosen)), dim=1).indices, True)
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
    found = {"result": result.detach(), "hidden": hidden.grad, "probabilities": probabilities.grad}
    return {
        name: tensor
        for name, tensor in (found | {"first": first.grad, "last": last.grad}).items()
        if tensor is not None
    }


def _in_one_step(chosen: list[int], dtype: torch.dtype, device: str, way: Way, room: Room | None) -> None:
    """Assert that this rank's part is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = _drawn(world, dtype, chosen)
    expected = _one_by_one(drawn)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    experts = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    hidden, probabilities = (drawn[name][mine].to(device).requires_grad_() for name in ("hidden", "probabilities"))
    values = [drawn[name][experts].to(device) for name in ("first", "last")]
    # What earlier micro-batches left.
    gradients = [torch.ones_like(each, dtype=torch.float32) for each in values]
    weights = [
        Weights(each, grown, torch.nn.Parameter(each[0].clone())) for each, grown in zip(values, gradients, strict=True)
    ]

    def made(first: Weights, last: Weights) -> Tensor:
        routing = drawn["routing"][mine].to(device)
        return routed_experts(
            hidden,
            probabilities,
            routing,
            first,
            last,
            most=MOST,
            way=way,
            gathered=way.gather_ahead(hidden.detach()),
            room=room,
        )

    if room is not None:
        with torch.no_grad():
            made(weights[0], weights[1])  # as many rows as the next ones, which have room for more
        # A rank with all experts learns nothing.
        assert (room.of([1000], 1, 1) is not None) == (world > 1 and bool(drawn["routing"][:, experts].any()))
    result = made(weights[0], weights[1])
    result.backward(drawn["gradient"][mine].to(device))  # type: ignore[no-untyped-call]
    limit = 1e-5 if dtype == torch.float32 else 3e-2

    def alike(found: Any, name: str, part: slice) -> None:
        right = expected[name][part]
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            found.cpu().double(), right, rtol=limit, atol=limit * scale, msg=lambda m: f"{name}: {m}"
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
    frozen = [Weights(each, None, torch.nn.Parameter(each[0], requires_grad=False)) for each in values]
    with torch.no_grad():
        assert torch.equal(made(*frozen), result)
    hidden.grad = None
    made(*frozen).backward(drawn["gradient"][mine].to(device))  # type: ignore[no-untyped-call]
    alike(hidden.grad, "hidden", mine)


def _all_cases(device: str) -> None:
    group = meet_others(device)
    ways = [Way(group), copying_way(group, 60.0)]
    assert isinstance(ways[1], CopyingWay) == (group.size() > 1)
    expert_room.LEAST_TOKENS, expert_room.LEAST_PIECES, expert_room.MOST_OF_EVEN = 1, 1, 100
    # What nobody has written, such as rows that are of no token, is no number.
    torch.use_deterministic_algorithms(device == "cpu")
    ahead = RowsAhead(torch.device(device))
    for way in ways:
        for chosen in CASES.values():
            for dtype in (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,):
                for room in (None, Room(ahead)):
                    _in_one_step(chosen, dtype, device, way, room)
    assert not ahead.was_too_little()
    release()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_all_at_once_is_one_by_one(world: int) -> None:
    run_distributed(_all_cases, world, "cpu", timeout_s=120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [1, 2])
def test_all_at_once_is_one_by_one_on_gpus(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    run_distributed(_all_cases, world, "cuda", timeout_s=300)


def _whole(coming: Coming, value: Tensor | None = None) -> Tensor:
    """With this rank's own tokens."""
    whole = (coming.value() if value is None else value).clone()
    assert coming.apart is not None
    whole[coming.apart.first :][: len(coming.apart.tokens)] = coming.apart.tokens
    return whole


def _two_ways(device: str) -> None:
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
            own = memory.of(mine, (memory.nbytes,), torch.uint8).untyped_storage().data_ptr()
            assert own not in [target.untyped_storage().data_ptr() for target, _ in copies]
            late()
            return copy(memory, copies)

        setattr(CpuPeerMemory, "copy", copy_late)  # noqa: B010
    way, other = CopyingWay(group, 60.0), Way(group)
    dtype = torch.bfloat16
    for tokens in (3, 1, 40, 40, 7):
        generator = torch.Generator().manual_seed(tokens)
        drawn = torch.randn(2, ranks, tokens, 8, generator=generator).to(device, dtype)
        first, last, more = (way.gather(drawn[number, mine]) for number in (0, 1, 0))
        with pytest.raises(EngineError, match="more than 3 tensors are on their way"):
            way.gather(drawn[0, mine])
        assert torch.equal(_whole(more), drawn[0].flatten(0, 1))
        more.done()
        given = first.value()
        late()
        given = _whole(first, given)
        first.done()
        assert torch.equal(given, drawn[0].flatten(0, 1))
        parts = torch.randn(ranks, ranks * tokens, 8, generator=generator).to(device, dtype)
        sums = way.add_up(parts[mine])
        assert torch.equal(_whole(last), other.gather(drawn[1, mine]).value())
        last.done()
        right = torch.zeros(tokens, 8, device=device)
        for part in parts.unflatten(1, (ranks, -1))[:, mine]:
            right += part.float()
        assert torch.equal(sums.value(), right.to(dtype))
        alone = way.gather(drawn[1, mine])
        assert torch.equal(_whole(alone), drawn[1].flatten(0, 1))
        alone.done()
        place = torch.empty(tokens, 8, dtype=dtype, device=device)
        assert way.add_up(parts[mine], place).value() is place
        assert torch.equal(place, right.to(dtype))
    assert way.nbytes == 3 * ranks * 40 * 8 * dtype.itemsize
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_copies_are_collective_operations(world: int) -> None:
    run_distributed(_two_ways, world, "cpu", timeout_s=120)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_are_collective_operations_on_gpus() -> None:
    run_distributed(_two_ways, min(4, torch.cuda.device_count()), "cuda", timeout_s=300)


def _copies_beside() -> None:
    """Assert that what is queued after copies does not wait for them, with the one queue that Megatron-Core wants."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    group = meet_others("cuda")
    way = CopyingWay(group, 60.0)
    tokens = torch.zeros(1 << 16, 4096, dtype=torch.bfloat16, device="cuda")  # more than a millisecond
    for _ in range(3):  # the first one takes the memory
        begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        coming = [way.gather(tokens), way.gather(tokens)]
        between.record()
        for each in coming:
            each.value()
            each.done()
        end.record()
        torch.cuda.synchronize()
    assert begin.elapsed_time(between) < 0.5 * begin.elapsed_time(end)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_what_is_queued_after_copies_does_not_wait_for_them() -> None:
    run_distributed(_copies_beside, min(4, torch.cuda.device_count()), timeout_s=300)


def _beside_the_gpu() -> None:
    """Assert that a rank that has all experts queues both passes while its GPU is at work."""
    group = meet_others("cuda")
    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    probabilities = torch.rand(64, EXPERTS, device="cuda")
    routing = torch.zeros(64, EXPERTS, dtype=torch.bool, device="cuda").scatter_(
        1, probabilities.topk(MOST).indices, True
    )
    values = [torch.randn(EXPERTS, *of, device="cuda", dtype=torch.bfloat16) for of in ((512, 128), (128, 256))]
    first, last = (Weights(each, torch.zeros_like(each), torch.nn.Parameter(each[0].clone())) for each in values)
    for at_work in (False, True):  # the first time kernels are compiled
        torch.cuda.synchronize()
        if at_work:
            torch.cuda._sleep(3_000_000_000)  # cycles: more than a second
        result = routed_experts(hidden, probabilities, routing, first, last, most=MOST, way=Way(group))
        result.sum().backward()  # type: ignore[no-untyped-call]
        is_over = torch.cuda.current_stream().record_event()
        assert not at_work or not is_over.query()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rank_with_all_experts_does_not_wait_for_its_gpu() -> None:
    run_distributed(_beside_the_gpu, 1, timeout_s=120)


def _of_two_hosts() -> None:
    group = meet_others("cpu")
    platform.__dict__["node"] = f"host-{dist.get_rank()}"
    with pytest.raises(UserError, match="share experts are on host-0 and on host-1; expected one host, or false"):
        CopyingWay(group, 60.0)
    dist.destroy_process_group()


@pytest.mark.processes
def test_copies_need_one_host() -> None:
    run_distributed(_of_two_hosts, 2, timeout_s=60)


def test_too_little_room_is_told_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_room, "LEAST_TOKENS", 4)
    monkeypatch.setattr(expert_room, "LEAST_PIECES", 2)
    room = Room(RowsAhead(torch.device("cpu")))
    few, many = torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8)
    few[0, 0] = 0.5
    for scores, rows in ((few, 8), (few, 8), (few, 9), (many, 9)):  # known first, then one more, as for all that follow
        [found] = rows_of(scores, 2, room=room)()
        assert len(found.token) == len(found.place) == rows
        assert int(found.ends[-1]) == min(rows, 8 if scores is few else 16) and int(found.of_token.max()) < rows
        assert scores is many or found.place[8:].tolist() == [16] * (rows - 8)
    assert room.ahead.too_little and len(rows_of(many, 2, room=room)()[0].token) == 16
    assert room.of([8], 2, 1.0) is None  # too uneven to have so much room for all
    for _ in range(expert_room.MOST_PIECES):
        room.learn([8], [8])
    assert room.of([8], 2, 1.0) == [9]
    with room.ahead.waiting():
        assert len(rows_of(few, 2, room=room)()[0].token) == 8
    assert len(rows_of(few[:, :, :3].contiguous(), 2, room=room)()[0].token) == 3  # too few to tell


def test_where_all_experts_are_there_is_room_for_as_many_rows_as_tokens_have_experts() -> None:
    room = Room(RowsAhead(torch.device("cpu")))
    scores = torch.rand(1, 4, 5, generator=torch.Generator().manual_seed(1))
    scores[scores < scores.topk(2, dim=1).values[:, -1:]] = -torch.inf
    for most, pieces, sizes in ((2, 1, [10]), (2, 2, [6, 4]), (3, 1, [15])):
        found = rows_of(scores, most, pieces, room, whole=True)()
        assert [len(each.token) for each in found] == sizes
        known = rows_of(scores, most, pieces)()
        for its_rows, its_known in zip(found, known, strict=True):
            count = len(its_known.token)
            for name in ("token", "place", "score"):
                assert torch.equal(getattr(its_rows, name)[:count], getattr(its_known, name)), name
            for name in ("ends", "of_token", "per_token"):
                assert torch.equal(getattr(its_rows, name), getattr(its_known, name)), name
            assert its_rows.place[count:].tolist() == [scores.numel()] * (len(its_rows.token) - count)
    assert not room.ahead.too_little and room.of([5000], 2, 2.0) is None


def test_a_router_that_is_no_number_shows() -> None:
    scores = torch.full((1, 2, 3), -torch.inf)
    scores[0, 1, 2] = torch.nan
    assert rows_of(scores, 1)()[0].token.tolist() == [2]


def test_rows_of_pieces_are_those_of_their_tokens_alone() -> None:
    scores = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(1))
    scores[scores < 0.4] = -torch.inf
    found = rows_of(scores, 3, 2)()
    assert [len(piece.per_token) for piece in found] == [2 * 3, 2 * 2]
    for piece, its_scores in zip(found, (scores[:, :, :3], scores[:, :, 3:]), strict=True):
        [alone] = rows_of(its_scores.contiguous(), 3)()
        for name in ("ends", "token", "score", "of_token", "per_token"):
            assert torch.equal(getattr(piece, name), getattr(alone, name)), name
        assert torch.equal(scores.view(-1)[piece.place], piece.score) and len(piece.score)


class _Stacked:
    """The weights of experts that Megatron-Core has one by one."""

    def __init__(self, linear: list[Any]) -> None:
        self.values = torch.stack([each.weight.detach() for each in linear])
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
    ahead: RowsAhead | None,
) -> None:
    """Assert that a model with layers in one step is Megatron-Core's, both ways, with losses of routers."""
    spec = load_model_spec(directory)
    model = build_model(spec, layout, torch.float32, overrides=overrides)
    load_weights(model, spec, layout, coordinates, directory)
    generator = torch.Generator().manual_seed(coordinates.dp)
    tokens = torch.randint(spec.vocab_size, (2, 12), generator=generator)
    slope = torch.randn(2, 12, spec.padded_vocabulary(layout) // layout.tp, generator=generator)

    balance = load_balance(model, spec.sizes.sparse)
    sequences = torch.tensor([[0] * 5 + [1] * 6 + [-1], [2] * 12], dtype=torch.int32)

    def passed() -> Tensor:
        return model(tokens, torch.arange(12).expand_as(tokens), None, padding_mask=sequences)  # type: ignore[no-any-return]

    def learned() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.no_grad(), balance.counting():
            passed()
        with balance.update(tokens=23.0 * layout.dp, sequences=3):
            result = passed()
            (result * slope).sum().backward()
            losses.append(balance.finish())
        return result.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    losses: list[Routing] = []
    expected, gradients = learned()
    stacked: dict[str, _Stacked] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            module.__class__ = MoELayerInOneStep
            module.copies_timeout_s = copies_s
            for linear in ("linear_fc1", "linear_fc2"):
                each = _Stacked([getattr(expert, linear) for expert in module.experts.local_experts])
                setattr(module.experts, linear, each)
                stacked |= {f"{name}.experts.local_experts.{{}}.{linear}.weight": each}
    if ahead is not None:
        make_room(model, ahead)  # for as many rows as the pass that counts has
    found, mine = learned()
    if ahead is not None:
        rooms = [module.room for module in model.modules() if isinstance(module, MoELayerInOneStep)]
        assert rooms and all(room.of([1000], 1, 1.0) for room in rooms) and not ahead.was_too_little()
    for name, each in stacked.items():
        mine |= {name.format(number): gradient for number, gradient in enumerate(each.gradients)}
    assert len(stacked) >= 4
    assert losses[0].highest == losses[1].highest and min(losses[0].highest) > 1
    for name in ("z", "sequence", "update"):
        assert 0 < getattr(losses[1], name) == pytest.approx(getattr(losses[0], name), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def _all_layers(directory: Path, ep: int, ways: list[dict[str, Any]]) -> None:
    layout = Layout(ep=ep, dp=ep)
    coordinates = parallel.initialise(layout, seed=1, timeout_s=60)
    expert_room.LEAST_TOKENS, expert_room.LEAST_PIECES, expert_room.MOST_OF_EVEN = 1, 1, 100
    between: list[tuple[float | None, RowsAhead | None]] = [(None, None)]
    if ep > 1:
        between += [(60.0, None), (60.0, RowsAhead(torch.device("cpu")))]
    gathering = {"moe_token_dispatcher_type": "allgather", "calculate_per_token_loss": True}
    for overrides in ways:
        for copies_s, ahead in between:
            _layers(directory, layout, coordinates, overrides | gathering | LOSSES, copies_s, ahead)
    parallel.release()


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_layers_are_megatron_cores(name: str, ranks: int, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    run_distributed(_all_layers, ranks, tmp_path / "model", ranks, [{}, again], timeout_s=120)


def test_what_is_no_single_step() -> None:
    sizes = named_model("qwen3-30b-a3b").sizes
    gathering = {"moe_token_dispatcher_type": "allgather"}

    def one_step(layout: Layout, **settings: Any) -> bool:
        return TrainConfig(**settings).has_one_step_experts(sizes, layout)

    assert one_step(Layout()) and one_step(Layout(tp=2)) and one_step(Layout(ep=2, dp=2), megatron=gathering)
    assert not one_step(Layout(ep=2, dp=2))
    assert not one_step(Layout(tp=2, etp=2)) and not one_step(Layout(tp=2), sequence_parallel=False)
    assert not one_step(Layout(), dtype="float32") and not one_step(Layout(), one_step_experts=False)
    with pytest.raises(
        UserError, match="sequence_parallel=false with tp=2: expected true, because the model has experts"
    ):
        TrainConfig(sequence_parallel=False).check_trained(sizes, Layout(tp=2))
    TrainConfig(sequence_parallel=False).check_trained(named_model("llama-3-70b").sizes, Layout(tp=2))
