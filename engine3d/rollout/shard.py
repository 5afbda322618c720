"""One host's shard of an engine whose tensor-parallel ranks are on several hosts.

Shard 0 has the engine's first ranks and SGLang's front end: it takes and answers every call (`RolloutEngine`). The
others (`EngineMember`) run ranks, which SGLang reaches through its own process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from engine3d.errors import EngineError, UserError
from engine3d.rendezvous import join
from engine3d.rollout.config import RolloutConfig

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_EVERY = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class EngineShard:
    """This host's shard of an engine.

    Args:
        index: of this host among those of the engine; its ranks are the `index`-th share of the engine's.
        count: how many hosts the engine has.
        store: address of a store (`engine3d.rendezvous`) for the shards of this engine alone; "" for an engine on one
            host.
    """

    index: int = 0
    count: int = 1
    store: str = ""

    def ranks(self, config: RolloutConfig) -> int:
        """The engine's ranks on this host.

        Raises:
            UserError: the hosts cannot have as many each, or nothing is said of where they meet.
        """
        if not 0 <= self.index < self.count:
            raise UserError(
                f"shard {self.index} of a rollout engine on {self.count} hosts, expected one below {self.count}"
            )
        if config.tp % self.count:
            raise UserError(f"a rollout engine of tp {config.tp} on {self.count} hosts, expected as many ranks on each")
        if self.count > 1 and not self.store:
            raise UserError(f"a rollout engine on {self.count} hosts without a store at which they meet")
        return config.tp // self.count


SINGLE_HOST = EngineShard()
"""Shard of an engine on one host: all of it."""


class ShardCalls:
    """The calls of an engine's client, in step on all hosts: other shards wait until shard 0 has done a call.

    So each call ends on every host, and fails on the host whose shard of the engine has died.

    Args:
        shard: of this host.
        timeout_s: until the store is there.
    """

    def __init__(self, shard: EngineShard, timeout_s: float) -> None:
        self._shard, self._timeout_s = shard, timeout_s
        self._store: Store | None = None
        self._numbers = itertools.count()

    def done(self) -> None:
        """Shard 0 has done the next call."""
        if self._shard.count > 1:
            self._joined().set(self._key(), "")

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until shard 0 has done the next call.

        Args:
            check: is called once a second, and raises where there is nothing to wait for.

        Raises:
            EngineError: shard 0 is gone.
        """
        key = self._key()
        while True:
            check()
            try:
                self._joined().wait([key], _LOOK_EVERY)
                return
            except RuntimeError as error:  # which torch raises for the limit, and for a store that is gone
                if "timeout" not in str(error).lower():
                    raise EngineError("rollout engine: the connection to its first host was closed") from error

    def _key(self) -> str:
        return f"call/{next(self._numbers)}"

    def _joined(self) -> Store:
        if self._store is None:
            self._store = join(self._shard.store, self._timeout_s)
        return self._store
