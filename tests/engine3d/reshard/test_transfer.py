"""Whole transfers: Megatron-Core's ranks on every layout, into SGLang engines of several layouts at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from engine3d.models import load_model_spec
from engine3d.reshard.coordinate import Orders, coordinate
from engine3d.reshard.memory import SharedShards
from engine3d.reshard.pieces import Link
from engine3d.reshard.shards import Place
from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.engine3d.reshard.trainer_ranks import TrainerRanks, trainer_ranks
from tests.tiny_rollout import TINY_ROLLOUT

pytestmark = pytest.mark.processes

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"ep": 2}, {"tp": 2}, {"pp": 2}, {}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}, {"ep": 4}, {"tp": 4}, {"tp": 2, "ep": 2, "etp": 2}],
}
ENGINES = ({"tp": 1, "ep": 1}, {"tp": 2, "ep": 1}, {"tp": 2, "ep": 2})
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)


@pytest.fixture(scope="module")
def engines(tiny_model_dirs: tuple[Path, Path]) -> Iterator[list[RolloutEngine]]:
    """One engine of each layout, all with other weights than the trainer's."""
    started = [RolloutEngine(tiny_model_dirs[1], TINY_ROLLOUT.model_copy(update=sizes)) for sizes in ENGINES]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(RolloutEngine.start, started))
        yield started
    finally:
        for engine in started:
            engine.shutdown()


@dataclass
class Connected:
    """A trainer and engines with a plan between them."""

    trainer: TrainerRanks
    engines: Sequence[RolloutEngine]
    orders: Orders

    def transfer(self, version: int, *, flush_cache: bool = True) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.begin_weights(version), self.engines))
            receiving = [
                pool.submit(engine.call_ranks, "receive", "receive", version=version)
                for engine in self.engines
                if self.orders.engines_receive
            ]
            sent = self.trainer.call("send", version=version)
            for each in receiving:
                each.result()
            list(pool.map(lambda engine: engine.seal_weights(version), self.engines))
            for engine in self.engines:
                engine.commit_weights(version, flush_cache)
        return sent


def _connect(
    trainer: TrainerRanks,
    engines: Sequence[RolloutEngine],
    sources: list[SharedShards],
    engine_places: Sequence[Sequence[Place]],
    model: Path,
    store: TCPStore,
    group: str,
    **options: Any,
) -> Connected:
    targets: list[SharedShards] = []
    for number, (engine, places) in enumerate(zip(engines, engine_places, strict=True)):
        targets += engine.share_weights(f"engine {number}", len(targets), places)
    tensors = {name: tensor.shape for name, tensor in load_model_spec(model).hf_tensors.items()}
    orders = coordinate(
        sources, targets, tensors, store=("127.0.0.1", store.port), group=group, timeout_s=60.0, **options
    )
    receive = iter(orders.receive)
    with ThreadPoolExecutor() as pool:
        connecting = [
            pool.submit(
                engine.call_ranks, "connect", "connect", orders=list(itertools.islice(receive, engine.config.tp))
            )
            for engine in engines
        ]
        trainer.call("connect", orders.send)
        for each in connecting:
            each.result()
    return Connected(trainer, engines, orders)


def _differences(engines: Sequence[RolloutEngine], export: Path) -> list[str]:
    return [str(found) for engine in engines for rank in engine.verify_weights(export) for found in rank]


def _places(node: str, slots: Sequence[int]) -> list[Place]:
    return [Place(node, f"cpu:{slot}") for slot in slots]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_engines_hold_bit_for_bit_what_sglang_loads_of_an_export(
    world_size: int, engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """One engine on the trainer's devices, one beside them on the node, one on another node."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with trainer_ranks(tiny_model_dirs[0], world_size, tmp_path) as trainer:
        for number, sizes in enumerate(LAYOUTS[world_size]):
            sources = trainer.call("build", _places("here", range(world_size)), sizes=sizes)
            # Devices of the trainer's, of the trainer's node, and of another.
            places = [_places("here", [0]), _places("here", [8, 9]), _places("there", [0, 1])]
            connected = _connect(
                trainer,
                engines,
                sources,
                places,
                tiny_model_dirs[0],
                store,
                f"{world_size}-{number}",
                staging_bytes=1 << 16,
            )
            plan = connected.orders.plan
            assert plan.bytes_moved == plan.bytes_needed > 0
            assert {transfer.link for transfer in plan.transfers} == {Link.DEVICE, Link.NODE, Link.NETWORK}
            for seed in (1, 2):
                trainer.call("change", seed=seed)
                export = tmp_path / f"export-{number}-{seed}"
                trainer.call("export", directory=export)
                assert _differences(engines, export)
                connected.transfer(10 * number + seed)
                assert _differences(engines, export) == [], sizes
            generations = [engine.generate(PROMPTS, GREEDY) for engine in engines]
            assert {g.weight_version for each in generations for group in each for g in group} == {10 * number + 2}
            tokens = [[group[0].token_ids for group in each] for each in generations]
            assert tokens[0] == tokens[1] == tokens[2]
