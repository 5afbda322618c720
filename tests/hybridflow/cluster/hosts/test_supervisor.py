"""Signals to the hosts of a launch that its command gets, and hosts that it does not start with."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine3d.errors import EngineError, UserError
from hybridflow.cluster.hosts import supervisor as module
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.launch_plan import LaunchPlan
from hybridflow.cluster.hosts.members import Member
from hybridflow.cluster.hosts.supervisor import Supervisor, find_differences

HOSTS = [Host(index, f"host-{index}", f"10.0.0.{index + 1}") for index in range(3)]


class Command:
    """Stand-in for the attempts to run it."""

    is_running = True

    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, number: int) -> None:
        self.got.append(number)


def got(came: Sequence[tuple[float, int, int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the command gets, of those that come at such a time, with such a number, to such a host."""
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    command: Any = Command()

    async def main() -> None:
        nonlocal now
        plan = LaunchPlan(3, ["train"])
        supervisor = Supervisor(plan, "a" * 64)
        supervisor._attempts = command
        for at, number, host in came:
            now = at
            supervisor.signalled(number, HOSTS[host])

    asyncio.run(main())
    results: list[int] = command.got
    return results


def test_a_request_for_a_checkpoint_counts_once_for_all_hosts_and_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    save = signal.SIGUSR1
    everywhere = [(1000.0 + host, save, host) for host in range(3)]
    assert got(everywhere, monkeypatch) == [save]
    assert got([*everywhere, (4600.0, save, 2)], monkeypatch) == [save, save]
    assert got([*everywhere, *((2000.0 + host, save, host) for host in range(3))], monkeypatch) == [save, save]


def test_a_signal_that_ends_comes_once_and_from_the_same_host_again(monkeypatch: pytest.MonkeyPatch) -> None:
    end = signal.SIGTERM
    assert got([(host, end, host) for host in range(3)], monkeypatch) == [end]
    assert got([(0, end, 1), (5, end, 0), (9, end, 1)], monkeypatch) == [end, end]


def test_a_host_whose_agent_is_of_other_code_is_named() -> None:
    hello: Any = {
        "host": {"index": 1, "name": "host-1", "address": "10.0.0.2"},
        "words": ["train"],
        "words_digest": "",
        "settings": [],
    }

    async def main() -> None:
        channel: Any = None
        Supervisor(LaunchPlan(2, ["train"]), "a" * 64)._admitted(hello, channel)

    with pytest.raises(UserError, match=r"^host-1 has another version of hybridflow than host 0; expected the same"):
        asyncio.run(main())


def member(index: int, **differences: Any) -> Member:
    hello = {
        "host": {"index": index, "name": f"host-{index}", "address": f"10.0.0.{index + 1}"},
        "words": ["train"],
        "words_digest": "",
        "software": "one",
        "must_agree": {"recipe": "abc", "ray": "2.60.0", "CPython": "3.12"},
        "free_ports": None,
        "settings": [],
    }
    channel: Any = None
    return Member(hello | differences, channel)


def differences(*members: Member, spares: int = 0) -> list[str]:
    return [str(finding) for finding in find_differences(members, spares)]


def test_ray_is_not_started_on_hosts_with_another_recipe_another_ray_or_without_free_ports() -> None:
    assert differences(member(0), member(1), spares=1) == []
    other = {"recipe": "abc", "ray": "2.55.0", "CPython": "3.12"}
    assert differences(member(0), member(1), member(2, must_agree=other)) == [
        "ray: 2.60.0 on host-0, host-1; 2.55.0 on host-2"
    ]
    [line] = differences(member(0, free_ports=500), member(1, free_ports=3))
    assert line.startswith("network.ports: 3 free on host-1; expected at least ")


def test_code_of_a_spare_is_compared_before_it_takes_a_place() -> None:
    hosts = [member(0), member(1, software="two"), member(2), member(3, software="two")]
    assert differences(*hosts, spares=2) == ["code and versions of spares: others on host-3; expected those of host-0"]
    assert differences(*hosts) == []


def test_an_end_is_the_signals_where_a_silent_host_keeps_ray_from_ending() -> None:
    async def work() -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            raise EngineError("host-1: no answer within 60 s (stop_ray)")

    async def main() -> int:
        supervisor = Supervisor(LaunchPlan(2, ["train"]), "a" * 64)
        asyncio.get_running_loop().call_later(0.01, supervisor.signalled, signal.SIGTERM)
        return (await supervisor._until_over(work())).code

    assert asyncio.run(main()) == 128 + signal.SIGTERM
