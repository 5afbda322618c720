"""Updates and log-probs: the same on every layout, packed or padded, in however many micro-batches."""

from __future__ import annotations

import gzip
import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.profiler import record_function
from transformers import AutoModelForCausalLM

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from engine3d.training.profile import UpdateTrace
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves, runs_of

pytestmark = pytest.mark.processes

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"ep": 2}, {"tp": 2}, {"pp": 2, "stages": (1, 3)}, {"pp": 2, "vpp": 2}],
    4: [{"tp": 2, "ep": 2}],
}
FURTHER_LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"pp": 2}, {}],
    4: [{"tp": 2, "pp": 2}, {"pp": 2, "ep": 2, "vpp": 2}, {"ep": 4}],
}
SETTINGS = OptimizerConfig(lr=1e-2, min_lr=1e-3, schedule="cosine", warmup_steps=2, decay_steps=8, clip_grad=0.5)


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (11,), generator=generator).tolist()
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def _engine(directory: Path, sizes: dict[str, Any], world_size: int, **settings: Any) -> Any:
    from engine3d.training.engine import TrainEngine

    arguments = {"dtype": "float32", "micro_batch_tokens": 48, "optimizer": SETTINGS} | settings
    config = TrainConfig(layout=LayoutConfig(**sizes), **arguments)
    return TrainEngine(directory, config, Layout.of_world(world_size, **sizes), seed=1)


def _local_samples(samples: list[list[int]], engine: Any) -> tuple[Sequences, list[int]]:
    """This data-parallel rank's samples, weighted so that the loss is the mean over all tokens of all ranks."""
    mine = list(range(engine.coordinates.dp, len(samples), engine.layout.dp))
    return _weighted(samples, mine), mine


def _weighted(samples: list[list[int]], mine: list[int]) -> Sequences:
    """Some of the samples, with weights that make the loss over all of them the mean over their tokens."""
    count = sum(len(sample) - 1 for sample in samples)
    weights = [weight for index in mine for weight in [0.0] + [1 / count] * (len(samples[index]) - 1)]
    return Sequences.of([samples[index] for index in mine], weights=torch.tensor(weights))


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = ((0.01 * outputs.entropy - outputs.logprobs) * columns["weights"]).sum()
    return loss, loss.detach()


def _train(
    directory: Path, sizes: dict[str, Any], world_size: int, *, anew: bool = False, **settings: Any
) -> dict[str, Any]:
    """Three updates on one layout: what each rank saw of losses, gradient norms, rates and log-probs.

    `anew` adds the gradient norms of two more, with an optimizer that is started afresh.
    """
    engine = _engine(directory, sizes, world_size, **settings)
    sequences, mine = _local_samples(_samples(), engine)
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "mine": mine}
    before = engine.logprobs(sequences, with_entropy=True)
    for _ in range(3):
        peak_before = platform.memory().peak
        result = engine.update(sequences, _loss, with_entropy=True)
        seen["peak"], seen["own_peaks"] = result.peak_bytes, (peak_before, platform.memory().peak)
        loss = torch.stack([torch.zeros((), device=engine.device), *result.loss_outputs]).sum()
        dist.all_reduce(loss)
        seen["losses"].append(float(loss) / (engine.layout.tp * engine.layout.cp))
        seen["norms"].append(result.grad_norm)
        seen["rates"].append(result.learning_rate)
        seen["tokens"], seen["positions"] = result.tokens, result.positions
    after = engine.logprobs(sequences)
    if anew:
        engine.reset_optimizer(engine.config.optimizer)
        chained = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        assert not any(inner.optimizer.state for inner in chained)
        seen["anew"] = [engine.update(sequences, _loss, with_entropy=True).grad_norm for _ in range(2)]
    seen["before"], seen["after"] = (None if outputs is None else outputs.logprobs for outputs in (before, after))
    engine.close()
    return seen


def _train_all(directory: Path, world_size: int, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_train(directory, sizes, world_size) for sizes in layouts]


