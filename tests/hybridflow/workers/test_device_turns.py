"""Order of calls that take turns, with scripted groups and calls: no Ray and no processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import ray

from hybridflow.cluster.devices.device_map import Device
from hybridflow.workers import device_turns
from hybridflow.workers.call import GroupCall
from hybridflow.workers.device_turns import MemoryCall, RankRequest, Turns, memory_calls
from hybridflow.workers.failure_diagnosis import RankError
from hybridflow.workers.ranks import Ranks

BOTH = ("offload", "onload")


def group(role: str, *indices: int, methods: Sequence[str] = BOTH) -> Ranks:
    """A group with a process, as far as turns look at it."""
    devices = frozenset(Device(0, "cpu", index) for index in indices)
    limits = dict.fromkeys(methods, 10.0)
    ranks = Ranks(role, devices, None, quiet_s=1, call_timeout_s=1, ending=lambda _: None, memory_methods=limits)
    ranks.actors = ["an actor"]
    return ranks


def test_others_on_its_devices_release_memory_before_it_has_its_own_again() -> None:
    actor, critic, reference, reward = (
        group("actor", 0, 1),
        group("critic", 1),
        group("reference", 0),
        group("reward", 2),
    )
    memory: list[tuple[Ranks, Literal["resident", "offloaded"]]] = [
        (actor, "offloaded"),
        (critic, "resident"),
        (reference, "resident"),
        (reward, "resident"),
    ]
    assert memory_calls(actor, memory) == [
        MemoryCall(critic, "offload"),
        MemoryCall(reference, "offload"),
        MemoryCall(actor, "onload"),
    ]
    assert memory_calls(reward, memory) == []
    assert memory_calls(group("new", 2), memory) == [MemoryCall(reward, "offload")]


def test_only_what_a_worker_has_is_called_and_only_of_groups_that_live() -> None:
    actor, plain, dead, ended = (
        group("actor", 0, methods=()),
        group("plain", 0, methods=()),
        group("dead", 0),
        group("x", 0),
    )
    dead.failure = RankError("dead rank 0, compute: the process died")
    ended.actors = []
    assert (
        memory_calls(actor, [(actor, "offloaded"), (plain, "resident"), (dead, "resident"), (ended, "resident")]) == []
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], list[str]]]]:
    """Each call that was sent, with those that it has its turn after, and those that make its input."""
    calls: list[tuple[str, list[str], list[str]]] = []

    def send(request: RankRequest, earlier: Sequence[GroupCall] = ()) -> tuple[GroupCall, list[Any]]:
        call = GroupCall(request.ranks, request.method, request.limit_s, [], request.inputs, earlier)
        calls.append((str(call), [str(entry) for entry in earlier], [str(entry) for entry in request.inputs]))
        return call, []

    monkeypatch.setattr(device_turns, "_send", send)
    monkeypatch.setattr(GroupCall, "ended", lambda call: not call.ranks.is_alive)
    yield calls


def compute(ranks: Ranks, *, exclusive: bool = True) -> RankRequest:
    return RankRequest(ranks, "compute", 1.0, [], exclusive=exclusive)


def test_calls_are_sent_in_the_order_of_their_turns(sent: list[tuple[str, list[str], list[str]]]) -> None:
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    for ranks in (actor, actor, critic, actor):
        turns.send(compute(ranks))
    first = ["actor.compute", "actor.compute", "actor.offload"]
    second = ["critic.compute", "critic.offload"]
    assert sent == [
        ("actor.compute", [], []),
        ("actor.compute", [], []),
        ("actor.offload", [], []),
        ("critic.compute", first, []),
        ("critic.offload", first, []),
        ("actor.onload", first + second, []),
        ("actor.compute", first + second, ["actor.onload"]),
    ]
    assert turns.is_offloaded(critic) and not turns.is_offloaded(actor)
    turns.remove(critic)
    assert not turns.is_offloaded(critic)
    sent.clear()
    turns.send(compute(actor))
    assert sent == [("actor.compute", [], [])]


def test_what_moves_memory_is_looked_at_also_where_it_has_ended_until_a_call_that_it_lets_in_is_answered(
    sent: list[tuple[str, list[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupCall, "ended", lambda call: True)
    monkeypatch.setattr(ray, "get", list)  # of no ranks' answers
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    *_, last = [turns.send(compute(ranks))[0] for ranks in (actor, critic, actor)]
    offloaded = ["actor.offload", "critic.offload"]
    assert sent == [
        ("actor.compute", [], []),
        ("actor.offload", [], []),
        ("critic.compute", ["actor.offload"], []),
        ("critic.offload", ["actor.offload"], []),
        ("actor.onload", offloaded, []),
        ("actor.compute", offloaded, ["actor.onload"]),
    ]
    last.wait()
    sent.clear()
    turns.send(compute(critic))
    assert sent == [
        ("actor.offload", [], []),
        ("critic.onload", ["actor.offload"], []),
        ("critic.compute", ["actor.offload"], ["critic.onload"]),
    ]


def test_a_call_that_takes_no_turn_neither_waits_nor_offloads_others(
    sent: list[tuple[str, list[str], list[str]]],
) -> None:
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    turns.send(compute(actor))
    turns.send(compute(critic, exclusive=False))
    assert sent[1:] == [("critic.compute", [], [])]
    turns.send(RankRequest(actor, "offload", 1.0, [], exclusive=True))  # by its user, not by a turn
    assert turns.is_offloaded(actor)


def test_whatever_threads_send_a_call_has_its_turn_only_after_calls_that_were_sent_before_it(
    sent: list[tuple[str, list[str], list[str]]],
) -> None:
    turns, groups = Turns(), [group(f"group{number}", number % 2, 2) for number in range(4)]
    threads = [
        threading.Thread(target=lambda ranks=ranks: [turns.send(compute(ranks)) for _ in range(20)]) for ranks in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert sum(name.endswith("compute") for name, _, _ in sent) == 80
    for position, (name, earlier, _) in enumerate(sent):
        before = [other for other, _, _ in sent[:position]]
        role = name.split(".")[0]
        # All that others have sent, and of its own what those wait for: every group has a device in common.
        assert [entry for entry in earlier if entry.split(".")[0] != role] == [
            entry for entry in before if entry.split(".")[0] != role
        ]
