"""Workers of the worker group tests: small stand-ins for a role, real processes under real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.progress import progress
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Arguments,
    Protocol,
    RankGrid,
    register,
    split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hybridflow.batch.sample_batch import SampleBatch
    from hybridflow.batch.worker_output import Columns


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

    @register(ONE_TO_ALL)
    def rest(self, until: Path | None = None) -> int:
        wait_until(until)
        return self.context.rank

    @register(THREE_D_PP_ONLY)
    def stage(self) -> list[int]:
        return [self.context.coordinates.pp]

    def private(self) -> None: ...


class Model:
    """Makes and reads batches as roles do: tokens follow from the ids of samples, so that every figure can be told."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(DP_PROTO)
    def generate(self, samples: list[int], *, longest: int) -> SampleBatch:
        return batch_of(samples, longest)

    @register(THREE_D_PROTO)
    def logprobs(self, batch: SampleBatch, *, until: Path | None = None) -> Columns | None:
        """Return a tenth of each response token, once a file is there. Only the last stage returns it."""
        from hybridflow.batch.worker_output import Columns

        wait_until(until)
        last = self.context.layout.pp - 1
        return Columns({"logprobs": response_tokens(batch) / 10}) if self.context.coordinates.pp == last else None

    @register(THREE_D_PROTO)
    def returns(self, batch: SampleBatch) -> Columns:
        from hybridflow.batch.worker_output import Columns

        assert batch.ref_logprobs is not None and batch.rewards is not None
        returns = batch.ref_logprobs + batch.rewards.repeat_interleave(batch.response_lengths)
        return Columns({"returns": returns}, {"total": batch.padded(returns).sum(dim=1)}, self.context.rank)

    @register(THREE_D_PROTO)
    def seen(self, batch: SampleBatch) -> list[tuple[int, dict[str, list[Any]]]]:
        """Return the columns of each sample that this rank got."""
        rows = [
            {name: column.tolist() for name, column in batch.select([row]).columns().items()}
            for row in range(len(batch))
        ]
        return [(self.context.rank, row) for row in rows]

    @register(THREE_D_PROTO, routes=True)
    def routes(self, batch: SampleBatch) -> list[tuple[int, int, list[Any]]]:
        """Return the rank, the id and the routes of each sample that this rank got."""
        assert batch.stored_routes is not None
        return [
            (self.context.rank, sample, rows.tolist())
            for sample, rows in zip(batch.sample_ids.tolist(), batch.stored_routes.samples, strict=True)
        ]

    @register(THREE_D_PROTO)
    def ids(self, batch: SampleBatch) -> list[int]:
        return batch.sample_ids.tolist()

    @register(ONE_TO_ALL)
    def undivided_ids(self, batch: SampleBatch) -> list[int]:
        return batch.sample_ids.tolist()

    @register(THREE_D_PROTO)
    def fail(self, batch: SampleBatch) -> Columns:
        from hybridflow.batch.worker_output import Columns

        return Columns({"logprobs": batch.logprobs[self.context.rank :]})  # rank 1 has one too few


def wait_until(file: Path | None) -> None:
    """Wait until a file is there; one next to it says that this process waits."""
    if file is not None:
        file.with_name(f"{file.name}.{os.getpid()}").touch()
        while not file.exists():
            time.sleep(0.01)


def response_tokens(batch: SampleBatch) -> Tensor:
    """(R,)"""
    return batch.tokens[batch.is_response]