def _by_sample(ranks: list[dict[str, Any]], name: str) -> dict[int, torch.Tensor]:
    """Log-probs of each sample, from whichever last-stage rank had it."""
    samples, by_index = _samples(), dict[int, torch.Tensor]()
    for rank in ranks:
        if rank[name] is not None:
            split = rank[name].split([len(samples[index]) for index in rank["mine"]])
            by_index |= dict(zip(rank["mine"], split, strict=True))
    return by_index


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "moe"
    tiny_families.make("qwen3_moe", directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    """The reference: one rank, one micro-batch, padded rows."""
    [result] = run_distributed(_train_alone, 1, directory, timeout_s=300)
    return result


def _train_alone(directory: Path) -> dict[str, Any]:
    return _train(directory, {}, 1, micro_batch_tokens=10_000, packing=False)


def test_one_rank_agrees_with_transformers(directory: Path, alone: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logprobs = _by_sample([alone], "before")
    for index, sample in enumerate(_samples()):
        tokens = torch.tensor([sample])
        with torch.no_grad():
            every = model(tokens).logits.log_softmax(dim=-1)
        expected = every[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        assert logprobs[index][0] == 0
        torch.testing.assert_close(logprobs[index][1:], expected, atol=2e-5, rtol=1e-4)


def test_schedule_and_progress(alone: dict[str, Any]) -> None:
    assert alone["rates"] == pytest.approx([0.0, 0.005, 0.01])
    assert alone["losses"][0] == pytest.approx(alone["losses"][1])  # the first rate is 0
    assert alone["losses"][2] < alone["losses"][1] - 0.05


def test_tokens_and_positions_of_padded_rows(alone: dict[str, Any]) -> None:
    lengths = [len(sample) for sample in _samples()]
    assert alone["tokens"] == sum(lengths)
    assert alone["positions"] == len(lengths) * max(lengths)


@proves("qwen3_moe", *runs_of(LAYOUTS, "packing"), *runs_of(FURTHER_LAYOUTS, "packing"))
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        *(pytest.param(*case, marks=pytest.mark.long if case[0] == 4 else ()) for case in LAYOUTS.items()),
        *(pytest.param(*further, marks=pytest.mark.release) for further in FURTHER_LAYOUTS.items()),
    ],
)
def test_every_layout_updates_alike(
    directory: Path, alone: dict[str, Any], world_size: int, layouts: list[dict[str, Any]]
) -> None:
    ranks = run_distributed(_train_all, world_size, directory, world_size, layouts, timeout_s=300)
    for number, sizes in enumerate(layouts):
        results = [rank[number] for rank in ranks]
        for result in results:
            assert result["losses"] == pytest.approx(alone["losses"], rel=2e-5), sizes
            assert result["norms"] == pytest.approx(alone["norms"], rel=2e-4), sizes
            assert result["tokens"] == sum(len(_samples()[index]) for index in result["mine"])
            # Packed, each of at most three micro-batches is padded to a multiple of tp.
            tp = sizes.get("tp", 1)
            least, most = (max(rank["own_peaks"][end] for rank in results) for end in (0, 1))
            assert least <= result["peak"] <= most and result["peak"] == results[0]["peak"]
            assert result["positions"] % tp == 0 and 0 <= result["positions"] - result["tokens"] <= 3 * (tp - 1), sizes
        for name in ("before", "after"):
            expected, actual = _by_sample([alone], name), _by_sample(results, name)
            assert actual.keys() == expected.keys()
            for index, logprobs in expected.items():
                torch.testing.assert_close(actual[index], logprobs, atol=2e-4, rtol=1e-3)


@dataclass(frozen=True)
class _Cut:
    """Samples of each data-parallel rank, and its micro-batches."""

    mine: tuple[tuple[int, ...], ...]
    micro_batch_tokens: int
    packing: bool = True


@dataclass(frozen=True)
class _Gradients:
    """Gradients of one update, by parameter; the loss is the sum over data-parallel ranks."""

    by_name: dict[str, torch.Tensor]
    loss: float
    micro_batches: int


ALL = tuple(range(11))
ONE_EACH = _Cut((ALL,), 1, packing=False)
CUTS = {
    1: [ONE_EACH, _Cut((ALL,), 1), _Cut((ALL,), 30), _Cut((ALL,), 60), _Cut((ALL,), 30, packing=False)],
    2: [
        _Cut((ALL[::2], ALL[1::2]), 1, packing=False),
        _Cut((ALL[1::2], ALL[::2]), 30),
        _Cut((ALL[:2], ALL[2:]), 30),  # one has more micro-batches than the other has samples
        _Cut((ALL[4:], ALL[:4]), 60),
    ],
}


def _cut_all(directory: Path, world_size: int) -> list[_Gradients]:
    """The same samples, cut in several ways, through the same weights."""
    engine = _engine(directory, {}, world_size, optimizer=OptimizerConfig(lr=1e-30, clip_grad=0))
    samples, gradients = _samples(), []
    for cut in CUTS[world_size]:
        engine.config = engine.config.model_copy(
            update={"micro_batch_tokens": cut.micro_batch_tokens, "packing": cut.packing}
        )
        result = engine.update(_weighted(samples, list(cut.mine[engine.coordinates.dp])), _loss, with_entropy=True)
        loss = torch.stack(result.loss_outputs).sum()
        dist.all_reduce(loss)
        gradients.append(_Gradients(_gradients(engine), float(loss), len(result.loss_outputs)))
    engine.close()
    return gradients


def _buffers(engine: Any) -> list[Any]:
    return [buffer for chunk in engine.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Whole gradients of all parameters: each rank has added up those of all ranks for its chunk of a buffer alone."""
    for buffer in _buffers(engine):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    return {name: parameter.main_grad.cpu().clone() for name, parameter in engine.module.named_parameters()}


@proves("qwen3_moe", "packing", "padding", "dp packing", "dp padding")
def test_gradients_do_not_depend_on_how_samples_are_cut(directory: Path) -> None:
    """Packed into even micro-batches and dealt over ranks, as of each sample alone."""
    [updates] = run_distributed(_cut_all, 1, directory, 1, timeout_s=300)
    reference = updates[0]
    assert reference.micro_batches == 11
    assert [gradients.micro_batches for gradients in updates[2:4]] == [4, 2]
    dealt = run_distributed(_cut_all, 2, directory, 2, timeout_s=300)
    for first, second in zip(*dealt, strict=True):
        assert first.micro_batches == second.micro_batches  # ranks that share experts wait for each other in each
    for rank in (updates[1:], *dealt):
        for number, gradients in enumerate(rank):
            assert gradients.loss == pytest.approx(reference.loss, rel=1e-5), number
            assert gradients.by_name.keys() == reference.by_name.keys()
            for name, expected in reference.by_name.items():
                largest = float(expected.abs().max())
                assert largest > 0, name
                torch.testing.assert_close(gradients.by_name[name], expected, rtol=1e-4, atol=1e-5 * largest)


def _micro_batches(directory: Path) -> list[list[int]]:
    engine = _engine(directory, {}, 1, micro_batch_tokens=40)
    sequences = Sequences.of([[1] * 20, [2] * 38, [3] * 19])
    batches = [batch.input_ids.unique().tolist() for batch in engine.micro_batches(sequences)]
    engine.close()
    return batches


def test_micro_batches_are_weighed_by_their_operations(directory: Path) -> None:
    [batches] = run_distributed(_micro_batches, 1, directory, timeout_s=300)
    assert batches == [[2], [1, 3]]  # the most costly first: a token less, and more attention


def _not_finite(directory: Path) -> tuple[bool, bool, list[float]]:
    engine = _engine(directory, {}, 1)
    sequences, _ = _local_samples(_samples(), engine)

    def broken(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return (outputs.logprobs * columns["weights"]).sum() * torch.nan, None

    engine.update(sequences, _loss, with_entropy=True)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    result = engine.update(sequences, broken)
    same = all(torch.equal(old, new) for old, new in zip(before, engine.module.parameters(), strict=True))
    rates = [engine.update(sequences, _loss, with_entropy=True).learning_rate for _ in range(1)]
    finite = all(bool(parameter.isfinite().all()) for parameter in engine.module.parameters())
    engine.close()
    return result.applied, same and finite, rates


def test_a_gradient_that_is_not_finite_changes_nothing(directory: Path) -> None:
    [(applied, untouched, rates)] = run_distributed(_not_finite, 1, directory, timeout_s=300)
    assert not applied and untouched
    assert rates == pytest.approx([0.005])  # the schedule did not count the refused step


def _wrong_world(directory: Path) -> str:
    with pytest.raises(UserError) as error:
        _engine(directory, {"tp": 2}, 2)
    return str(error.value)


def test_a_layout_of_another_world_is_refused(directory: Path) -> None:
    [message] = run_distributed(_wrong_world, 1, directory, timeout_s=300)
    assert message == "layout: tp=2 has 2 ranks, the world has 1"


def _gives_back(directory: Path, often: bool) -> tuple[list[int], list[Any]]:
    """Bytes of the gradients after each of three updates, and what those came to."""
    engine = _engine(directory, {}, 1)
    sequences, _ = _local_samples(_samples(), engine)
    nbytes, seen = [_gradient_bytes(engine)], []
    for _ in range(3):
        if often:
            engine.offload()
            nbytes.append(_gradient_bytes(engine))
        result = engine.update(sequences, _loss, with_entropy=True)
        nbytes.append(_gradient_bytes(engine))
        seen.append((result.grad_norm, [float(loss) for loss in result.loss_outputs]))
    if often:
        engine.offload()
    seen.append(engine.logprobs(sequences).logprobs.tolist())
    nbytes.append(_gradient_bytes(engine))
    engine.close()
    return nbytes, seen


def _gradient_bytes(engine: Any) -> int:
    buffers = _buffers(engine)
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def test_gradients_have_memory_only_from_an_update_until_it_is_given_back(directory: Path) -> None:
    [(nbytes, expected)] = run_distributed(_gives_back, 1, directory, False, timeout_s=300)
    size = nbytes[0]
    assert size > 0 and nbytes == [size] * 5
    [(nbytes, actual)] = run_distributed(_gives_back, 1, directory, True, timeout_s=300)
    assert nbytes == [size, 0, size, 0, size, 0, size, 0]
    assert actual == expected


def _recompute(directory: Path) -> list[tuple[dict[str, Any], int]]:
    """Updates that compute no, some or all layers again, and how often they passed through one."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    results: list[tuple[dict[str, Any], int]] = []
    for settings in ({"recompute": "none"}, {"recompute": "full", "recompute_layers": 1}, {"recompute": "full"}):
        passes: list[int] = []
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, __, passes=passes: passes.append(0) if isinstance(module, TransformerLayer) else None
        )
        results.append((_train(directory, {}, 1, **settings), len(passes)))
        hook.remove()
    with pytest.raises(UserError, match="recompute=selective needs Transformer Engine"):
        _engine(directory, {}, 1, recompute="selective")
    return results


@proves("qwen3_moe", "packing recomputation")
def test_what_is_computed_again_is_the_same(directory: Path) -> None:
    [[(kept, none), (one, some), (layers, all_of_them)]] = run_distributed(_recompute, 1, directory, timeout_s=300)
    for again in (one, layers):
        assert again["losses"] == kept["losses"] and again["norms"] == kept["norms"]
        assert torch.equal(again["after"], kept["after"])
    assert none < some < all_of_them


def test_some_layers_are_computed_again_only_where_layers_are() -> None:
    with pytest.raises(ValidationError, match="recompute_layers=2 needs recompute=full, found none"):
        TrainConfig(recompute_layers=2)


def _offload(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Updates with the optimizer's state kept on the device and in host memory; and how it was in the latter."""
    from engine3d.training import host_state

    kept = [_train(directory, {}, 1, anew=True)]
    offloaded = SETTINGS.model_copy(update={"offload": True})
    overlapping = offloaded.model_copy(update={"overlap_offload": True})
    made: list[host_state.HostState] = []
    stats: dict[str, Any] = {"moved": 0, "stayed": 0}
    make, send, finish = (
        host_state.HostState.__init__,
        host_state._ChunkTransfers.send,
        host_state._ChunkTransfers.finish_offload,
    )
    begin, transfers_alive = host_state._ChunkTransfers.__init__, weakref.WeakSet[host_state._ChunkTransfers]()

    def watched_begin(transfers: host_state._ChunkTransfers, *arguments: Any, **settings: Any) -> None:
        begin(transfers, *arguments, **settings)
        transfers_alive.add(transfers)

    def nothing_left_over() -> None:
        """The memory of a state that has been offloaded can be given to others."""
        staying = {id(transfers) for state in made for transfers in state._transfers.values()}
        assert {id(transfers) for transfers in transfers_alive} <= staying

    def watched_make(state: host_state.HostState, *arguments: Any, **settings: Any) -> None:
        make(state, *arguments, **settings)
        made.append(state)

    def watched_send(transfers: host_state._ChunkTransfers, number: int) -> None:
        chunk = transfers._chunks[number]
        assert _memory_of(chunk) == {transfers._device_memory(number).untyped_storage().data_ptr()}
        stats["moved"] += 1
        stats["nbytes"], stats["chunks"] = made[-1].nbytes, [chunk.nbytes for chunk in transfers._chunks]
        stats["largest"] = max(slot.shape.numel() for chunk in transfers._chunks for slot in chunk.slots)
        send(transfers, number)
        assert chunk.host is not None and _memory_of(chunk) == {chunk.host.untyped_storage().data_ptr()}

    def watched_finish(transfers: host_state._ChunkTransfers) -> None:
        on_device = [(chunk, _memory_of(chunk)) for chunk in map(transfers._chunks.__getitem__, transfers._on_device)]
        stats["stayed"] += len(on_device)
        finish(transfers)
        for chunk, memory in on_device:
            assert memory == {transfers._device_memory(0).untyped_storage().data_ptr()}
            assert chunk.host is not None and _memory_of(chunk) == {chunk.host.untyped_storage().data_ptr()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_state, "CHUNK_BYTES", 16384)
        patch.setattr(host_state.HostState, "__init__", watched_make)
        patch.setattr(host_state._ChunkTransfers, "send", watched_send)
        patch.setattr(host_state._ChunkTransfers, "finish_offload", watched_finish)
        patch.setattr(host_state._ChunkTransfers, "__init__", watched_begin)
        patch.setattr(host_state.platform, "empty_cache", nothing_left_over)
        for settings in (offloaded, overlapping):
            kept.append(_train(directory, {}, 1, anew=True, optimizer=settings))
            assert not made[-1].nbytes  # it is given back with the engine
    return kept, stats


def _memory_of(chunk: Any) -> set[int]:
    return {slot.state[slot.name].untyped_storage().data_ptr() for slot in chunk.slots}


@proves("qwen3_moe", "packing optimizer_offload")
def test_the_optimizers_state_may_be_in_host_memory(directory: Path) -> None:
    [((on_device, *in_host), stats)] = run_distributed(_offload, 1, directory, timeout_s=300)
    for trained in in_host:
        assert trained["losses"] == on_device["losses"] and trained["norms"] == on_device["norms"]
        assert trained["anew"] == on_device["anew"]
        assert torch.equal(trained["after"], on_device["after"])
    parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(directory).parameters())
    assert (
        2 * 4 * parameters <= stats["nbytes"] < 1.2 * 2 * 4 * parameters
    )  # two moments in float32, and padding between
    assert len(stats["chunks"]) > 3 and max(stats["chunks"]) < 1.2 * max(16384, 2 * 4 * stats["largest"])
    # In all of three updates but the first, which makes the state. Anew there are two.
    assert stats["moved"] == stats["stayed"] == 3 * len(stats["chunks"])


def _all_again(directory: Path) -> list[list[Any]]:
    """Log-probs, losses, norms and routing of updates; the passes over the model, and its weights.

    Once as they are, and once where each pass is computed again, as the second rank had too little room in it.
    """
    from engine3d.models.experts.row_capacity import PredictedCapacity

    class TooLittle(PredictedCapacity):
        def overflowed(self) -> bool:
            self.overflow.fill_(dist.get_rank())
            return super().overflowed()

    results, balanced = [], {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    for again in (False, True):
        engine = _engine(directory, {"ep": 2}, 2, megatron=balanced)
        if again:
            engine._predicted = TooLittle(engine.device, dist.distributed_c10d._get_default_group())
        passes, run = [0], engine._pass

        def counted(*arguments: Any, passes: list[int] = passes, run: Any = run, **settings: Any) -> Any:
            passes[0] += 1
            return run(*arguments, **settings)

        engine._pass = counted
        sequences, _ = _local_samples(_samples(), engine)
        updates: list[Any] = []
        for _ in range(2):
            outputs = engine.logprobs(sequences)
            result = engine.update(sequences, _loss, with_entropy=True)
            updates.append(
                (outputs.logprobs.tolist(), list(map(float, result.loss_outputs)), result.grad_norm, result.routing)
            )
        results.append([updates, passes[0], [parameter.tolist() for parameter in engine.module.parameters()]])
        engine.close()
    return results


def test_a_pass_that_had_too_little_room_is_as_if_it_had_not_been(directory: Path) -> None:
    for once, again in run_distributed(_all_again, 2, directory, timeout_s=300):
        assert once[0] == again[0] and once[2] == again[2]
        assert (once[1], again[1]) == (6, 12)  # log-probs, what routers are going to choose, and the update


def _gather(directory: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    gathers = {"moe_token_dispatcher_type": "allgather"}
    trained = _train(directory, sizes, 2, megatron=gathers)
    with pytest.raises(UserError, match="allgather needs packing=true"):
        _engine(directory, sizes, 2, packing=False, megatron=gathers)
    return trained


@pytest.mark.parametrize("sizes", [{"ep": 2}, pytest.param({"etp": 2}, marks=pytest.mark.long)])
def test_tokens_may_be_gathered_for_experts(directory: Path, alone: dict[str, Any], sizes: dict[str, Any]) -> None:
    ranks = run_distributed(_gather, 2, directory, sizes, timeout_s=300)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert len({rank["positions"] for rank in ranks}) == 1 < len({rank["tokens"] for rank in ranks})


TRACED = {"two": 2, "more": 9}
"""Micro-batches that are traced, of the four of an update."""


def _updates(directory: Path, traces: Path | None, sizes: dict[str, Any], world_size: int) -> list[Any]:
    """Results of three updates, of which the first two are traced."""
    engine = _engine(directory, sizes, world_size, micro_batch_tokens=30)
    sequences, _ = _local_samples(_samples(), engine)
    seen: list[Any] = []
    for name, count in [*TRACED.items(), ("none", 0)]:
        if traces is not None and count:
            engine.trace_next_update(traces / f"{name}-{dist.get_rank()}.json.gz", count)
        outputs = engine.logprobs(sequences)  # is no update
        seen.append(None if outputs is None else outputs.logprobs.tolist())
        result = engine.update(sequences, _loss, with_entropy=True)
        seen.append((result.grad_norm, [float(loss) for loss in result.loss_outputs]))
        assert not torch._C._autograd._profiler_enabled()
    engine.close()
    return seen


def _traced(directory: Path, traces: Path, sizes: dict[str, Any], world_size: int) -> list[Any]:
    return [_updates(directory, path, sizes, world_size) for path in (None, traces)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with few operations in a layer."""
    directory = tmp_path_factory.mktemp("model") / "dense"
    tiny_families.make("llama", directory)
    return directory


@pytest.mark.parametrize(
    "sizes",
    [*(pytest.param(sizes, marks=pytest.mark.long) for sizes in ({}, {"pp": 2})), {"pp": 2, "vpp": 2}],
)
def test_a_traced_update_is_the_same(dense: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    world_size = sizes.get("pp", 1)
    for untraced, traced in run_distributed(_traced, world_size, dense, tmp_path, sizes, world_size, timeout_s=300):
        assert traced == untraced
    expected = {"two": [2, 3], "more": [1, 2, 3, 4]}
    if "vpp" in sizes:  # each of two chunks has all four
        expected = {name: list(range(1, 9)) for name in TRACED}
    names = [f"{name}-{rank}.json.gz" for name in TRACED for rank in range(world_size)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for name in names:
        with gzip.open(tmp_path / name, "rt") as file:
            events = json.load(file)["traceEvents"]
        operations = [event["name"] for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
        labels = [name for name in operations if name.startswith("micro-batch ")]
        assert sorted(labels) == [f"micro-batch {number}" for number in expected[name.split("-")[0]]]
        assert any("Backward" in name for name in operations)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_trace_of_a_pipeline_stage_goes_both_ways(ahead: int, tmp_path: Path) -> None:
    def schedule(*, forward_step_func: Any, num_microbatches: int, model: list[Any]) -> str:
        """One forward, one backward."""
        for number in range(num_microbatches + ahead):
            if number < num_microbatches:
                forward_step_func()
            if number >= ahead:
                with record_function("backward"):
                    pass
        return "losses"

    for count, requested in ((8, 2), (4, 4)):
        trace = UpdateTrace(tmp_path / "trace.json.gz", requested, ahead=ahead)
        assert trace.run(schedule, forward_step_func=lambda: None, num_microbatches=count, model=[None]) == "losses"
        with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        assert sum(name.startswith("micro-batch ") for name in names) == requested
        assert names.count("backward") == requested


def _fails_while_traced(directory: Path, traces: Path) -> None:
    engine = _engine(directory, {}, 1, micro_batch_tokens=30)
    sequences, _ = _local_samples(_samples(), engine)

    def broken(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        raise ArithmeticError

    engine.trace_next_update(traces / "failed.json.gz", 9)
    with pytest.raises(ArithmeticError):
        engine.update(sequences, broken)
    assert not torch._C._autograd._profiler_enabled()
    engine.close()


def test_an_update_that_fails_leaves_no_trace(directory: Path, tmp_path: Path) -> None:
    run_distributed(_fails_while_traced, 1, directory, tmp_path, timeout_s=300)
    assert not list(tmp_path.iterdir())
