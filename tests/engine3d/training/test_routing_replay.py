"""Routing replay on every layout, against transformers' models with the same routes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine3d.layout import Layout
from engine3d.models.experts.routes import RouteFormat, TokenRoutes
from engine3d.models.experts.routing_replay import ReplayStats, decode, encode
from engine3d.models.lora.config import LoraConfig
from engine3d.models.rules import TensorSlice
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from tests.engine3d.checkpoint.writing.test_save import build_engine, save
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.gradients import gradients, slices
from tests.support.peft_models import fill, with_adapters
from tests.support.proves import proves, run_of
from tests.support.routed_reference import RoutedReference

LENGTHS = (5, 9, 16, 2, 12, 7, 14)
STILL = OptimizerConfig(lr=1e-30, clip_grad=0)
"""Gradients are looked at, weights stay."""
SOME: dict[str, Any] = {"sizes": {}, "micro_batch_tokens": 30}
LORA = LoraConfig(rank=4, alpha=6)
WAYS: dict[int, list[dict[str, Any]]] = {
    1: [
        {**SOME, "packing": False, "recompute": "full"},
        {**SOME, "recompute": "full", "recompute_layers": 1},
        {"sizes": {}, "micro_batch_tokens": 1000, "family": "deepseek_v3"},
        {**SOME, "dtype": "bfloat16"},
    ],
    2: [
        {"sizes": {"pp": 2, "vpp": 2}, "micro_batch_tokens": 12, "recompute": "full"},
        {"sizes": {"tp": 2, "etp": 2}, "micro_batch_tokens": 30, "packing": False},
        {"sizes": {"cp": 2}, "micro_batch_tokens": 30},
        {"sizes": {"tp": 2, "ep": 2}, "micro_batch_tokens": 30, "lora": LORA},
    ],
    4: [
        {"sizes": {"tp": 2, "pp": 2, "vpp": 2}, "micro_batch_tokens": 30, "recompute": "full"},
        {"sizes": {"tp": 2, "ep": 2}, "micro_batch_tokens": 30, "packing": False},
        {"sizes": {"pp": 4}, "micro_batch_tokens": 8, "family": "deepseek_v3"},
        {"sizes": {"pp": 2, "ep": 2}, "micro_batch_tokens": 16, "family": "deepseek_v3"},
        {"sizes": {"ep": 4}, "micro_batch_tokens": 1000, "dispatcher": "allgather"},
        {"sizes": {"cp": 2, "tp": 2}, "micro_batch_tokens": 30, "recompute": "full"},
        {"sizes": {"cp": 2, "pp": 2}, "micro_batch_tokens": 30, "family": "deepseek_v3"},
        {"sizes": {"cp": 2, "ep": 4}, "micro_batch_tokens": 30},
        {"sizes": {"tp": 2, "pp": 2, "ep": 2}, "micro_batch_tokens": 30, "family": "qwen2_moe"},
        {"sizes": {"pp": 2, "vpp": 2, "ep": 2}, "micro_batch_tokens": 30, "family": "mixtral", "recompute": "full"},
        {"sizes": {"cp": 2, "etp": 2}, "micro_batch_tokens": 30, "family": "glm4_moe"},
    ],
}
FURTHER_WAYS: dict[int, list[dict[str, Any]]] = {
    1: [SOME],
    2: [
        {"sizes": {"tp": 2}, "micro_batch_tokens": 30},
        {"sizes": {"ep": 2}, "micro_batch_tokens": 30, "family": "deepseek_v3"},
        {"sizes": {"etp": 2}, "micro_batch_tokens": 30, "packing": False},
    ],
}


def _runs(family: str) -> list[str]:
    """Layout and features of the ways of a family, as `proves` takes them."""
    runs = []
    for world_size, ways in (*WAYS.items(), *FURTHER_WAYS.items()):
        for way in ways:
            if way.get("family", "qwen3_moe") == family:
                features = "packing" if way.get("packing", True) else "padding"
                features += " recomputation" * ("recompute" in way) + " lora" * ("lora" in way)
                layout = Layout.of_world(world_size, **way["sizes"])
                runs.append(run_of(layout, f"{features} routing_replay"))
    return runs


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in LENGTHS]


def _forced(routes: RouteFormat) -> list[Tensor]:
    """Random routes of each sample. Some are missing, and some have one missing entry."""
    generator = torch.Generator().manual_seed(5)
    forced = []
    for length in LENGTHS:
        scores = torch.rand(length, len(routes.layers), routes.experts, generator=generator)
        rows = scores.topk(routes.topk).indices
        rows[torch.rand(rows.shape[:2], generator=generator) < 0.2] = routes.missing
        rows[..., 0][torch.rand(rows.shape[:2], generator=generator) < 0.1] = routes.missing
        rows[-1] = routes.missing  # an engine computes nothing of the last token
        forced.append(rows.flatten(1).to(routes.dtype))
    return forced


@dataclass(frozen=True)
class _Replayed:
    """Results of a rank with its samples: log-probs, routes, and gradients and statistics of updates.

    `reads` counts, by token and column, how often an update has read a route.
    """

    mine: list[int]
    reads: Tensor
    logprobs: Tensor | None
    recorded: Tensor | None
    forced: list[tuple[TensorSlice, Tensor]]
    stats: ReplayStats | None
    live: list[tuple[TensorSlice, Tensor]]
    live_stats: ReplayStats | None


@dataclass(frozen=True, eq=False)
class _CountedRoutes(TokenRoutes):
    """Routes that count how often each of their entries was read."""

    reads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def read(self, tokens: Tensor, columns: Tensor) -> Tensor:
        self.reads.append((tokens[tokens >= 0], columns))
        return super().read(tokens, columns)

    def counts(self) -> Tensor:
        """(T, C) int64."""
        counts = torch.zeros(sum(map(len, self.samples)), self.samples[0].shape[1], dtype=torch.int64)
        for tokens, columns in self.reads:
            counts[tokens[:, None], columns] += 1
        return counts


def _loss(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
    return -(outputs.logprobs * columns["weights"]).sum(), None


def _sequences(samples: list[list[int]], routes: list[Tensor] | None = None) -> Sequences:
    """Sequences with their weights, and with (t, C) routes of each."""
    weights = [weight for sample in samples for weight in [0.0] + [1 / sum(LENGTHS)] * (len(sample) - 1)]
    sequences = Sequences.of(samples, weights=torch.tensor(weights))
    return sequences if routes is None else replace(sequences, routes=_CountedRoutes(tuple(map(Tensor.numpy, routes))))


def _replay(directories: dict[str, Path], ways: list[dict[str, Any]]) -> list[_Replayed]:
    results = []
    for way in ways:
        way = dict(way)
        megatron = {"moe_token_dispatcher_type": way.pop("dispatcher", "alltoall")}
        directory = directories[_model(way)]
        way.pop("family", None)
        sizes = way.pop("sizes")
        engine = build_engine(directory, sizes, optimizer=STILL, megatron=megatron, routing_replay="rollout", **way)
        if engine.adapters is not None:
            fill(engine)
        mine = list(range(engine.coordinates.dp, len(LENGTHS), engine.layout.dp))
        samples = [_samples()[index] for index in mine]
        every = _forced(RouteFormat.of(engine.spec.sizes))
        forced = _sequences(samples, [every[index] for index in mine])
        replayed = engine.logprobs(forced)
        live = engine.logprobs(_sequences(samples), record_routes=True)
        update = engine.update(forced, _loss)
        of_forced = gradients(engine)
        # All ranks of a replica need the routes, which one of them has recorded.
        recorded = None if live is None else live.routes
        routes = _of_last_rank(engine, recorded, (sum(map(len, samples)), every[0].shape[1]))
        recorded_routes = _sequences(samples, list(routes.split([len(sample) for sample in samples])))
        again = engine.update(recorded_routes, _loss)
        assert isinstance(recorded_routes.routes, _CountedRoutes)
        results.append(
            _Replayed(
                mine,
                recorded_routes.routes.counts(),
                None if replayed is None else replayed.logprobs,
                recorded,
                of_forced,
                update.replay,
                gradients(engine),
                again.replay,
            )
        )
        engine.close()
    return results


def _of_last_rank(engine: Any, routes: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Routes of a replica on all its ranks, from the rank that has them."""
    import torch.distributed as dist

    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (engine.coordinates.dp, routes))
    [mine] = [of_rank for dp, of_rank in everything if dp == engine.coordinates.dp and of_rank is not None]
    assert mine.shape == shape
    return mine


