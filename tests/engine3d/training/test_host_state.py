"""Allocation of the host memory of an optimizer's state; test_engine tests the updates with it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError
from engine3d.platform.cpu.cpu_platform import CpuPlatform
from engine3d.training import host_state

PARTS = 30


class Slow(CpuPlatform):
    """Gives the third memory once nobody needs it any more, and says when it has given one.

    Attributes:
        ended: true once nobody does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._given = 0
        self.ended: Callable[[], bool] = lambda: not threading.main_thread().is_alive()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self._given += 1
        while self._given == 3 and not self.ended():
            time.sleep(0.01)
        print("taken", flush=True)
        return super().host_memory(nbytes)


class Full(CpuPlatform):
    def host_memory(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("cudaHostAlloc: out of memory\nCompile with what nobody has")


def _state(platform: CpuPlatform) -> host_state.HostState:
    """A state with as many chunks as there are parameters."""
    host_state.platform = platform
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)) for _ in range(PARTS)])
    optimizer = SimpleNamespace(optimizer=adam, is_stub_optimizer=False)
    return host_state.HostState(optimizer, torch.device("cpu"), host_state.CHUNK_BYTES // 256)


def _initialise(inner: Any, parameter: torch.Tensor) -> None:
    inner.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "platform", host_state.platform)


@pytest.mark.processes
def test_a_process_that_ends_takes_no_more() -> None:
    program = "from tests.engine3d.training.test_host_state import Slow, _state; state = _state(Slow())"
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert ended.stdout.count("taken") <= 3 and not ended.stderr


def test_what_is_given_back_is_taken_no_further(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Slow()
    state = _state(slow)
    slow.ended = state._released.is_set
    state.release()
    assert capsys.readouterr().out.count("taken") <= 3
    assert not state._allocating.is_alive()


class CountsInGroups(torch.optim.SGD):
    """Counts steps as Transformer Engine's Adam: in the group, in some versions only where it has parameters."""

    def __init__(self, groups: list[list[torch.nn.Parameter]], *, empty_too: bool) -> None:
        super().__init__([{"params": group} for group in groups], lr=1.0)
        self.empty_too, self.seen = empty_too, dict[int, list[int]]()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            if group["params"] or self.empty_too:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.seen.setdefault(number, []).append(group["step"])
                self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))


@pytest.mark.parametrize("empty_too", [False, True])
def test_every_group_counts_each_step_once(empty_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last chunk has parameters of one group alone."""
    monkeypatch.setattr(host_state, "CHUNK_BYTES", 16384)
    host_state.platform = CpuPlatform()
    sizes: list[list[tuple[int, ...]]] = [[(64, 16), (128, 64)], [(64,), (64,)]]
    groups = [[torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for shapes in sizes]
    adam = CountsInGroups(groups, empty_too=empty_too)
    optimizer = SimpleNamespace(optimizer=adam, is_stub_optimizer=False)
    state = host_state.HostState(optimizer, torch.device("cpu"), 8)
    [(_, chunks)] = state._chunks
    assert len(chunks) > 1 and not {0, 1} <= chunks[-1].parameters.keys()
    for _ in range(3):
        adam.step()
    assert [group["step"] for group in adam.param_groups] == [3, 3]
    assert adam.seen == {0: [1, 1, 2, 2, 3, 3], 1: [1, 1, 2, 2, 3, 3]}
    state.release()


class Decays(torch.optim.SGD):
    """Has a state of two numbers for each of a parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.ones(parameter.shape)).mul_(0.5)


def _chunked(*, overlap: bool) -> tuple[Decays, list[host_state._StateChunk], host_state.HostState]:
    """Several chunks of one or two parameters, which have a state."""
    host_state.platform = CpuPlatform()
    sizes = [(1024,), (512,), (512,), (16,), (1000,), (600,)]
    adam = Decays([{"params": [torch.nn.Parameter(torch.ones(size)) for size in sizes]}], lr=1.0)
    optimizer = SimpleNamespace(optimizer=adam, is_stub_optimizer=False)
    state = host_state.HostState(optimizer, torch.device("cpu"), 8, overlap=overlap)
    adam.step()
    state.settle()
    [(_, chunks)] = state._chunks
    assert [len(list(chunk.all_parameters())) for chunk in chunks] == [1, 1, 2, 1, 1]
    return adam, chunks, state


@pytest.mark.parametrize("overlap", [False, True])
def test_a_watch_is_called_for_a_chunk_at_a_time(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "CHUNK_BYTES", 10000)
    adam, chunks, state = _chunked(overlap=overlap)
    shown: list[list[torch.Tensor]] = []

    def watch(updated: Any) -> None:
        chunk = chunks[len(shown)]
        shown.append([parameter for parameter, _ in updated])
        assert chunk.host is not None
        for parameter, its_state in updated:
            assert its_state is adam.state[parameter]
            for tensor in its_state.values():  # updated, and not in host memory
                assert tensor.eq(0.25).all()
                assert tensor.untyped_storage().data_ptr() != chunk.host.untyped_storage().data_ptr()

    state.watch = watch
    adam.step()
    assert [[id(parameter) for parameter in of_one] for of_one in shown] == [
        [id(parameter) for parameter in chunk.all_parameters()] for chunk in chunks
    ]
    state.changes()
    adam.step()
    assert len(shown) == len(chunks)
    state.release()


@pytest.mark.parametrize("overlap", [False, True])
def test_no_copy_waits_for_the_host_where_all_have_a_buffer(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one is onloaded while another is updated, into the buffer of an earlier one."""
    monkeypatch.setattr(host_state, "CHUNK_BYTES", 10000)
    adam, chunks, state = _chunked(overlap=overlap)
    fetch, onload = host_state._ChunkTransfers._fetch, host_state._ChunkTransfers.onload
    fetched: list[int] = []
    by_then: list[list[int]] = []

    def watched_fetch(transfers: host_state._ChunkTransfers, number: int) -> None:
        fetch(transfers, number)
        fetched.append(number)

    def watched_onload(transfers: host_state._ChunkTransfers, number: int) -> None:
        onload(transfers, number)
        by_then.append([*fetched])

    monkeypatch.setattr(host_state._ChunkTransfers, "_fetch", watched_fetch)
    monkeypatch.setattr(host_state._ChunkTransfers, "onload", watched_onload)
    adam.step()
    every = list(range(len(chunks)))
    assert by_then == [every if overlap else every[: number + 2] for number in every]
    state.settle()
    assert all(tensor.eq(0.25).all() for values in adam.state.values() for tensor in values.values())
    state.release()


def test_why_there_is_no_memory_is_one_line() -> None:
    state = _state(Full())
    with pytest.raises(
        EngineError, match=r"^host memory: .* \(cudaHostAlloc: out of memory\); set offload=false [^\n]*$"
    ):
        state.make(_initialise)
