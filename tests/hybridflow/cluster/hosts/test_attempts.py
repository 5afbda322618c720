"""Launches whose command fails, or whose hosts are lost: who takes whose place, and how all of it ends."""

from __future__ import annotations

import asyncio
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import EngineError
from hybridflow.cluster.hosts import driver_process
from hybridflow.cluster.hosts.description import HostRole
from hybridflow.rundir.status.first_failure import read_earlier, read_failure
from tests.support.launched_agents import LaunchedAgents, launch_of

pytestmark = pytest.mark.processes

FAIL, END, LOSE = ("fail", "step 3", "no memory"), ("end", "", ""), ("lose", "step 3", "")


def where(launch: LaunchedAgents) -> list[list[Any]]:
    """Index, last number of the address and role of the hosts of every start of the command."""
    return [
        [(index, int(address.rpartition(".")[2]) - 1, role) for index, address, role in start["hosts"]]
        for start in launch.starts()
    ]


def run(launch: LaunchedAgents, *lost: tuple[int, int]) -> list[int]:
    """Exit codes of all agents; of `lost` each host is gone once the command has been started so often."""

    async def main() -> list[int]:
        await launch.start()
        for host, starts in lost:
            await launch.until_started(starts)
            launch.lose(host)
        return await launch.ended()

    return asyncio.run(main())


def test_a_failure_is_followed_by_a_start_on_the_same_hosts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [FAIL, END], hosts=3, restarts=2, spares=1)
    assert run(launch) == [0, 0, 0]
    assert where(launch) == [[(0, 0, None), (1, 1, None)]] * 2
    assert [start["words"][2:] for start in launch.starts()] == [
        ["resume=none"],
        ["resume=none", "overwrite=false", "--again"],
    ]
    said = capfd.readouterr().err
    assert "starting the run again (1 of 2), after: no memory; restarts left: 1" in said
    assert [item.cause for item in read_earlier(tmp_path)] == ["no memory"]
    assert read_failure(tmp_path) is None


@pytest.mark.parametrize("resume", ["resume=none", "resume=runs/earlier"])
def test_a_named_checkpoint_counts_until_the_run_has_a_directory(tmp_path: Path, resume: str) -> None:
    script = [("early", "", "no Ray"), FAIL, END]
    launch = launch_of(tmp_path, script, hosts=1, resume=resume, restarts=2)
    assert run(launch) == [0]
    assert [start["words"][2:] for start in launch.starts()] == [
        [resume],
        [resume, "--again"],
        [resume, "overwrite=false", "--again"],
    ]


def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    roles: list[HostRole | None] = ["train", "rollout", "rollout", None]
    launch = launch_of(tmp_path, [LOSE, END], hosts=4, roles=roles, restarts=1, spares=1)
    assert run(launch, (1, 1)) == [0, 1, 0, 0]
    assert where(launch) == [
        [(0, 0, "train"), (1, 1, "rollout"), (2, 2, "rollout")],
        [(0, 0, "train"), (1, 3, "rollout"), (2, 2, "rollout")],
    ]
    [line] = [line for line in capfd.readouterr().err.splitlines() if "starting the run again" in line]
    assert re.search(
        r"\(1 of 1\), after: \S+ \(127.0.0.2\): its agent is gone.*; \S+ \(127.0.0.4\) takes the place of \S+ "
        r"\(127.0.0.2\); restarts left: 0$",
        line,
    )


def test_without_a_spare_the_run_goes_on_with_those_that_are_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of(tmp_path, [LOSE, END], hosts=3, restarts=1)
    assert run(launch, (1, 1)) == [0, 1, 0]
    assert where(launch)[1] == [(0, 0, None), (1, 2, None)]
    assert "the run goes on with 2 of 3 hosts; restarts left: 0" in capfd.readouterr().err


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that a command has to end after a loss."""
    monkeypatch.setattr(driver_process, "_GRACE_S", 1.0)
    return 0.5 + driver_process._GRACE_S


def test_several_losses_at_once_are_one_failure(tmp_path: Path, short_grace: float) -> None:
    """The time to end of the first does not run on in the next start."""
    longer_s = short_grace + 1
    launch = launch_of(tmp_path, [LOSE, ("slow_end", "", str(longer_s))], hosts=4, restarts=1)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.lose(1)
        launch.lose(2)
        return await launch.ended()

    assert asyncio.run(main()) == [0, 1, 1, 0]
    assert where(launch)[1] == [(0, 0, None), (1, 3, None)]


def test_a_loss_without_restarts_ends_it(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, [LOSE], hosts=3)
    assert run(launch, (1, 1)) == [1, 1, 1]


def no_ray(cpus: int, gcs_address: str | None = None) -> dict[str, Any]:
    raise EngineError("Ray did not start on this machine: no room")


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_on_which_ray_does_not_start_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], host: int
) -> None:
    launch = launch_of(tmp_path, [LOSE], hosts=2)

    async def main() -> list[int]:
        await launch.start()
        launch.agents[host].start_ray = no_ray  # type: ignore[method-assign]
        return await launch.ended()

    assert asyncio.run(main()) == [1, 1]
    assert f"(127.0.0.{host + 1}): Ray did not start on this machine: no room" in capfd.readouterr().err


def test_what_does_not_fit_ends_with_both_lines_and_the_first_card(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of(tmp_path, [LOSE, ("refuse", "", "placement.rollout: no cpu:8")], hosts=3, restarts=5)
    assert run(launch, (2, 1)) == [1, 1, 1]
    said = capfd.readouterr().err
    assert "hybridflow: the run was not started on the hosts that are left: placement.rollout: no cpu:8\n" in said
    assert re.search(r"hybridflow: the failure before: \S+ \(127.0.0.3\): its agent is gone", said)
    card = read_failure(tmp_path)
    assert card is not None and "(127.0.0.3)" in card.cause


async def until_said(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until this was written to standard error."""
    said = ""
    async with asyncio.timeout(120):
        while text not in said:
            await asyncio.sleep(0.05)
            said += capfd.readouterr().err


