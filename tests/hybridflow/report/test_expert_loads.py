"""Heat maps of experts in the report: steps, classes, dead experts, and the same as text."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hybridflow.metrics import names as metrics
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.expert_loads import ExpertLoads
from hybridflow.metrics.logger import Metrics
from hybridflow.report.choice import sections
from hybridflow.report.drawing import draw
from hybridflow.report.plots import HeatPlot
from hybridflow.report.run_data import read_run
from tests.hybridflow.report.test_page import Page, report

FILES = MetricsConfig(console=False, csv=False, tensorboard=False)
LOADS = np.asarray([[0.0, 0.3, 1.0, 2.7], [0.25, 1.25, 1.25, 1.25], [1.0, 1.0, 1.0, 1.0]])


def make(directory: Path, loads: np.ndarray, *, biased: bool = False, steps: int = 4, role: str = "actor") -> Path:
    layers = tuple(range(3, 3 + len(loads)))
    with Metrics(FILES, directory) as log:
        for step in range(1, steps + 1):
            log.log(step, {metrics.TRAIN_EXPERT_LOAD_MAX: 1.0 + step, metrics.TRAIN_DEAD_EXPERTS: float(step)})
            biases = (loads - 1) * step / 100 if biased else None
            log.log_expert_loads(step, {role: ExpertLoads(layers, loads, biases)})
    return directory


def heat_maps(page: Page) -> dict[str, dict[str, object]]:
    return {name: plot for name, plot in page.plots_by_name.items() if re.match(r"expert-(load|bias)-\w+-\d", name)}


def test_the_first_and_the_last_step_are_drawn_unless_others_are_named(tmp_path: Path) -> None:
    make(tmp_path, LOADS, biased=True)
    page = report(tmp_path)
    assert page.headings == ["Experts"]
    assert list(heat_maps(page)) == [f"expert-{kind}-actor-{step}" for step in (1, 4) for kind in ("load", "bias")]
    assert {"expert-load", "dead-experts"} <= set(page.plots_by_name)  # over time
    out = tmp_path / "other.html"
    assert list(heat_maps(report(tmp_path, "--out", str(out), "--steps", "2", "9"))) == [
        f"expert-{kind}-actor-{step}" for step in (2, 4) for kind in ("load", "bias")
    ]


def test_a_heat_map_says_in_words_what_it_shows(tmp_path: Path) -> None:
    page = report(make(tmp_path, LOADS, role="cost_critic"))
    plot = page.plots_by_name["expert-load-cost_critic-4"]
    assert plot["caption"] == "Load of the cost critic's experts in step 4, over the mean of the layer"
    assert plot["role"] == "img"
    assert plot["alt"] == (
        f"{plot['caption']}, a layer by expert matrix: highest 2.699 times the mean at layer 3, expert 3; "
        "lowest 0 times the mean at layer 3, expert 0; no token: 1"
    )
    legend = {"below 0.25", "0.8 to 1.25", "4 and more", "no token"}
    assert {"layer", "expert", "3", "4", "5", *legend} <= set(plot["texts"])
    text = (tmp_path / "report.html").read_text()
    assert "<summary>The same by layer</summary>" in text
    row = "".join(f"<td>{cell}</td>" for cell in ("3", "2.699", "3", "0", "0", "1"))
    assert row in re.sub(r">\s+<", "><", text)


def test_every_cell_is_in_the_class_of_its_value(tmp_path: Path) -> None:
    [plot, _] = [
        plot
        for section in sections(read_run(make(tmp_path, LOADS)))
        for plot in section.plots
        if isinstance(plot, HeatPlot)
    ]
    by_class = {(shape.kind, shape.series): shape.path for shape in draw(plot).shapes}
    assert by_class == {
        ("cells", 1): "M1 0h1M0 1h1",  # 0.3 and 0.25
        ("cells", 3): "M2 0h1M0 2h4",
        ("cells", 4): "M1 1h3",
        ("cells", 5): "M3 0h1",
        ("cross", 0): "M0.2 -0.3l.6 .6m0 -.6l-.6 .6",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts", "most_bytes"), [(4, 8, 60_000), (94, 128, 700_000)])
def test_a_page_of_few_or_many_experts(tmp_path: Path, layers: int, experts: int, most_bytes: int) -> None:
    loads = np.random.default_rng(1).gamma(2.0, 0.5, size=(layers, experts))
    page = report(make(tmp_path, loads))
    [first, last] = heat_maps(page).values()
    assert first["paths"] == last["paths"]
    assert (tmp_path / "report.html").stat().st_size < most_bytes
    [plot, _] = [
        plot for section in sections(read_run(tmp_path)) for plot in section.plots if isinstance(plot, HeatPlot)
    ]
    drawing = draw(plot)
    left, top, right, bottom = drawing.axes.box
    assert (right - left) / experts >= 5 and (bottom - top) / layers >= 4.5  # units of a cell
    assert len(drawing.y_ticks) <= 15 and drawing.size[1] < 500


def test_equal_biases_have_no_heat_map(tmp_path: Path) -> None:
    assert list(heat_maps(report(make(tmp_path, np.ones((2, 4)), biased=True)))) == [
        "expert-load-actor-1",
        "expert-load-actor-4",
    ]
