"""A trainer and engines with a plan between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.models import load_model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings, Precision, served_shapes
from engine3d.rendezvous import listen, serve, tcp_address
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.plan.coordinate import Orders, coordinate
from engine3d.rollout import RolloutEngine
from engine3d.rollout.host.stream import InFlightPolicy
from engine3d.rollout.scheduler.rank import AdapterBase
from tests.support.trainer_ranks import TrainerRanks
from tests.support.warm import warm_starts


def locations(node: str, *slots: int) -> list[Location]:
    return [Location(node, f"cpu:{slot}") for slot in slots]


@contextmanager
def started(engines: Sequence[RolloutEngine], *, afresh: bool = False) -> Iterator[list[RolloutEngine]]:
    """The engines, started at the same time, until the block ends.

    Args:
        engines: that are not started.
        afresh: as the interpreter starts them, for who looks at the tree of their processes.
    """
    try:
        with nullcontext() if afresh else warm_starts(), ThreadPoolExecutor() as pool:
            list(pool.map(RolloutEngine.start, engines))
        yield list(engines)
    finally:
        for engine in engines:
            engine.shutdown()


def differences(engines: Sequence[RolloutEngine], export: Path) -> list[str]:
    """Return where the engines differ from SGLang's loader on an export."""
    return [str(mismatch) for engine in engines for rank in engine.verify_weights(export) for mismatch in rank]


@dataclass
class Connected:
    """A trainer and engines with a plan between them."""

    trainer: TrainerRanks
    engines: Sequence[RolloutEngine]
    orders: Orders

    def write(self, version: int, in_flight: InFlightPolicy = "wait") -> list[Any]:
        """Begin a version and write it into the engines; what each rank of the trainer sent."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.begin_weights(version, in_flight=in_flight), self.engines))
            receiving = [
                pool.submit(engine.receive_weights, version) for engine in self.engines if self.orders.engines_receive
            ]
            sent = self.trainer.call("send", version=version)
            for engine in receiving:
                engine.result()
        return sent

    def transfer(self, version: int, *, flush_cache: bool = True, base: AdapterBase | None = None) -> list[Any]:
        sent = self.write(version)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.seal_weights(version, flush_cache, base), self.engines))
        for engine in self.engines:
            engine.commit_weights(version)
        return sent


def connect(
    trainer: TrainerRanks,
    engines: Sequence[RolloutEngine],
    sources: Sequence[SharedShards],
    engine_places: Sequence[Sequence[Location]],
    model: Path,
    precision: Precision | None = None,
    adapters: LoraConfig | None = None,
    alone: bool = False,
    fp8: Fp8Settings = NOTHING_LEFT_OUT,
    **options: Any,
) -> Connected:
    """Plan the transfers to the engines, and make everyone ready.

    Args:
        trainer: of which the sources are.
        engines: of one model.
        sources: the memory of the trainer's ranks.
        engine_places: of the ranks of each engine.
        model: directory of the model.
        precision: of the engines.
        adapters: that the engines get apart from the model.
        alone: True to send these alone.
        fp8: matrices that trainer and engines leave in their dtype.
        options: of `coordinate`.
    """
    targets: list[SharedShards] = []
    for number, (engine, its_places) in enumerate(zip(engines, engine_places, strict=True)):
        targets += engine.share_weights(f"engine {number}", len(targets), its_places)
    spec = fp8.applied(load_model_spec(model))
    tensors = {} if alone else served_shapes(spec, precision)
    if adapters is not None:
        tensors |= {name: tensor.shape for name, tensor in AdapterSpec.of(spec, adapters).hf_tensors.items()}
    sources, targets = ([shared.only(tensors) if alone else shared for shared in side] for side in (sources, targets))
    store = serve(listen("127.0.0.1"))
    orders = coordinate(
        sources,
        targets,
        tensors,
        store=lambda: tcp_address("127.0.0.1", store.port),
        staging_bytes=1 << 16,
        timeout_s=60.0,
        **options,
    )
    receive = iter(orders.receive)
    with ThreadPoolExecutor() as pool:
        connecting = [
            pool.submit(engine.connect_weights, list(itertools.islice(receive, engine.config.tp))) for engine in engines
        ]
        trainer.call("connect", orders.send)
        for channel in connecting:
            channel.result()
    return Connected(trainer, engines, orders)