def test_a_lost_host_that_comes_back_stands_by(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [LOSE, ("lose", "step 5", ""), END], hosts=3, restarts=2, spares=1)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.lose(1)
        assert await launch.codes[1] == 1
        await launch.until_started(2)
        launch.start_agent(1)
        await until_said(capfd, "(127.0.0.2) is there again, and stands by")
        launch.lose(2)
        return await launch.ended()

    assert asyncio.run(main()) == [0, 0, 1]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0, 2], [0, 1]]


def test_one_that_comes_back_when_no_restart_is_left_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of(tmp_path, [LOSE, ("lose", "step 5", "")], hosts=3, restarts=1, spares=1)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.lose(1)
        await launch.codes[1]
        await launch.until_started(2)
        async with asyncio.timeout(30):
            assert await launch.start_agent(1) == 2
        launch.lose(2)
        return await launch.ended()

    assert asyncio.run(main()) == [1, 2, 1]
    assert "the run has begun without this host; it has 3" in capfd.readouterr().err


def test_one_that_comes_back_while_the_rest_does_not_fit_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of(tmp_path, [LOSE, ("refuse", "", "does not fit"), END], hosts=2, restarts=1, spare_s=30)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.lose(1)
        await launch.codes[1]
        await launch.until_started(2)
        launch.start_agent(1)
        return await launch.ended()

    assert asyncio.run(main()) == [0, 0]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0], [0, 1]]
    assert "waiting for another, for 30 s at most" in capfd.readouterr().err


def test_nobody_comes_while_the_rest_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [LOSE, ("refuse", "", "does not fit")], hosts=2, restarts=1, spare_s=1)
    assert run(launch, (1, 1)) == [1, 1]
    assert (
        "was not started on the hosts that are left (no other has come within limits.spare_s=1): does not fit"
        in capfd.readouterr().err
    )


def test_a_spare_that_is_lost_disturbs_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [LOSE, END], hosts=3, restarts=1, spares=1)
    assert run(launch, (2, 1), (1, 1)) == [0, 1, 1]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0]]
    assert "(127.0.0.3): its agent is gone: the connection was closed; it has stood by" in capfd.readouterr().err


def test_a_host_that_is_lost_in_the_same_step_again_ends_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [LOSE, LOSE], hosts=4, restarts=9, spares=1)
    assert run(launch, (1, 1), (2, 2)) == [1, 1, 1, 1]
    assert "the same failure in step 3 again; the run is not started any more" in capfd.readouterr().err


def test_a_command_that_does_not_end_of_a_loss_is_ended(tmp_path: Path, short_grace: float) -> None:
    launch = launch_of(tmp_path, [("linger", "", ""), END], hosts=3, restarts=1, spares=1)
    assert run(launch, (1, 1)) == [0, 1, 0]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0, 2]]


def test_a_host_that_differs_takes_no_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = launch_of(tmp_path, [LOSE, ("lose", "step 5", ""), END], hosts=3, restarts=2, spares=1)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.lose(1)
        await launch.codes[1]
        await launch.until_started(2)
        launch.plan = replace(launch.plan, recipe="another")
        launch.start_agent(1)
        await until_said(capfd, "(127.0.0.2) takes no place")
        launch.lose(2)
        return await launch.ended()

    assert asyncio.run(main()) == [0, 2, 1]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0, 2], [0]]


def test_a_host_of_which_nothing_is_heard_ends_what_it_has_of_the_run(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, [LOSE, ("hang", "", "")], hosts=3, restarts=1, spares=1, host_s=2.0)

    async def main() -> int:
        await launch.start()
        await launch.until_started(1)
        launch.silence(1)
        await launch.until_started(2)
        async with asyncio.timeout(120):  # it hears of host 0 every second
            code = await launch.codes[1]
        supervisor = launch.agents[0]._supervisor
        assert supervisor is not None
        supervisor.signalled(signal.SIGTERM)
        await launch.ended()
        return code

    assert asyncio.run(main()) == 1
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0, 2]]


def test_a_host_that_is_back_before_its_silence_was_too_long_takes_its_place_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of(tmp_path, [LOSE, END], hosts=2, restarts=1, host_s=60.0)

    async def main() -> list[int]:
        await launch.start()
        await launch.until_started(1)
        launch.silence(1)
        await asyncio.sleep(6)
        before = launch.codes[1]
        launch.start_agent(1)
        return [await before, *await launch.ended()]

    assert asyncio.run(main()) == [1, 0, 0]
    assert [[host for _, host, _ in start] for start in where(launch)] == [[0, 1], [0, 1]]
    assert "(127.0.0.2): its agent was started anew" in capfd.readouterr().err