@dataclass(frozen=True)
class _Expected:
    """The same by transformers' model."""

    logprobs: list[Tensor]
    live_routes: list[Tensor]
    forced: dict[str, Tensor]
    live: dict[str, Tensor]
    stats: ReplayStats
    topk: int


def _expected(model: Any, directory: Path) -> _Expected:
    from engine3d.models import load_model_spec

    routes, reference = RouteFormat.of(load_model_spec(directory).sizes), RoutedReference(model.float())
    assert list(routes.layers) == reference.layers
    live, live_routes = torch.zeros(()), []
    for sample in _samples():
        live = live - reference.logprobs(sample).sum() / sum(LENGTHS)
        live_routes.append(reference.live_routes())
    live.backward()
    of_live = reference.gradients()
    total, logprobs, counts = torch.zeros(()), [], [0, 0, 0]
    for sample, forced in zip(_samples(), _forced(routes), strict=True):
        logprobs.append(reference.logprobs(sample, forced))
        total = total - logprobs[-1].sum() / sum(LENGTHS)
        given, chosen = (_sets(rows, routes.topk)[:-1] for rows in (forced, reference.live_routes()))
        known = (given != routes.missing).all(dim=2)
        same = (given == chosen).all(dim=2)
        counted = (known.numel(), int((~known).sum()), int((known & ~same).sum()))
        counts = [sum(pair) for pair in zip(counts, counted, strict=True)]
    total.backward()
    return _Expected(
        [row.detach() for row in logprobs],
        live_routes,
        reference.gradients(),
        of_live,
        ReplayStats(*counts),
        routes.topk,
    )


