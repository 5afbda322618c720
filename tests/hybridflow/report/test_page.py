"""The report: what stands on the page of a run, and what a run that cannot be drawn is told."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.cli.main import main
from hybridflow.metrics import names as metrics
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.device_samples import DeviceFile, DeviceSample
from hybridflow.metrics.logger import Metrics
from hybridflow.metrics.timeline import Timeline, TimelineSpan
from hybridflow.report.choice import sections
from hybridflow.report.over_time import timeline_plots
from hybridflow.report.plots import BarPlot, LanePlot, LinePlot, Plot, bucketed
from hybridflow.report.run_data import read_run
from hybridflow.rundir.run_record import record_end, record_start
from hybridflow.rundir.status.first_failure import describe, write_failure
from hybridflow.rundir.status.hosts_file import NetworkSetting, RunHost, write_hosts
from hybridflow.rundir.status.lock import hold
from hybridflow.rundir.status.progress import PhaseFile
from tests.support.browser import CHROMIUM, dom_after
from tests.support.stored_samples import learned_from, make_run, samples_of, store
from tests.support.work import calls_of

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results"
FILES = MetricsConfig(console=False, csv=False, tensorboard=False)


class Page(HTMLParser):
    """Content of a page: its summary, and of each plot its texts and its description for those who do not see it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title = ""
        self.summary: dict[str, str] = {}
        self.headings: list[str] = []
        self.plots_by_name: dict[str, dict[str, Any]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self._figure: dict[str, Any] = {}
        self._fact = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag == "figure":
            self._figure = self.plots_by_name[given["id"]] = {
                "texts": [],
                "caption": "",
                "note": "",
                "paths": 0,
                "legend": [],
            }
        elif tag == "svg":
            self._figure |= {"role": given["role"], "alt": given["aria-label"]}
        elif tag == "path":
            self._figure["paths"] += 1
        if tag not in ("meta", "path", "use", "br", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        where = self._open[-1] if self._open else ""
        if where == "title":
            self.title += data
        elif where == "h2":
            self.headings.append(data)
        elif where == "dt":
            self._fact = data
        elif where == "dd":
            self.summary[self._fact] = data
        elif where == "figcaption":
            self._figure["caption"] += data
        elif where == "p" and self._figure:
            self._figure["note"] += data
        elif where in ("li", "code") and self._figure:
            self._figure["legend"].append(data)
        elif where in ("text", "tspan"):
            self._figure["texts"].append(data.strip())


def report(directory: Path, *options: str) -> Page:
    assert main(["report", str(directory), *options]) == 0
    return Page(Path(options[1] if options else directory / "report.html").read_text())


def plots(directory: Path) -> dict[str, Plot]:
    return {plot.name: plot for section in sections(read_run(directory)) for plot in section.plots}


def stored(name: str, tmp_path: Path) -> Path:
    """A run's directory of what is kept of it: `<folder>` or `<folder>/<run>` of the results."""
    directory = tmp_path / name.replace("/", "-")
    directory.mkdir()
    folder, _, run = name.partition("/")
    shutil.copy(RESULTS / folder / (f"{run}-metrics.jsonl" if run else "metrics.jsonl"), directory / "metrics.jsonl")
    if (RESULTS / folder / "timeline.json.gz").exists():
        (directory / "timeline.json").write_bytes(gzip.decompress((RESULTS / folder / "timeline.json.gz").read_bytes()))
    if (RESULTS / folder / "recipe.yaml").exists():
        shutil.copy(RESULTS / folder / "recipe.yaml", directory)
    return directory


def test_a_timeline_of_calls_too_short_to_be_seen() -> None:
    spans = [TimelineSpan("actor", 0, "update", begin, begin + 1e-6) for begin in (0.0, 1e6)]
    assert list(timeline_plots(spans)) == []


def step(number: int, **more: float) -> dict[str, float]:
    return {
        metrics.REWARD_MEAN: number / 10,
        metrics.REWARD_STD: 0.25,
        "reward/arithmetic/mean": number / 10,
        metrics.TRAIN_LOSS: 0.1 / number,
        metrics.ROLLOUT_THROUGHPUT: 1000.0 * number,
        metrics.TRAIN_STEP_TIME: 1000.0,
        metrics.ROLLOUT_TIME: 400.0,
        metrics.REWARD_LATENCY: 100.0,
        **more,
    }


def small_run(directory: Path, **more: float) -> Path:
    with Metrics(FILES, directory) as log:
        log.log(1, {metrics.SFT_LOSS: 2.0}, phase="sft")
        for number in range(1, 6):
            log.log(number, step(number, **more))
        log.log(5, {metrics.of_set(metrics.EVAL, "accuracy"): 0.75}, phase="eval")
    return directory


def test_the_page_has_the_facts_and_a_plot_of_all_that_was_logged(tmp_path: Path) -> None:
    directory = small_run(tmp_path / "a <run>")
    (directory / "recipe.yaml").write_text(
        "name: a\nseed: 7\nalgorithm: {name: grpo}\ntrainer: {steps: 20}\n"
        "model: {create: {config: {architectures: [Qwen3MoeForCausalLM], num_hidden_layers: 2}}}\n"
        'placement: {actor: "cpu:0-1", critic: null}\n'
        "train:\n  layout: {tp: 1, ep: 2}\n  lora: {rank: 8, alpha: 16.0, targets: [q_proj, v_proj]}\n"
        "  mtp: {lr: null, clip_grad: 1.0}\n"
    )
    page = report(directory)
    assert page.title == "a <run>: run report"
    assert page.headings == ["Learning", "Optimisation", "Speed and memory"]
    assert list(page.plots_by_name) == ["rewards", "losses", "step-times", "throughput"]
    assert page.summary == {
        "Steps": "5 of 20",
        "Records": "sft 1, train 5, eval 1",
        "Reward, first and last step": "0.1 → 0.5",
        "Held-out accuracy": "0.75 (step 5)",
        "Median throughput": "3,000 tokens/s",
        "Median time of a step": "1 s",
        "Algorithm": "grpo",
        "Model": "Qwen3MoeForCausalLM, num_hidden_layers 2",
        "Layout of the actor": "tp 1, ep 2",
        "Placement": "actor cpu:0-1",
        "Adapters": "rank 8, alpha 16, of q_proj, v_proj",
        "Training of the layer that drafts": "learning rate that of the actor, gradient norm up to 1.0",
        "Seed": "7",
    }
    rewards = page.plots_by_name["rewards"]
    assert rewards["caption"] == "Rewards"
    assert rewards["role"] == "img"
    assert rewards["alt"] == "Rewards by step: reward/mean from 0.1 to 0.5, lowest 0.1, highest 0.5"
    assert {"reward", "step"} <= set(rewards["texts"])
    assert rewards["legend"] == ["mean ± standard deviation of the samples", "mean of all samples ", "reward/mean"]
    assert {"s", "generation", "rewards", "everything else", "whole step"} <= set(
        page.plots_by_name["step-times"]["texts"]
    )


def test_a_correction_has_its_plots_beside_the_mismatch(tmp_path: Path) -> None:
    plots_by_name = {
        metrics.MISMATCH_LOGPROB_MEAN: 1e-6,
        metrics.CORRECTION_KL_K3: 1e-3,
        metrics.CORRECTION_CHI_SQUARE_SEQUENCE: 0.2,
        metrics.CORRECTION_EFFECTIVE_SAMPLES: 0.8,
        metrics.CORRECTION_TRUNCATED: 0.1,
        metrics.CORRECTION_LOST_SAMPLES: 0.3,
    }
    with Metrics(FILES, tmp_path) as log:
        for number in (1, 2):
            log.log(number, {name: number * value for name, value in plots_by_name.items()})
    by_name = plots(tmp_path)
    assert list(by_name).index("correction-divergence") == list(by_name).index("mismatch") + 1
    for name, drawn in (("correction-divergence", 2), ("correction-weights", 3)):
        plot = by_name[name]
        assert isinstance(plot, LinePlot) and len(plot.lines) == drawn


def test_the_mismatch_stands_next_to_the_precisions_that_it_compares(tmp_path: Path) -> None:
    directory = small_run(tmp_path, **{metrics.MISMATCH_LOGPROB_MEAN: 0.02})
    name = "Mismatch of log-probs, first and last step"
    assert report(directory).summary[name] == "0.02 → 0.02"
    (directory / "recipe.yaml").write_text(
        "train: {dtype: bfloat16, precision: null}\nrollout: {engine: {dtype: bfloat16, precision: fp8}}\n"
    )
    assert report(directory).summary[name] == "0.02 → 0.02 (trainer bfloat16, engines fp8, KV cache bfloat16)"


def test_the_band_is_one_standard_deviation_around_the_mean(tmp_path: Path) -> None:
    plot = plots(small_run(tmp_path))["rewards"]
    assert isinstance(plot, LinePlot) and plot.band is not None
    [line] = plot.lines
    np.testing.assert_allclose(plot.band.low, line.y - 0.25)
    np.testing.assert_allclose(plot.band.high, line.y + 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("algorithms/ppo", {"value-losses", "reference-kl", "kl-coefficient", "entropy", "mismatch", "memory"}),
        ("algorithms/remax", {"rewards", "accuracy", "warmup-loss", "gradient-norm", "response-length", "step-times"}),
        ("algorithms/safe_rlhf", {"costs", "cost-multiplier", "truncated", "learning-rate"}),
        ("demo/seed-1", {"losses", "throughput"}),
        ("h200-1gpu", {"losses", "memory"}),
        ("h200-2gpu-ppo", {"timeline", "value-losses", "step-times"}),
    ],
)
def test_the_stored_runs(tmp_path: Path, name: str, expected: set[str]) -> None:
    directory = stored(name, tmp_path)
    page = report(directory)
    assert expected <= set(page.plots_by_name)
    for figure in page.plots_by_name.values():
        assert figure["alt"] and figure["caption"] and figure["paths"] and len(figure["texts"]) > 3, figure["caption"]


def test_the_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    directory = stored("h200-2gpu-ppo", tmp_path)
    page = report(directory)
    linked = [value for _, name, value in page.attributes if not name.startswith("xmlns")]
    assert not [value for value in linked if "//" in value]
    assert all(value.startswith("#") for _, name, value in page.attributes if name in ("src", "href", "xlink:href"))
    text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", (directory / "report.html").read_text())
    text = text.replace('"http://www.w3.org/2000/svg"', "")  # the script's name of SVG, which nobody fetches
    assert not re.search(r"https?:|@import|url\((?!#)|<script [^>]*src|<link|fetch\(|import\(|XMLHttp", text)
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))


