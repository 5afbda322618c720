"""What is sent, and in which order: groups and calls that are written down, no Ray and no processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray

from hybridflow.cluster.devices.device_map import Device
from hybridflow.workers import device_turns
from hybridflow.workers.call import Call
from hybridflow.workers.device_turns import MemoryCall, RankRequest, Turns, memory_calls
from hybridflow.workers.failure_diagnosis import RankError
from hybridflow.workers.ranks import Ranks

BOTH = ("give_back", "take_back")


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
    memory = [(actor, "given back"), (critic, "held"), (reference, "held"), (reward, "held")]
    assert memory_calls(actor, memory) == [
        MemoryCall(critic, "give_back"),
        MemoryCall(reference, "give_back"),
        MemoryCall(actor, "take_back"),
    ]
    assert memory_calls(reward, memory) == []
    assert memory_calls(group("new", 2), memory) == [MemoryCall(reward, "give_back")]


def test_only_what_a_worker_has_is_called_and_only_of_groups_that_live() -> None:
    actor, plain, dead, ended = (
        group("actor", 0, methods=()),
        group("plain", 0, methods=()),
        group("dead", 0),
        group("x", 0),
    )
    dead.failure = RankError("dead rank 0, compute: the process died")
    ended.actors = []
    assert memory_calls(actor, [(actor, "given back"), (plain, "held"), (dead, "held"), (ended, "held")]) == []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], list[str]]]]:
    """Each call that was sent, with those that it has its turn after, and those that make its input."""
    calls: list[tuple[str, list[str], list[str]]] = []

    def send(request: RankRequest, earlier: Sequence[Call] = ()) -> tuple[Call, list[Any]]:
        call = Call(request.ranks, request.method, request.limit_s, [], request.inputs, earlier)
        calls.append((str(call), [str(each) for each in earlier], [str(each) for each in request.inputs]))
        return call, []

    monkeypatch.setattr(device_turns, "_send", send)
    monkeypatch.setattr(Call, "ended", lambda call: not call.ranks.is_alive)
    yield calls


def compute(ranks: Ranks, *, exclusive: bool = True) -> RankRequest:
    return RankRequest(ranks, "compute", 1.0, [], exclusive=exclusive)


def test_calls_are_sent_in_the_order_of_their_turns(sent: list[tuple[str, list[str], list[str]]]) -> None:
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    for ranks in (actor, actor, critic, actor):
        turns.send(compute(ranks))
    first = ["actor.compute", "actor.compute", "actor.give_back"]
    second = ["critic.compute", "critic.give_back"]
    assert sent == [
        ("actor.compute", [], []),
        ("actor.compute", [], []),
        ("actor.give_back", [], []),
        ("critic.compute", first, []),
        ("critic.give_back", first, []),
        ("actor.take_back", first + second, []),
        ("actor.compute", first + second, ["actor.take_back"]),
    ]
    assert turns.gave_back(critic) and not turns.gave_back(actor)
    turns.leave(critic)
    assert not turns.gave_back(critic)
    sent.clear()
    turns.send(compute(actor))
    assert sent == [("actor.compute", [], [])]


def test_what_moves_memory_is_looked_at_also_where_it_has_ended_until_a_call_that_it_lets_in_is_answered(
    sent: list[tuple[str, list[str], list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call, "ended", lambda call: True)
    monkeypatch.setattr(ray, "get", list)  # of no ranks' answers
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    *_, last = [turns.send(compute(ranks))[0] for ranks in (actor, critic, actor)]
    given_back = ["actor.give_back", "critic.give_back"]
    assert sent == [
        ("actor.compute", [], []),
        ("actor.give_back", [], []),
        ("critic.compute", ["actor.give_back"], []),
        ("critic.give_back", ["actor.give_back"], []),
        ("actor.take_back", given_back, []),
        ("actor.compute", given_back, ["actor.take_back"]),
    ]
    last.wait()
    sent.clear()
    turns.send(compute(critic))
    assert sent == [
        ("actor.give_back", [], []),
        ("critic.take_back", ["actor.give_back"], []),
        ("critic.compute", ["actor.give_back"], ["critic.take_back"]),
    ]


def test_a_call_that_takes_no_turn_neither_waits_nor_makes_others_give_back(
    sent: list[tuple[str, list[str], list[str]]],
) -> None:
    turns, actor, critic = Turns(), group("actor", 0), group("critic", 0)
    turns.send(compute(actor))
    turns.send(compute(critic, exclusive=False))
    assert sent[1:] == [("critic.compute", [], [])]
    turns.send(RankRequest(actor, "give_back", 1.0, [], exclusive=True))  # by its user, not by a turn
    assert turns.gave_back(actor)


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
    for place, (name, earlier, _) in enumerate(sent):
        before = [other for other, _, _ in sent[:place]]
        own = name.split(".")[0]
        # All that others have sent, and of its own what those wait for: every group has a device in common.
        assert [each for each in earlier if each.split(".")[0] != own] == [
            each for each in before if each.split(".")[0] != own
        ]
