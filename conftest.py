"""Order of the tests: those that start processes come last, so that a quick failure shows in the first seconds."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
