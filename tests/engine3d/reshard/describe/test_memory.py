"""Memory that other processes map: what one writes, the other reads."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from engine3d.errors import EngineError
from engine3d.platform import platform
from engine3d.platform.cpu import memory as cpu_memory
from engine3d.platform.memory_handles import CpuMemoryHandle
from tests.support.distributed import run_distributed

on_cpu = pytest.mark.skipif(platform.device_type != "cpu", reason="shared memory of a CPU")


def _names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _share_or_map(directory: str) -> list[float]:
    """Rank 0 shares a parameter's memory and rank 1 writes into it; each waits for a file of the other."""
    pipe_there, pipe_back = Path(directory) / "there", Path(directory) / "back"
    rank = int(os.environ["RANK"])
    device = platform.device(rank % max(1, platform.gpus))
    if rank == 0:
        memory = torch.arange(1000, dtype=torch.float32, device=device)
        parameter = torch.nn.Parameter(memory.view(10, 100))
        handle = platform.share_memory(memory.untyped_storage())
        assert platform.share_memory(parameter.untyped_storage()) == handle
        pipe_there.write_bytes(pickle.dumps(handle))
        pipe_back.read_bytes()
        return [*memory[:4].tolist(), *parameter[0, :4].tolist()]
    mapped = platform.map_memory(pickle.loads(pipe_there.read_bytes()))
    tensor = torch.empty(0, device=device).set_(mapped)
    before = tensor[:4].tolist()
    tensor[1:3] = torch.tensor([-1.0, -2.0], device=device)
    platform.synchronize()
    pipe_back.write_bytes(b"written")
    return before


@pytest.mark.processes
def test_another_process_writes_into_a_parameter(tmp_path: Path) -> None:
    for name in ("there", "back"):
        os.mkfifo(tmp_path / name)
    owner, writer = run_distributed(_share_or_map, 2, str(tmp_path), timeout_s=300)
    assert writer == [0, 1, 2, 3]
    assert owner == [0, -1, -2, 3] * 2


@on_cpu
def test_every_view_moves_with_its_storage() -> None:
    memory = torch.arange(64, dtype=torch.bfloat16)
    views = [memory[3:9], memory.view(8, 8), torch.nn.Parameter(memory.view(8, 8).t())]
    before = [view.detach().clone() for view in views]
    distances = [view.data_ptr() - memory.data_ptr() for view in views]
    platform.share_memory(memory.untyped_storage())
    assert memory.untyped_storage().is_shared()
    assert [view.data_ptr() - memory.data_ptr() for view in views] == distances
    assert all(torch.equal(view.detach(), old) for view, old in zip(views, before, strict=True))


@on_cpu
def test_sharing_twice_gives_the_same_handle_and_own_memory_is_itself() -> None:
    storage = torch.zeros(100).untyped_storage()
    handle = platform.share_memory(storage)
    assert platform.share_memory(storage) == handle
    assert platform.map_memory(pickle.loads(pickle.dumps(handle))) is storage


def _share_until_killed(pipe: Connection) -> None:
    memory = torch.zeros(1000)
    pipe.send(platform.share_memory(memory.untyped_storage()))
    signal.pause()


@pytest.mark.processes
@on_cpu
def test_a_process_that_is_gone_is_named() -> None:
    before = _names()
    ours, theirs = multiprocessing.Pipe()
    # Forked, since torch takes seconds to import.
    process = multiprocessing.get_context("fork").Process(target=_share_until_killed, args=(theirs,), daemon=True)
    process.start()
    handle = ours.recv()
    mapped = torch.empty(0).set_(platform.map_memory(handle))
    mapped[5] = 1
    process.kill()
    process.join()
    # What is mapped stays, and nothing else does.
    assert mapped[5] == 1
    assert not {name for name in _names() - before if name.startswith(f"torch_{process.pid}_")}
    del mapped
    with pytest.raises(EngineError, match=f"process {process.pid}, whose 4000 bytes were to be mapped, is gone"):
        platform.map_memory(handle)


@on_cpu
def test_a_descriptor_that_was_used_again_is_not_mapped() -> None:
    handle = platform.share_memory(torch.zeros(10).untyped_storage())
    assert isinstance(handle, CpuMemoryHandle)
    other = CpuMemoryHandle(pid=handle.pid, nbytes=handle.nbytes, fd=0, inode=handle.inode)
    with pytest.raises(EngineError, match=f"process {handle.pid}"):
        platform.map_memory(other)


@on_cpu
def test_empty_memory_can_be_shared() -> None:
    handle = platform.share_memory(torch.UntypedStorage(0))
    assert platform.map_memory(handle).nbytes() == 0


@on_cpu
def test_shared_memory_that_is_too_small_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        f_bavail = 3
        f_frsize = 4096

    monkeypatch.setattr(cpu_memory.os, "statvfs", lambda path: Small())
    with pytest.raises(EngineError, match="/dev/shm has 12288 bytes free of the 40000 that"):
        platform.share_memory(torch.zeros(10000).untyped_storage())


def test_a_node_and_its_devices_have_names() -> None:
    assert platform.node == type(platform)().node
    # A GPU has one name whatever the slot; CPU slots are told apart by their number.
    assert (platform.device_name(1) != platform.device_name(2)) == (platform.device_type == "cpu")
