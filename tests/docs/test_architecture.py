"""The modules that docs/architecture.md names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from tests.test_structure import ORDERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
PACKAGES = {path.name for top in ("hybridflow", "engine3d") for path in (ROOT / top).iterdir() if path.is_dir()}


def is_module(name: str) -> bool:
    """True if `package.module`, with or without `hybridflow` or `engine3d` before it, is a module."""
    path = name.replace(".", "/")
    tops = [ROOT, ROOT / "hybridflow", ROOT / "engine3d"]
    return any((top / f"{path}.py").is_file() or (top / path).is_dir() for top in tops)


@pytest.mark.parametrize(("packages", "modules"), ROWS)
def test_the_modules_of_a_package(packages: str, modules: str) -> None:
    names = re.findall(r"`(\w+)`", packages)
    assert all(map(is_module, names))
    for module in re.findall(r"`(\w+)`", modules):
        assert any(is_module(f"{package}.{module}") for package in names), module


def test_the_modules_on_the_path_of_a_sample_and_of_a_weight() -> None:
    paths = PAGE.partition("## Path of a sample")[2]
    named = re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)+)`", paths)
    modules = {name for name in named if name.split(".")[0] in PACKAGES | {"hybridflow", "engine3d"}}
    assert len(modules) > 20
    assert not {name for name in modules if not is_module(name)}


def test_every_package_is_in_a_table() -> None:
    listed = {name for packages, _ in ROWS for name in re.findall(r"`(\w+)`", packages)}
    assert {name for name in PACKAGES if not name.startswith("_")} <= listed


def test_the_order_of_packages_is_the_one_that_is_held() -> None:
    levels = [[name for name in level.split(" | ") if name in PACKAGES] for level in ORDERS["hybridflow"].split(" > ")]
    quoted = PAGE.partition("each other:\n\n")[2].partition("\n\n")[0].split("\n")
    assert [line.strip() for line in quoted] == [*map(" | ".join, levels), "engine3d"]


@pytest.mark.slow
def test_texts_of_the_picture_stay_inside_their_boxes() -> None:
    """Width in DejaVu Sans, which is wider than most fonts that a browser has."""
    picture = (ROOT / "docs/architecture.svg").read_text()
    boxes = [
        tuple(map(float, rectangle))
        for rectangle in re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', picture)
    ]
    texts = re.findall(r'<text x="(\d+)" y="(\d+)" font-size="(\d+)"( font-weight)?[^>]*>([^<]+)<', picture)
    inside = 0
    for x, y, size, bold, text in texts:
        box = [
            rectangle
            for rectangle in boxes
            if rectangle[0] <= float(x) <= rectangle[0] + rectangle[2]
            and rectangle[1] <= float(y) <= rectangle[1] + rectangle[3]
        ]
        if box:
            font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
            width = TextPath((0, 0), text, size=float(size), prop=font).get_extents().width
            assert float(x) + width <= box[0][0] + box[0][2] - 10, text
            inside += 1
    assert inside > 10