class _Models(dict[str, tuple[Path, _Expected]]):
    """Directories by family, each with the expected results of the model in it, which is made when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __missing__(self, name: str) -> tuple[Path, _Expected]:
        family, _, adapters = name.partition(" ")
        model = tiny_families.make(family, path := self._directory / family / adapters)
        if adapters:
            model = with_adapters(model, family, LORA).get_base_model()
        self[name] = (path, _expected(model, path))
        return self[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> _Models:
    return _Models(tmp_path_factory.mktemp("models"))


@proves("qwen3_moe", *_runs("qwen3_moe"))
@proves("deepseek_v3", *_runs("deepseek_v3"))
@proves("qwen2_moe", *_runs("qwen2_moe"))
@proves("mixtral", *_runs("mixtral"))
@proves("glm4_moe", *_runs("glm4_moe"))
@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        (1, WAYS[1]),
        (2, WAYS[2]),
        pytest.param(4, WAYS[4], marks=pytest.mark.long),
        *(pytest.param(*further, marks=pytest.mark.release) for further in FURTHER_WAYS.items()),
    ],
)
def test_routes_are_replayed_and_recorded_on_every_layout(
    models: Any, world_size: int, ways: list[dict[str, Any]]
) -> None:
    directories = {name: models[name][0] for name in map(_model, ways)}
    ranks = run_distributed(_replay, world_size, directories, ways, timeout_s=300)
    for number, way in enumerate(ways):
        _, expected = models[_model(way)]
        recorders, exact = 0, "dtype" not in way
        for result in (rank[number] for rank in ranks):
            lengths = [LENGTHS[index] for index in result.mine]
            if result.logprobs is not None:
                for index, logprobs in zip(result.mine, result.logprobs.split(lengths), strict=True):
                    torch.testing.assert_close(
                        logprobs, expected.logprobs[index], rtol=1e-4, atol=2e-5 if exact else 0.2
                    )
            if result.recorded is not None:
                recorders += 1
                for index, rows in zip(result.mine, result.recorded.split(lengths), strict=True):
                    sets = [_sets(routes, expected.topk) for routes in (rows, expected.live_routes[index])]
                    assert torch.equal(*sets) or not exact, way
            if exact:
                _compare(result.forced, expected.forced, f"{way} forced")
                _compare(result.live, expected.live, f"{way} live")
                assert result.stats == expected.stats, way
            else:  # live routers, which choose where a route is missing, may choose otherwise in bf16
                _compare_norms(result.forced, expected.forced)
            assert result.live_stats is not None and result.live_stats.different == result.live_stats.missing == 0
        assert recorders == max(1, world_size // _model_size(way)), way
        _check_reads(way, [rank[number] for rank in ranks])


def _check_reads(way: dict[str, Any], ranks: list[_Replayed]) -> None:
    """Each rank of a replica reads the routes of its own positions and layers, to check them and for each chunk."""
    times = 1 + way["sizes"].get("vpp", 1)
    by_replica: dict[int, list[Tensor]] = {}
    for result in ranks:
        by_replica.setdefault(result.mine[0], []).append(result.reads)
    for reads in by_replica.values():
        assert len(reads) == _model_size(way)
        assert bool((sum(reads) == times).all()), way
        assert all(set(of_rank.unique().tolist()) <= {0, times} for of_rank in reads), way


def _model_size(way: dict[str, Any]) -> int:
    return prod(way["sizes"].get(name, 1) for name in ("tp", "cp", "pp"))


def _model(way: dict[str, Any]) -> str:
    """Name of a way's model among `_Models`."""
    return way.get("family", "qwen3_moe") + " with adapters" * ("lora" in way)


