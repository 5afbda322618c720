"""Workers of the worker group tests: small stand-ins for a role, real processes under real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from engine3d.errors import UserError
from hybridflow.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PP_ONLY, THREE_D_PROTO, register
from hybridflow.rank_process import WorkerContext


class Arithmetic:
    def __init__(self, context: WorkerContext, factor: int) -> None:
        self.context, self.factor = context, factor
        print(f"rank {context.rank} speaks")

    @register(THREE_D_PROTO)
    def multiply(self, numbers: list[int], offset: int = 0) -> list[int]:
        return [number * self.factor + offset for number in numbers]

    @register(THREE_D_PROTO)
    def where(self, numbers: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        return [(self.context.rank, tuple(numbers))]

    @register(ONE_TO_ALL, blocking=True)
    def environment(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register(ALL_TO_ALL)
    def echo(self, value: int) -> tuple[int, int]:
        return self.context.rank, value

    @register(THREE_D_PP_ONLY)
    def stage(self) -> list[int]:
        return [self.context.coordinates.pp]

    def private(self) -> None: ...


class Failing:
    """Every rank answers, but the one that is told to fail."""

    def __init__(self, context: WorkerContext, fail_at_start: int = -1) -> None:
        self.context = context
        if context.rank == fail_at_start:
            raise UserError("config.json of model /no/such: no key hidden_size")

    @register(ONE_TO_ALL)
    def raise_on(self, rank: int) -> int:
        if self.context.rank == rank:
            raise ValueError("sample 17 has no\nresponse tokens")
        time.sleep(60)  # a collective that waits for the rank that failed
        return 0

    @register(ONE_TO_ALL)
    def refuse_on(self, rank: int) -> None:
        if self.context.rank == rank:
            raise UserError("prompt 3 has 40 tokens, the context holds 32")
        raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:4242")

    @register(ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")

    @register(ONE_TO_ALL)
    def exit_on(self, rank: int) -> None:
        if self.context.rank == rank:
            os._exit(3)
        time.sleep(60)

    @register(ONE_TO_ALL)
    def hang_on(self, rank: int) -> int:
        if self.context.rank == rank:
            self._wait_for_nobody()
        return self.context.rank

    @register(THREE_D_PROTO)
    def identity(self, numbers: list[int]) -> list[int]:
        return numbers

    @register(THREE_D_PROTO)
    def lose(self, numbers: list[int]) -> list[int]:
        if self.context.rank == 1:
            raise ValueError("no number here")
        return numbers

    @register(ONE_TO_ALL)
    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    def _wait_for_nobody(self) -> None:
        time.sleep(1000)
