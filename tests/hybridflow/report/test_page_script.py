"""The script of the page, in a browser: values under the pointer, and smoothed lines."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from hybridflow.metrics import names as metrics
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.expert_loads import ExpertLoads
from hybridflow.metrics.logger import Metrics
from hybridflow.report.page import write_report
from tests.support.browser import CHROMIUM, dom_after

pytestmark = [pytest.mark.processes, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]
FILES = MetricsConfig(console=False, csv=False, tensorboard=False)
SCRIPT = """
const seen = {};
const over = (id, share) => {
  const svg = document.querySelector(`#${id} svg`), box = svg.getBoundingClientRect();
  const at = { clientX: box.left + share * box.width, clientY: box.top + box.height / 2, bubbles: true };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = document.querySelector(`#${id} .tip`);
  const found = { text: [...tip.children].map((row) => row.textContent), shown: tip.style.display };
  found.words = tip.textContent;
  found.circles = svg.querySelectorAll(".hover circle").length;
  return found;
};
seen.cell = over("expert-load-actor-4", 0.2);
seen.control = !document.getElementById("smoothing").hidden;
seen.first = over("losses", 0.2);
seen.last = over("losses", 0.95);
seen.gap = over("gradient-norm", 0.68);
const slider = document.querySelector("#smoothing input");
slider.value = 0.5;
slider.dispatchEvent(new Event("input"));
seen.smoothed = over("losses", 0.95);
seen.paths = document.querySelectorAll("#losses .smooth").length;
seen.finite = [...document.querySelectorAll(".smooth")].every((path) => !/NaN|Infinity/.test(path.getAttribute("d")));
slider.value = 0;
slider.dispatchEvent(new Event("input"));
seen.left = document.querySelectorAll(".smooth").length;
document.querySelector("#losses svg").dispatchEvent(new PointerEvent("pointerleave"));
seen.gone = document.querySelector("#losses .tip").style.display;
document.body.dataset.seen = JSON.stringify(seen);
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("run")
    with Metrics(FILES, directory) as log:
        for step in (1, 2, 3, 4):
            norm = math.nan if step == 3 else 10.0**step  # on a logarithmic axis
            log.log(step, {metrics.TRAIN_LOSS: 2.0 - step, metrics.TRAIN_GRADIENT_NORM: norm})
            log.log_expert_loads(step, {"actor": ExpertLoads((7,), np.linspace(0, 2, 24)[None])})
    dumped = dom_after(write_report(directory), SCRIPT, directory)
    [text] = re.findall(r'data-seen="([^"]*)"', dumped)
    visible: dict[str, Any] = json.loads(text.replace("&quot;", '"'))
    return visible


def test_values_of_the_nearest_step_are_shown(seen: dict[str, Any]) -> None:
    assert seen["first"]["text"] == ["step 1", "loss with all penalties: 1"]
    assert (seen["first"]["shown"], seen["first"]["circles"]) == ("block", 1)
    assert seen["last"]["text"] == ["step 4", "loss with all penalties: -2"]
    assert seen["gone"] == "none"


def test_the_value_of_the_cell_under_the_pointer_is_shown(seen: dict[str, Any]) -> None:
    assert seen["cell"]["shown"] == "block"
    [number] = re.findall(r"^layer 7, expert (\d+): ", seen["cell"]["words"])
    assert seen["cell"]["words"].endswith(f": {np.float16(np.linspace(0, 2, 24)[int(number)]):.4g} times the mean")


def test_a_value_that_is_not_finite_has_no_point(seen: dict[str, Any]) -> None:
    assert seen["gap"]["text"] == ["step 3", "gradient norm: not finite"] and seen["gap"]["circles"] == 0


def test_lines_are_smoothed_without_the_bias_of_their_beginning(seen: dict[str, Any]) -> None:
    # 1, 0, -1, -2 with weight 0.5: (1/8 * 1 + 1/4 * 0 - 1/2 * 1 - 1 * 2) / 15/8
    mean = (1 / 8 - 1 / 2 - 2) / (15 / 8)
    assert seen["control"] and seen["paths"] == 1 and seen["left"] == 0 and seen["finite"]
    assert seen["smoothed"]["text"][1] == f"loss with all penalties: -2 (smoothed {mean:.5g})"
