"""The command of a launch, as its supervisor serves it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from hybridflow.cluster.hosts.description import Cluster, Host
from hybridflow.cluster.hosts.launch.driver_process import DriverProcess
from hybridflow.cluster.hosts.logs.log_keeper import GatheredLogs

pytestmark = pytest.mark.processes

CLUSTER = Cluster(tuple(Host(index, f"host-{index}", f"10.0.0.{index + 1}") for index in range(2)))
ASKS = """
import sys
from engine3d.errors import EngineError
from hybridflow.cluster.hosts.driver_link import driver_link

link = driver_link()
places = [["actor", rank, "host-1", "x" * 200] for rank in range(int(sys.argv[1]))]
try:
    for _ in range(2):
        [answer] = link.ask_each("look", 5, places=places)
        assert answer == {"looked": len(places)}, answer
except EngineError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""


def code_of(ask: Any, places: int) -> int:
    driver = DriverProcess(CLUSTER, ask, GatheredLogs([], []), lambda directory: None, stop_s=1.0)
    program = [sys.executable, "-c", ASKS, str(places)]
    return asyncio.run(driver.run(program, "token", [{}, {}], {}))


@pytest.mark.parametrize("places", [1, 5000])
def test_questions_of_any_number_of_ranks_are_answered(places: int) -> None:
    async def look(message: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"looked": len(message["places"])}]

    assert code_of(look, places) == 0


def test_a_driver_that_is_answered_no_more_learns_it_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    async def look(message: dict[str, Any]) -> list[dict[str, Any]]:
        raise RuntimeError("a defect of ours")

    assert code_of(look, 1) == 3
    said = capfd.readouterr().err
    assert "the driver is answered no more: RuntimeError: a defect of ours" in said
    assert "did not answer within" not in said