def batch_of(samples: Sequence[int], longest: int) -> SampleBatch:
    """Sample i has 1 + i % 3 prompt tokens and 1 + i % longest response tokens, all of them i."""
    from hybridflow.batch.sample_batch import SampleBatch

    responses = [[sample] * (1 + sample % longest) for sample in samples]
    return SampleBatch.from_generations(
        prompts=[[sample] * (1 + sample % 3) for sample in samples],
        responses=responses,
        logprobs=[[-float(sample)] * len(response) for sample, response in zip(samples, responses, strict=True)],
        sample_ids=samples,
        group_ids=[sample // 2 for sample in samples],
        prompt_indices=[sample // 2 for sample in samples],
        policy_versions=[1] * len(samples),
        finish_reasons=["stop"] * len(samples),
    )


class Computing:
    """Takes the time that a test gives it on its devices."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._offloads = self._onloads = 0
        self._keeps = False

    @register(ONE_TO_ALL)
    def keep(self) -> None:
        """Give nothing back from now on."""
        self._keeps = True

    @register(THREE_D_PROTO, exclusive=True)
    def compute(self, batch: SampleBatch, *, factor: int, until: Path | None = None) -> list[list[int]]:
        """Return `factor` times each response token, once a file is there."""
        wait_until(until)
        return [[factor * token for token in response] for response in batch.responses()]

    @register(ONE_TO_ALL)
    def offloads(self) -> int:
        """Number of offloads."""
        return self._offloads

    @register(ONE_TO_ALL, exclusive=True)
    def die_on(self, rank: int) -> None:
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self._wait_for_nobody()

    @register(ONE_TO_ALL, exclusive=True)
    def hang(self) -> None:
        self._wait_for_nobody()

    @register(ONE_TO_ALL, exclusive=True)
    def offload(self) -> None:
        if self._keeps:
            raise RuntimeError("no room in host memory")
        self._offloads += 1

    @register(ONE_TO_ALL, exclusive=True)
    def onload(self) -> None:
        self._onloads += 1

    @register(ONE_TO_ALL)
    def onloads(self) -> int:
        """Number of onloads."""
        return self._onloads

    def _wait_for_nobody(self) -> None:
        time.sleep(1000)


def _reversed_replicas(grid: RankGrid, arguments: Arguments) -> list[Arguments]:
    """The first rows to the last replica."""
    shards = [split(value, grid.layout.dp)[::-1] for value in arguments.positional]
    return [
        Arguments(tuple(shard[coordinates.dp] for shard in shards), arguments.keyword)
        for _, coordinates in grid.layout.ranks()
    ]


def _second_of_first_stages(grid: RankGrid) -> list[int]:
    return [grid.layout.rank(tp=1, dp=dp) for dp in reversed(range(grid.layout.dp))]


OWN = Protocol("OWN", _reversed_replicas, _second_of_first_stages, cuts_into=lambda grid: grid.layout.dp)
"""Protocol that a user writes."""


class Remembering:
    """Every method keeps what its rank got, and returns the rank; each is named after its protocol."""

    def __init__(self, context: WorkerContext) -> None:
        self._rank = context.rank
        self._got: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @register(ONE_TO_ALL)
    def one_to_all(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(ALL_TO_ALL)
    def all_to_all(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(DP_PROTO)
    def dp(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(THREE_D_PROTO)
    def three_d(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(THREE_D_ALL_MICRO_DP)
    def micro_dp(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(THREE_D_PP_ONLY)
    def stages(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(OWN)
    def users(self, *data: Any, **undivided: Any) -> list[int]:
        return self._keep(data, undivided)

    @register(ONE_TO_ALL, blocking=True)
    def got(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._got

    def _keep(self, data: tuple[Any, ...], undivided: dict[str, Any]) -> list[int]:
        self._got = data, undivided
        return [self._rank]


FULL = (
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.58 GiB is "
    "free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this process has 126.20 GiB "
    "memory in use. Of the allocated memory 120.07 GiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch "
    "but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management "
    " (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)
"""Message of torch 2.11."""


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
        time.sleep(1000)  # a collective that waits for the rank that failed
        return 0

    @register(ONE_TO_ALL)
    def fill_on(self, rank: int) -> None:
        import torch

        if self.context.rank == rank:
            raise torch.OutOfMemoryError(FULL)
        time.sleep(1000)

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
        time.sleep(1000)

    @register(ONE_TO_ALL)
    def hang_on(self, rank: int) -> int:
        if self.context.rank == rank:
            self._wait_for_nobody()
        return self.context.rank

    @register(ONE_TO_ALL)
    def do_rounds(self, done: list[int], pause_s: float) -> None:
        """Do `done[rank]` rounds on each rank, with a pause after each; then the ranks wait for each other."""
        rounds = done[self.context.rank]
        for _ in range(rounds):
            time.sleep(pause_s)
            progress.batch_done()
        if rounds < max(done):
            self._wait_for_nobody()
        if min(done) < max(done):
            time.sleep(1000)

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


def cost_moments(batch: SampleBatch) -> Columns:
    """Return the moments of the values and returns of a part, as a dataflow does."""
    from hybridflow.algorithms.losses.value import value_moments
    from hybridflow.batch.worker_output import Columns

    assert batch.cost_values is not None and batch.cost_returns is not None
    return Columns(note=value_moments(batch.cost_values, batch.cost_returns, batch.response_mask))
