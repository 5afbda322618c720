"""An engine in several processes of this machine, as if each were on a host of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine3d import rendezvous
from engine3d.rollout import EngineMember, EngineShard, RolloutConfig, RolloutEngine

_LOOPBACK = "127.0.0.1"


class PartedEngine:
    """An engine as many parts, or whole as one; its parts meet over the loopback interface.

    Args:
        model: its directory.
        config: of the engine.
        hosts: how many parts it has.
        devices: of all of its ranks; empty for CPU slots.
        log_path: of the first part; of the others beside it.
        weight_sources: as of `RolloutEngine`.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        hosts: int,
        devices: Sequence[int] = (),
        log_path: Path | None = None,
        weight_sources: Sequence[Path | None] = (),
    ) -> None:
        self._store = rendezvous.serve(rendezvous.listen(_LOOPBACK)) if hosts > 1 else None
        address = rendezvous.tcp_address(self._store.host, self._store.port) if self._store is not None else ""
        share = config.tp // hosts
        shards = [EngineShard(index, hosts, address) for index in range(hosts)]
        devices_by_host = [tuple(devices[index * share : (index + 1) * share]) for index in range(hosts)]
        logs = [log_path and log_path.with_stem(f"{log_path.stem}-{index}") for index in range(hosts)]
        self.first = RolloutEngine(model, config, devices_by_host[0], log_path, weight_sources, shard=shards[0])
        self._others = [
            EngineMember(model, config, devices_by_host[other.index], logs[other.index], weight_sources, shard=other)
            for other in shards[1:]
        ]

    def start(self) -> RolloutEngine:
        """Start all parts; the one that takes calls."""
        with ThreadPoolExecutor() as pool:
            starts = [pool.submit(member.start) for member in (self.first, *self._others)]
            for start in starts:
                start.result()
        return self.first

    def shutdown(self) -> None:
        """End all parts."""
        for member in (self.first, *self._others):
            member.shutdown()
