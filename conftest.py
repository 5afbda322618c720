"""Order of the tests: files that start processes come last, so that a quick failure shows in the first seconds.

Of these, whole runs come first: they take longest, and no worker is left alone with them at the end. Those of
`engine3d` come last: they compute, while others wait for limits and for processes, which takes no time beside them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from engine3d.startup.imports import quick_imports
from tests.support.warm import refused_starts, share_servers

# For what is started too, and alike for all of it: see tests/support/warm.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000, 20, 20)  # with Python's own the collector takes a twelfth of the tests' CPU time
    if config.getoption("numprocesses", None):  # of workers have none
        python = share_servers(config.args)
        if config.option.numprocesses > 2:  # two import as fast next to each other as one for both
            config.option.tx = [f"popen//python={python}"] * config.option.numprocesses


def pytest_sessionfinish(session: pytest.Session) -> None:
    if refused_starts() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if refused := refused_starts():
        terminalreporter.section("processes that servers of tests/support/warm did not fork", red=True)
        terminalreporter.write_line("error: the run fails, for variables of the test that started them differ:")
        for line in refused:
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with quick_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    starting = {item.path for item in items if item.get_closest_marker("processes") is not None}

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        parts = item.path.parts if item.path in starting else ()
        return bool(parts), "integration" not in parts, "engine3d" in parts

    items.sort(key=place)