def test_colours_are_left_to_the_page(tmp_path: Path) -> None:
    report(small_run(tmp_path))
    text = (tmp_path / "report.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r'(href="|url\()#\w+', "", drawing))
    used = set(re.findall(r"var\((--[\w-]+)\)", text)) - {"--mark"}  # which is one of a series
    assert "prefers-color-scheme: dark" in text
    assert all(text.count(f"{name}: #") == 2 for name in used)  # one for light and one for dark


def test_phases_that_overlap_leave_nothing_rather_than_less(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, step(1))
        log.log(2, step(2, **{metrics.INFERENCE_TIME: 300.0, metrics.TRAIN_UPDATE_TIME: 500.0}))
    plot = plots(tmp_path)["step-times"]
    assert isinstance(plot, BarPlot)
    layers = {layer.label: layer.values.tolist() for layer in plot.layers}
    assert layers["generation"] == [0.4, 0.4]
    assert layers["inference"] == [0.0, 0.3]
    assert layers["everything else"] == [pytest.approx(0.5), 0.0]
    assert plot.total.values.tolist() == [1.0, 1.0]


def test_a_first_step_that_compiles_does_not_flatten_the_others(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in range(1, 8):
            log.log(number, step(number) | {metrics.TRAIN_STEP_TIME: 60_000.0 if number == 1 else 1000.0})
    plot = plots(tmp_path)["step-times"]
    assert isinstance(plot, BarPlot)
    assert plot.limit == pytest.approx(1.15)
    assert "↑ 60" in report(tmp_path).plots_by_name["step-times"]["texts"]


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, {metrics.TRAIN_LOSS: 1.0, metrics.TRAIN_ENTROPY: math.nan})
        log.log(2, {metrics.TRAIN_LOSS: math.nan, metrics.TRAIN_ENTROPY: math.nan})
        log.log(3, {metrics.TRAIN_LOSS: -math.inf})
        log.log(4, {metrics.TRAIN_LOSS: 4.0})
    plots_by_name = report(tmp_path).plots_by_name
    assert plots_by_name["losses"]["alt"] == "Loss of the actor by step: train/loss from 1 to 4, lowest 1, highest 4"
    assert plots_by_name["losses"]["note"] == "2 values are not finite and not shown."
    assert "entropy" not in plots_by_name
    assert "<td><code>train/entropy</code></td><td>not finite</td><td>2</td>" in (tmp_path / "report.html").read_text()


def test_what_does_not_change_has_no_panel(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in range(1, 6):
            constant = {metrics.ROLLOUT_STALENESS: 0.0, metrics.TRAIN_KL_COEF: 0.1, metrics.TRAIN_ENTROPY: math.nan}
            clipped = {metrics.TRAIN_CLIP_FRACTION_HIGH: 0.1 * number, metrics.TRAIN_CLIP_FRACTION_DUAL: 0.0}
            log.log(number, step(number) | constant | clipped)
        log.log(5, {metrics.of_set(metrics.EVAL, "accuracy"): 0.75}, phase="eval")
    page = report(tmp_path)
    assert not {"staleness", "kl-coefficient", "entropy", "accuracy"} & set(page.plots_by_name)
    assert page.plots_by_name["clip-fraction"]["legend"] == [
        "ratio above the upper bound ",
        metrics.TRAIN_CLIP_FRACTION_HIGH,
    ]
    text = (tmp_path / "report.html").read_text()
    assert "5 metrics without a plot: constant, or measured once" in text
    for name, value, count in (
        (metrics.ROLLOUT_STALENESS, "0", 5),
        (metrics.TRAIN_KL_COEF, "0.1", 5),
        (metrics.TRAIN_ENTROPY, "not finite", 5),
        (metrics.TRAIN_CLIP_FRACTION_DUAL, "0", 5),
        (metrics.of_set(metrics.EVAL, "accuracy"), "0.75", 1),
    ):
        assert f"<td><code>{name}</code></td><td>{value}</td><td>{count}</td>" in text, name


def test_a_run_of_one_step_has_a_page_without_lines(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, step(1))
    assert list(report(tmp_path).plots_by_name) == ["step-times"]


def test_sections_are_linked(tmp_path: Path) -> None:
    page = report(small_run(tmp_path))
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == [f"#section-{number}" for number in (1, 2, 3)] and len(page.headings) == 3
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert {link.removeprefix("#") for link in links} <= set(identifiers)


@pytest.mark.slow
def test_the_first_line_is_the_outcome_and_the_facts_name_the_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: </script><b>\ntrainer: {steps: 20}\n")
    monkeypatch.setattr(sys, "argv", ["hybridflow", "train", "<recipe>.yaml"])
    began = time.time()
    for after, at in ((None, began - 9000), (4, began - 60)):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        record_start(tmp_path, after, {"torch": "2.11.0"}, "abc with changes", 30_500_000_000, 3_300_000_000)
    monkeypatch.setattr(time, "time", lambda: began)
    phases = PhaseFile(tmp_path / "phase.json")
    phases.step = 5
    phases.enter("rollout")
    text = _outcome_of(tmp_path)
    assert text == "Stopped in step 5 of 20, rollout after 2.5 h."
    write_failure(tmp_path, describe(tmp_path, "actor rank 2: <ValueError>", "step 5, update"))
    assert _outcome_of(tmp_path) == "Failed in step 5, update after 2.5 h: actor rank 2: &lt;ValueError&gt;"
    phases.enter("end")
    (tmp_path / "failure.json").unlink()
    assert _outcome_of(tmp_path) == "Ended after step 5 of 20 in 2.5 h."
    record_end(tmp_path, ["held-out accuracy: 0.396 -> 0.472"])
    assert _outcome_of(tmp_path) == "Finished all 20 steps in 2.5 h.\nheld-out accuracy: 0.396 -&gt; 0.472"
    with hold(tmp_path, "run_dir/name"):
        assert _outcome_of(tmp_path) == "Running: step 5 of 20, end."
    page = report(tmp_path)
    assert page.summary["Parameters"] == "30.5 billion, 3.3 billion for a token"
    assert page.summary["Command"] == "hybridflow train '<recipe>.yaml'"
    assert (page.summary["Commit"], page.summary["Versions"]) == ("abc with changes", "torch 2.11.0")
    assert page.summary["Resumed"].startswith("after step 4, 2")
    text = (tmp_path / "report.html").read_text()
    assert "<details><summary>Recipe</summary><pre>name: &lt;/script&gt;&lt;b&gt;\n" in text


def _outcome_of(directory: Path) -> str:
    report(directory)
    [outcome] = re.findall(r'<p class="outcome">(.*?)</p>', (directory / "report.html").read_text(), re.DOTALL)
    return str(outcome)


def test_points_are_data_that_cannot_end_their_element(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in (1, 2, 3):
            log.log(number, {"data/<script><b>/reward_mean": 0.1 * number, "data/b/reward_mean": math.nan})
    report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert json.loads(data)["lines"] == [
        {"words": "<script><b>", "x": [1.0, 2.0, 3.0], "y": [0.1, 0.2, 0.3]},
    ]
    assert "<b>" not in text


def test_figures_of_other_scales_and_equal_ones_do_not_hide_each_other(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in range(1, 6):
            log.log(
                number,
                {
                    metrics.TRAIN_LOSS: 0.1 / number,
                    metrics.TRAIN_POLICY_LOSS: 0.1 / number + 1e-4,
                    metrics.CRITIC.value_loss: 40.0 / number,
                    metrics.COST_CRITIC.value_loss: 0.01 * number,
                    metrics.TRAIN_CLIP_FRACTION_LOW: 0.1,
                    metrics.TRAIN_CLIP_FRACTION_HIGH: 0.02 * number,
                    metrics.TRAIN_KL_K1: 0.01 * number,
                    metrics.TRAIN_KL_K3: 0.011 * number,
                    metrics.CRITIC.explained_variance: 0.1 * number,
                },
            )
    page = report(tmp_path)
    assert list(page.plots_by_name) == [
        *("losses", "clip-fraction", "approximate-kl", "value-losses", "cost-value-losses", "explained-variance")
    ]
    assert page.plots_by_name["losses"]["note"] == "train/policy_loss is nearly the same."
    drawn = {name: [line.label for line in plot.lines] for name, plot in plots(tmp_path).items()}  # type: ignore[attr-defined]
    assert drawn["clip-fraction"] == [metrics.TRAIN_CLIP_FRACTION_LOW, metrics.TRAIN_CLIP_FRACTION_HIGH]
    assert drawn["approximate-kl"] == [metrics.TRAIN_KL_K1, metrics.TRAIN_KL_K3]
    assert drawn["value-losses"] == [metrics.CRITIC.value_loss]
    with Metrics(FILES, tmp_path / "other") as log:
        for number in range(1, 6):
            log.log(number, {metrics.TRAIN_LOSS: 40.0 / number, metrics.TRAIN_POLICY_LOSS: 0.1 * number})
    plots_by_name = report(tmp_path / "other").plots_by_name
    assert [figure["caption"] for figure in plots_by_name.values()] == [
        *("Loss of the actor", "Loss of the actor: train/policy_loss")
    ]


def test_sources_of_equal_rewards_are_one_line(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in range(1, 6):
            log.log(number, {f"data/{source}/reward_mean": number / 10 for source in ("easy", "hard")})
    assert report(tmp_path).plots_by_name["rewards-by-source"]["note"] == "data/hard/reward_mean is nearly the same."
    [line] = plots(tmp_path)["rewards-by-source"].lines  # type: ignore[attr-defined]
    assert line.label == "data/easy/reward_mean"


def test_a_run_on_cpus_has_nothing_of_gpus(tmp_path: Path) -> None:
    directory = tmp_path
    with Metrics(FILES, directory) as log:
        for number in (1, 2):
            log.log(number, {metrics.ACTOR_GPU_MEMORY: 1500.0 * number, "memory/critic_host_mem_mb": 1400.0 * number})
    recipe = "name: a\nplacement: {pools: {all: 'cpu:0-1'}, actor: all, rollout: 'cpu:0', critic: null}\n"
    (directory / "recipe.yaml").write_text(recipe)
    report(directory)
    text = (directory / "report.html").read_text()
    assert "memory/critic_host_mem_mb" in text and not re.search(r"GPU|gpu", text)
    (directory / "recipe.yaml").write_text(recipe.replace("cpu:0-1", "cuda:0-1"))
    assert metrics.ACTOR_GPU_MEMORY in report(directory).plots_by_name["memory"]["legend"]


def a_text(number: int) -> dict[str, Any]:
    return {"phase": "train", "step": number, "sample": number, "version": number, "reward": 0.5, "answer": [1, "<b>"]}


@pytest.mark.slow
def test_samples_stand_in_a_table(tmp_path: Path) -> None:
    small_run(tmp_path)
    report(tmp_path)
    assert ">Samples</h2>" not in (tmp_path / "report.html").read_text()
    texts = [a_text(number) | {"prompt": f"p{number}=", "response": "<i>&\n" * 500} for number in range(1, 401)]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    (tmp_path / "samples.jsonl").write_text(lines + lines[:50])  # a kill leaves half a line
    assert calls_of(lambda: report(tmp_path)) < 2_000_000  # one more for each text would be few
    table = re.findall(r">Samples</h2>.*</table>", (tmp_path / "report.html").read_text(), re.DOTALL)[0]
    assert re.findall(r"p\d+=", table) == ["p1=", *(f"p{number}=" for number in range(385, 401))]
    assert "<i>" not in table and "&lt;i&gt;&amp;" in table and "[1, &#34;&lt;b&gt;&#34;]" in table
    assert len(table) < 17 * 4000
    assert "<td>train 400</td><td>0.5</td><td>400</td><td>400</td>" in table
    assert "<th>data row</th>" not in table and "<th>group</th>" not in table  # no sample has one


def test_samples_of_the_store_stand_by_reward_above_those_that_are_texts(tmp_path: Path) -> None:
    small_run(make_run(tmp_path))
    texts = [a_text(number) | {"prompt": f"p{number}=", "response": "r"} for number in (0, 2)]
    texts += [a_text(2) | {"phase": "eval", "prompt": "e2=", "response": "r"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    response = "9" * 2000
    store(tmp_path, learned_from(4, samples_of([("4=", response)] * 40, [float(number % 37) for number in range(40)])))
    report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    [table] = re.findall(r">Samples</h2>.*</table>", page, re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr>")[2:]]
    assert [row[0] for row in rows] == [
        *["train 4"] * 16,
        *["train 3"] * 8,
        *["train 2"] * 8,
        *("train 0", "eval 2"),
    ]
    # One of each prompt, of four samples each: two prompts have a reward of 0.
    assert [float(row[1]) for row in rows[:16]] == [36, 35, 31, 27, 23, 19, 15, 11, 24, 20, 16, 12, 8, 4, 0, 0]
    assert [float(row[1]) for row in rows[16:24]] == [2.0, 1.0, 0.5, 0.5, 0.25, 0.0, -0.5, -3.0]
    heads = ["step", "reward", "version", "group", "sample", "length", "by function"]
    assert re.findall("<th>(.*?)</th>", table) == [*heads, "prompt", "response", "answer"]
    assert rows[16] == [
        *("train 3", "2", "3", "7", "28", "4, stop", "reward/exact 1", "1+3=", "4 a&lt;eos&gt;"),
        "",
    ]
    assert f"hybridflow samples {tmp_path.name} --step N" in page
    assert len(table) < 40 * 1500
    (tmp_path / "samples" / "step-00000003.parquet").write_text("half")
    assert main(["report", str(tmp_path)]) == 2


def test_equal_samples_stand_once_with_their_number(tmp_path: Path) -> None:
    small_run(tmp_path)
    equal = a_text(3) | {"prompt": "1+1=", "response": "2"}
    texts = [equal | {"sample": sample} for sample in (7, 8, 9)] + [equal | {"response": "3", "sample": 10}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    report(tmp_path)
    [table] = re.findall(r">Samples</h2>.*</table>", (tmp_path / "report.html").read_text(), re.DOTALL)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr>")[2:]]
    assert [(row[1], row[4], row[-2]) for row in rows] == [("3", "7", "2"), ("1", "10", "3")]


def test_hosts_and_what_is_in_force_of_their_network_stand_in_a_table(tmp_path: Path) -> None:
    small_run(tmp_path)
    report(tmp_path)
    assert ">Hosts</h2>" not in (tmp_path / "report.html").read_text()
    preset = (NetworkSetting("NCCL_IB_TC", "106", "preset roce"), NetworkSetting("NCCL_DEBUG", "<INFO>", "environment"))
    hosts = [RunHost(f"node-{index}", f"10.0.0.{index}", "eth0", "train", 8, 64, preset) for index in range(3)]
    odd = RunHost("node-3", "10.0.0.3", None, None, 0, 4, (), shares_disk=False)
    write_hosts(tmp_path, [*hosts, odd])
    assert "Hosts" in report(tmp_path).headings
    [table] = re.findall(r">Hosts</h2>.*?<table>(.*?)</table>", (tmp_path / "report.html").read_text(), re.DOTALL)
    _, _, one, other = table.split("<tr>")
    assert "node-0 (10.0.0.0), node-1 (10.0.0.1), node-2 (10.0.0.2)</td><td>eth0</td><td>train</td>" in one
    assert "<td>8 GPUs each</td>" in one
    assert "NCCL_IB_TC=106 (preset roce)\nNCCL_DEBUG=&lt;INFO&gt; (environment)</td>" in one
    assert "node-3 (10.0.0.3); without the run" in other and "<td>4 CPU slots each</td>" in other
    assert "nothing set" in other
    (tmp_path / "hosts.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2


def test_any_staleness_is_shown(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for number in (1, 2):
            log.log(number, {"rollout/staleness_mean": 1.0 * number, "rollout/staleness_max": 2.0})
    figure = report(tmp_path).plots_by_name["staleness"]
    assert "versions" in figure["texts"]
    assert figure["legend"] == ["staleness ", "rollout/staleness_mean", "staleness max ", "rollout/staleness_max"]


def spans(steps: int, ranks: int = 2) -> list[TimelineSpan]:
    """Steps of ten seconds: generation, update, and weights to the engines."""
    return [
        span
        for number in range(steps)
        for span in (
            TimelineSpan("rollout", 0, "generate", 10.0 * number, 10.0 * number + 4),
            *(TimelineSpan("actor", rank, "update", 10.0 * number + 4, 10.0 * number + 8) for rank in range(ranks)),
            TimelineSpan("actor", 0, "checkpoint_written", 10.0 * number + 8, 10.0 * number + 8.00001),
            TimelineSpan("rollout", 0, "commit_weights", 10.0 * number + 9, 10.0 * number + 10),
        )
    ]


def timeline_of(directory: Path, recorded: list[TimelineSpan]) -> LanePlot:
    timeline = Timeline()
    timeline.record(recorded)
    timeline.write(small_run(directory) / "timeline.json")
    plot = plots(directory)["timeline"]
    assert isinstance(plot, LanePlot)
    return plot


def test_the_last_steps_are_shown_by_role_and_rank(tmp_path: Path) -> None:
    plot = timeline_of(tmp_path, spans(8))
    assert [name for name, _ in plot.lanes] == ["actor 0", "actor 1", "rollout 0"]
    assert plot.labels == ("update", "generate", "commit_weights")
    lanes = dict(plot.lanes)
    assert [(bar.label, round(bar.begin), round(bar.end)) for bar in lanes["actor 1"]] == [
        ("update", begin, begin + 4) for begin in (4, 14, 24)
    ]
    assert plot.note == "Calls too short to be seen are left out."
    page = report(tmp_path)
    assert {"actor 0", "rollout 0", "generate", "seconds"} <= set(page.plots_by_name["timeline"]["texts"])


def test_of_many_ranks_the_first_of_each_role_are_shown(tmp_path: Path) -> None:
    plot = timeline_of(tmp_path, spans(4, ranks=100))
    assert [name for name, _ in plot.lanes] == [*(f"actor {rank}" for rank in range(20)), "rollout 0"]
    assert "40 of 101 ranks" in plot.note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "gpus", "lines"),
    [(1, 2, ["GPU 0", "GPU 1"]), (2, 8, ["10.0.0.0", "10.0.0.1"]), (9, 1, ["9 GPUs of 9 nodes"])],
)
def test_devices_over_time(tmp_path: Path, nodes: int, gpus: int, lines: list[str]) -> None:
    file = DeviceFile(small_run(tmp_path) / "devices.jsonl")
    began = 1.8e9
    file.add(
        DeviceSample(began + 60 * minute, f"10.0.0.{node}", gpu, 10.0 * (gpu + 1) - 3 + minute, 2**30, math.nan, 1980.0)
        for minute in range(4)
        for node in range(nodes)
        for gpu in range(gpus)
    )
    file.close()
    plot = plots(tmp_path)["device-utilisation"]
    assert isinstance(plot, LinePlot)
    assert [line.label for line in plot.lines] == lines
    assert plot.lines[0].x.tolist() == [0, 1, 2, 3]
    assert plot.lines[0].y[-1] == (10.0 if nodes != 2 else 45.0)
    page = report(tmp_path)
    assert "device-utilisation" in page.plots_by_name
    assert not {"device-power", "device-memory", "device-clock"} & set(page.plots_by_name)  # not finite, or constant
    assert page.summary["GPUs"].startswith(f"{nodes * gpus}, used to ")
    assert page.summary["Largest memory of a GPU"] == "1.0 GiB"
    assert "Mean power of all GPUs" not in page.summary


def test_gpus_of_a_run_that_went_on_elsewhere_are_not_added_up(tmp_path: Path) -> None:
    file = DeviceFile(small_run(tmp_path) / "devices.jsonl")
    began = 1.8e9
    for host, minutes in (("10.0.0.0", range(4)), ("10.0.0.1", range(10, 14))):
        file.add(
            DeviceSample(began + 60 * minute, host, gpu, 50.0, 2**30, 100.0 * (gpu + 1), 1980.0)
            for minute in minutes
            for gpu in range(2)
        )
    file.close()
    summary = report(tmp_path).summary
    assert summary["GPUs"] == "2, used to 50 % on average"
    assert summary["Mean power of all GPUs"] == "300 W"


def test_a_bucket_keeps_its_extremes() -> None:
    x, y = np.arange(1000, dtype=np.float64), np.zeros(1000)
    y[[500, 700, 901]] = 9.0, -3.0, math.nan
    y[100:110] = math.nan
    buckets = bucketed(x, y, 100)
    assert len(buckets.x) == len(buckets.mean) == 100
    assert (np.nanmax(buckets.high), np.nanmin(buckets.low)) == (9.0, -3.0)
    assert buckets.mean[50] == pytest.approx(0.9)
    assert np.isnan(buckets.mean).tolist() == [number == 10 for number in range(100)]


@pytest.mark.slow
def test_a_long_run_gives_a_small_page_soon(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (RESULTS / "algorithms/safe_rlhf-metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "train"]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1, 10_001):
            file.write(json.dumps(steps[number % len(steps)] | {"step": number}) + "\n")
    pages: list[Page] = []
    assert calls_of(lambda: pages.append(report(tmp_path))) < 2_000 * 10_000  # half of it for what no step adds to
    [page] = pages
    assert (tmp_path / "report.html").stat().st_size < 5e6
    assert page.summary["Steps"] == "10,000"
    assert "10,000 steps in 80 bars" in page.plots_by_name["step-times"]["note"]
    highest = max(record["train/gradient_norm"] for record in steps if "train/gradient_norm" in record)
    assert f"highest {highest:.4g}" in page.plots_by_name["gradient-norm"]["alt"]


def test_a_run_that_goes_on_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 6, "rew')
    out = tmp_path / "elsewhere.html"
    assert report(tmp_path, "--out", str(out)).summary["Steps"] == "5"
    assert capsys.readouterr() == (f"{out}\n", "")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("metrics.jsonl", "", "report: {run}/metrics.jsonl holds no records yet"),
        (
            "metrics.jsonl",
            '{"phase": "train", "step": 1}\n[1, 2]\n',
            "{run}/metrics.jsonl:2: '[1, 2]' is no record, expected an object with phase, step and numbers",
        ),
        ("metrics.jsonl", "what\n", "{run}/metrics.jsonl:1: 'what' is no record, expected"),
        ("metrics.jsonl", '{"phase": "train", "step": 1, "x": "high"}\n', "{run}/metrics.jsonl:1: "),
        ("metrics.jsonl", '{"phase": "train", "step": 1, "x": true}\n', "{run}/metrics.jsonl:1: "),
        ("metrics.jsonl", '{"phase": "train"}\n', "{run}/metrics.jsonl:1: "),
        (
            "devices.jsonl",
            '{"time": 1}\n',
            "{run}/devices.jsonl:1: '{{\"time\": 1}}', expected an object with time,",
        ),
        ("samples.jsonl", "[1]\n", "{run}/samples.jsonl: b'[1]\\n' is no sample, expected an object with prompt"),
        ("samples.jsonl", '{"phase": "train"}\n', '{run}/samples.jsonl: b\'{{"phase": "train"}}\\n\' is no sample'),
        (
            "samples.jsonl",
            '{"phase": "", "step": [], "prompt": "", "response": "", "answer": "", "reward": 0, "version": 0}\n',
            '{run}/samples.jsonl: b\'{{"phase": "", "step": [], ',
        ),
        ("recipe.yaml", "a: [", "{run}/recipe.yaml:1: "),
        ("recipe.yaml", "- a\n", "{run}/recipe.yaml: expected keys and values, found a list"),
        ("timeline.json", "{}", "{run}/timeline.json is no timeline of a run"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: str
) -> None:
    small_run(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"hybridflow: {line.format(run=tmp_path)}")
    assert not (tmp_path / "report.html").exists()


def test_directories_that_are_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        tmp_path / "nowhere": f"report: no such directory: {tmp_path}/nowhere; expected that of a run",
        tmp_path: f"report: no metrics.jsonl in {tmp_path}; a run writes it unless metrics.jsonl=false",
    }
    for path, line in expected.items():
        assert main(["report", str(path)]) == 2
        assert capsys.readouterr() == ("", f"hybridflow: {line}\n")
    small_run(tmp_path)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert capsys.readouterr().err == (
        f"hybridflow: report: cannot write {tmp_path}/no/page.html: No such file or directory\n"
    )


MEASURE = """
for (const figure of document.querySelectorAll("figure")) {
  const box = figure.querySelector("svg").getBoundingClientRect();
  figure.dataset.size = `${Math.round(box.width)} ${Math.round(box.height)}`;
}
document.body.dataset.colours = getComputedStyle(document.body).backgroundColor;
document.body.dataset.overflow = 
  document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_every_figure_has_a_size_in_a_browser(tmp_path: Path, dark: bool) -> None:
    directory = stored("h200-2gpu-ppo", tmp_path)
    page = report(directory)
    flags = ["--window-size=1200,3000", *(["--force-dark-mode"] if dark else [])]
    dumped = dom_after(directory / "report.html", MEASURE, tmp_path, *flags)
    sizes = dict(re.findall(r'<figure id="([\w-]+)"[^>]* data-size="(\d+ \d+)"', dumped))
    assert set(sizes) == set(page.plots_by_name)
    for name, size in sizes.items():
        width, height = map(int, size.split())
        assert width > 400 and height > 100, name
    assert 'data-overflow="0"' in dumped
    assert f'data-colours="rgb({"18, 22, 28" if dark else "255, 255, 255"})"' in dumped
