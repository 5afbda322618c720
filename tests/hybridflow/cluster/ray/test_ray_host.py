"""End of a Ray whose watchdog is killed."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from hybridflow.cluster.ray.ray_host import RayHost

pytestmark = pytest.mark.processes


def test_nothing_is_left_where_the_watchdog_is_killed_too() -> None:
    host = RayHost()
    environment = os.environ | {name: value for name, value in host.variables.items() if value is not None}
    belongs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], env=environment)
    (host.directory / "node.log").touch()
    host._watchdog.kill()
    host.stop()
    assert belongs.wait(30) < 0 and not psutil.pid_exists(host._watchdog.pid)
    assert not host.directory.exists()