def _sets(rows: Tensor, topk: int) -> Tensor:
    """(t, layers, k) experts of each token and layer, in ascending order."""
    return rows.long().unflatten(1, (-1, topk)).sort().values


def _compare(actual: list[tuple[TensorSlice, Tensor]], expected: dict[str, Tensor], way: str) -> None:
    for tensor_slice, gradient in actual:
        right = expected[tensor_slice.hf_name]
        torch.testing.assert_close(
            gradient,
            right[slices(tensor_slice.hf_box)],
            rtol=1e-3,
            atol=2e-5 * float(right.abs().max()),
            msg=f"{way} {tensor_slice.hf_name}: ".__add__,
        )


def _compare_norms(actual: list[tuple[TensorSlice, Tensor]], expected: dict[str, Tensor]) -> None:
    """Compare all gradients as one vector."""
    pairs = [(gradient.float(), expected[at.hf_name][slices(at.hf_box)]) for at, gradient in actual]
    error = sum(float((gradient - right).square().sum()) for gradient, right in pairs)
    assert error < 0.15**2 * sum(float(right.square().sum()) for _, right in pairs)


def _kept(directory: Path, scratch: Path) -> dict[str, list[float]]:
    """Gradient norms of two updates, with models and optimizers that leave the device, and a checkpoint between."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint
    from engine3d.training.engine import TrainEngine

    learns = OptimizerConfig(lr=1e-2)
    norms: dict[str, list[float]] = {}
    for name, away in (("plain", False), ("offloaded", True)):
        optimizer = learns.model_copy(update={"offload": away})
        config = TrainConfig(dtype="float32", micro_batch_tokens=30, optimizer=optimizer, routing_replay="rollout")
        engine = TrainEngine(directory, config, Layout(), seed=1, offload=away)
        sequences = _sequences(_samples(), _forced(RouteFormat.of(engine.spec.sizes)))
        engine.offload()
        engine.logprobs(sequences)
        norms[name] = [engine.update(sequences, _loss).grad_norm]
        engine.offload()
        if away:
            save(engine, EngineCheckpoint(engine), scratch / "saved", background=False)
            engine.close()
            engine = TrainEngine(directory, config, Layout(), seed=1, load=False, offload=True)
            EngineCheckpoint(engine).load(scratch / "saved")
        norms[name].append(engine.update(sequences, _loss).grad_norm)
        engine.close()
    return norms


@proves("qwen3_moe", "packing routing_replay offload optimizer_offload checkpoints")
@pytest.mark.processes
def test_replay_with_models_that_leave_the_device_and_checkpoints(models: Any, tmp_path: Path) -> None:
    directory, _ = models["qwen3_moe"]
    [norms] = run_distributed(_kept, 1, directory, tmp_path, timeout_s=300)
    first, second = norms["plain"]
    assert first != second
    assert norms == {name: [first, second] for name in norms}


def test_forced_routes_change_gradients_of_routers_too(models: Any) -> None:
    for _, expected in models.values():  # routers are not trained with adapters
        for name, gradient in expected.forced.items():
            if name.endswith("gate.weight"):
                assert float(gradient.abs().max()) > 0
                assert float((gradient - expected.live[name]).abs().max()) > 0.1 * float(gradient.abs().max())


def test_rows_and_sequences_pass_through_a_model_in_one_number() -> None:
    rows, sequences = torch.tensor([0, 5, 2**31 - 1]), torch.tensor([-1, 0, 2**20], dtype=torch.int32)
    assert [tensor.tolist() for tensor in decode(encode(rows, sequences))] == [rows.tolist(), sequences.tolist()]
