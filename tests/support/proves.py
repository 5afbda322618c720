"""The mark of tests that show that a model family, a layout and features work together.

docs/generate_models.py collects the marks. A mark counts where its test compares with a plain run: log-probs, losses,
gradients or weights. It does not count on a test that this project's checks skip: those of GPUs and of several hosts.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine3d.layout import Layout
from hybridflow.planning.checks.feature_matrix import FAMILIES, FEATURES, LAYOUT, layout_sizes

MARK = "proves"
_SKIPPED = ("gpu", "hosts")


def proves(family: str, *runs: str) -> pytest.MarkDecorator:
    """Mark of a test that runs a family.

    Args:
        family: name of the family.
        runs: of each run the names of what its layout has above 1 or by hand, and its features, as in "tp pp packing".

    Raises:
        ValueError: a name that is none of the matrix.
    """
    if family not in FAMILIES:
        raise ValueError(f"proves: family {family!r}, expected one of {', '.join(FAMILIES)}")
    for run in runs:
        if unknown := set(run.split()).difference(LAYOUT, FEATURES):
            raise ValueError(f"proves: {sorted(unknown)}, expected names of {', '.join((*LAYOUT, *FEATURES))}")
    return pytest.mark.proves(family, *runs)


def run_of(layout: Layout, features: str = "") -> str:
    """A run on a layout, as `proves` takes it. `features`: of the run."""
    return " ".join([*layout_sizes(layout), *features.split()])


def runs_of(layouts: Mapping[int, Iterable[Mapping[str, Any]]], features: str = "") -> Iterator[str]:
    """Runs on some layouts.

    Args:
        layouts: sizes of each, by the number of ranks.
        features: of all runs.
    """
    for world_size, of_world in layouts.items():
        for sizes in of_world:
            yield run_of(Layout.of_world(world_size, **sizes), features)


class ProofCollector:
    """A plugin of pytest that collects the marks.

    Attributes:
        tests: names of the tests that show a run, by its items.
    """

    def __init__(self) -> None:
        self.tests: dict[frozenset[str], set[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if any(item.get_closest_marker(name) for name in _SKIPPED):
                continue
            for mark in item.iter_markers(MARK):
                family, *runs = mark.args
                for run in runs or [""]:
                    test = f"{item.path.relative_to(session.config.rootpath)}::{item.originalname}"  # type: ignore[attr-defined]
                    self.tests.setdefault(frozenset((family, *run.split())), set()).add(test)


def marked_files(tests: Path) -> list[str]:
    """Files of tests that have a mark."""
    return sorted(str(path) for path in tests.rglob("test_*.py") if "import proves" in path.read_text())


def collected(tests: Path) -> dict[frozenset[str], set[str]]:
    """Names of the tests that show each set of items. Collects them, and runs none."""
    collector = ProofCollector()
    # No faulthandler: the session that this one runs in has its own.
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:faulthandler", *marked_files(tests)]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, [collector])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"tests could not be collected: {output.getvalue()}")
    return collector.tests
