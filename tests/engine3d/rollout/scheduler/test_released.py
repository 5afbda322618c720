"""Waits of schedulers while memory is released or generation is paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from engine3d.rollout.scheduler import plugin as released


@pytest.fixture
def pairs() -> Iterator[list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]]:
    """The two sockets of a scheduler, each with the socket that sends to it."""
    with zmq.Context() as context:
        sockets = []
        for name in ("tokenizer", "rpc"):
            receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            receiver.bind(f"inproc://{name}")
            sender.connect(f"inproc://{name}")
            sockets.append((receiver, sender))
        yield sockets
        for pair in sockets:
            for socket in pair:
                socket.close(linger=0)


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_rank_waits_until_it_is_asked(
    pairs: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SimpleNamespace(
        weight_updater=SimpleNamespace(offload_tags={"kv_cache"}),
        server_args=SimpleNamespace(sleep_on_idle=False),
        ps=SimpleNamespace(tp_rank=0, pp_rank=0),
        ipc_channels=SimpleNamespace(recv_from_tokenizer=pairs[0][0], recv_from_rpc=pairs[1][0]),
    )
    began = time.monotonic()
    released.wait_while_released(None, scheduler)
    assert time.monotonic() - began > 0.9 * released._LONGEST_MS / 1000
    monkeypatch.setattr(released, "_LONGEST_MS", 600_000)
    threading.Timer(0.1, pairs[index][1].send, (b"call",)).start()
    released.wait_while_released(None, scheduler)
    assert pairs[index][0].recv(zmq.NOBLOCK) == b"call"
    assert time.monotonic() - began < 300


@pytest.mark.parametrize(
    ("tags", "sleep_on_idle", "tp_rank", "pp_rank"),
    [(set(), False, 0, 0), ({"kv_cache"}, True, 0, 0), ({"kv_cache"}, False, 1, 0), ({"kv_cache"}, False, 0, 1)],
)
def test_no_other_waits(tags: set[str], sleep_on_idle: bool, tp_rank: int, pp_rank: int) -> None:
    scheduler = SimpleNamespace(  # without sockets, at which it could wait
        weight_updater=SimpleNamespace(offload_tags=tags),
        server_args=SimpleNamespace(sleep_on_idle=sleep_on_idle),
        ps=SimpleNamespace(tp_rank=tp_rank, pp_rank=pp_rank),
    )
    released.wait_while_released(None, scheduler)


@pytest.mark.parametrize("paused", [True, False])
def test_a_paused_scheduler_waits_as_one_without_work(paused: bool) -> None:
    waited: list[bool] = []
    scheduler = SimpleNamespace(_engine_paused=paused, maybe_sleep_on_idle=lambda: waited.append(True))
    released.wait_while_paused(None, scheduler, [])
    assert waited == [True] * paused
