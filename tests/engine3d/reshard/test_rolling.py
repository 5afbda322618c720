"""Weights to one engine after another: others go on, and each token is of the version that its engine served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine3d.models import load_model_spec
from engine3d.rendezvous import listen, serve, tcp_address
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.plan.coordinate import Orders, coordinate
from engine3d.rollout import RolloutEngine, SamplingConfig
from engine3d.rollout.requests import Request
from tests.engine3d.rollout.test_stream import _all_ended, _assert_drawn_by_their_versions
from tests.support.tiny_models import MAX_POSITIONS
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import TrainerRanks, trainer_ranks
from tests.support.transfers import differences, locations, started

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11]]
LONG = SamplingConfig(max_new_tokens=MAX_POSITIONS - 16, ignore_eos=True)
_ATTEMPTS = 10
"""Attempts at an event in the middle of responses, which may come too late."""


@pytest.fixture(scope="module")
def engines(tiny_model_dirs: tuple[Path, Path]) -> Iterator[list[RolloutEngine]]:
    config = TINY_ROLLOUT.model_copy(update={"context_length": MAX_POSITIONS})
    with started([RolloutEngine(tiny_model_dirs[0], config) for _ in range(2)]) as engines:
        yield engines


def _connect(
    trainer: TrainerRanks,
    engines: Sequence[RolloutEngine],
    sources: Sequence[SharedShards],
    where: Sequence[list[Location]],
    model: Path,
    store: str,
) -> list[Orders]:
    """A transfer of its own for each engine."""
    tensors = {name: tensor.shape for name, tensor in load_model_spec(model).hf_tensors.items()}
    shared = [engine.share_weights(f"engine {n}", n, where[n]) for n, engine in enumerate(engines)]
    orders = [
        coordinate(
            sources,
            targets,
            tensors,
            store=lambda: store,
            group=f"{where[number][0].node}-{number}",
            staging_bytes=1 << 16,
            timeout_s=60.0,
        )
        for number, targets in enumerate(shared)
    ]
    with ThreadPoolExecutor() as pool:
        connecting = [
            pool.submit(engine.connect_weights, transfer.receive)
            for engine, transfer in zip(engines, orders, strict=True)
        ]
        trainer.call("connect_each", [[transfer.send[rank] for transfer in orders] for rank in trainer.ranks])
        for connected in connecting:
            connected.result()
    return orders


def _transfer(trainer: TrainerRanks, engine: RolloutEngine, orders: Orders, transfer: int, version: int) -> None:
    """Bring a version to one engine; responses under way go on with it."""
    engine.begin_weights(version, in_flight="recompute")
    with ThreadPoolExecutor() as pool:
        receiving = pool.submit(engine.receive_weights, version)
        trainer.call("send", version=version, transfer=transfer)
        receiving.result()
    engine.seal_weights(version)
    engine.commit_weights(version)


def _tokens(engine: RolloutEngine) -> int:
    return sum(len(response.token_ids) for response in engine.responses_in_flight().values())


@pytest.mark.long
def test_one_engine_after_another_gets_new_weights_while_the_other_goes_on(
    engines: list[RolloutEngine], tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Transfer over memory of the node, and over messages from another: a group for each of the engines."""
    store, version, previous = serve(listen("127.0.0.1")), 0, tiny_model_dirs[0]
    address = tcp_address("127.0.0.1", store.port)
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path) as trainer:
        sources = trainer.call("build", locations("here", 0, 1), sizes={"ep": 2})
        for node in ("here", "there"):
            where = [locations(node, 8), locations(node, 9)]
            orders = _connect(trainer, engines, sources, where, tiny_model_dirs[0], address)
            assert all(transfer.engines_receive == (node == "there") for transfer in orders)
            assert all(len(transfer.plan.transfers) == 2 for transfer in orders)  # both ranks send to either
            seen: set[tuple[str, int]] = set()
            for _ in range(_ATTEMPTS):
                version += 1
                trainer.call("change", seed=version)
                export = tmp_path / f"export-{version}"
                trainer.call("export", directory=export)
                samples = [range(100 * version + 10 * number, 100 * version + 10 * number + 2) for number in (0, 1)]
                for engine, ids in zip(engines, samples, strict=True):
                    engine.submit([Request(*prompt, LONG) for prompt in zip(ids, PROMPTS, strict=True)])
                for number, engine in enumerate(engines):
                    other = engines[1 - number]
                    before = _tokens(other)
                    _transfer(trainer, engine, orders[number], number, version)
                    if 0 < before < _tokens(other):
                        seen.add(("went on", 1 - number))
                assert differences(engines, export) == []
                for number, engine in enumerate(engines):
                    responses = _all_ended(engine, *samples[number])
                    for prompt, response in zip(PROMPTS, responses.values(), strict=True):
                        response.versions[:] = [served - version + 1 for served in response.versions]
                        assert response.versions == sorted(response.versions)
                        _assert_drawn_by_their_versions([previous, export], prompt, response)
                        if set(response.versions) == {0, 1}:
                            seen.add(("of both versions", number))
                previous = export
                if seen == {(what, number) for what in ("went on", "of both versions") for number in (0, 1)}:
                    break
            else:
                pytest.fail(f"{node}: weights never changed in the middle of responses, only {sorted(seen)}")
