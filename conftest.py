"""Order of the tests, and what several workers (pytest-xdist) may run at the same time.

Those that start processes come last, so that a quick failure shows in the first seconds; of these whole runs come
first, as their files take longest. Such a file is one worker's, for what its tests share.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine3d.imports import quick_imports


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with quick_imports():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_order)
    for item in items:
        if _starts_processes(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _order(item: pytest.Item) -> tuple[bool, bool]:
    starts = _starts_processes(item)
    return starts, starts and "hybridflow" not in item.path.parts


def _starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("processes") is not None
