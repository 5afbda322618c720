"""Order of the tests: those that start processes come last, so that a quick failure shows in the first seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine3d.imports import quick_imports


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with quick_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
    for item in items:
        # Of several workers one has whole runs, one after the other, and one has ranks and engines without them.
        if item.get_closest_marker("processes") is not None:
            runs = "hybridflow" in item.nodeid.split("/")
            item.add_marker(pytest.mark.xdist_group("runs" if runs else "ranks"))
