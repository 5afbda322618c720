"""Held-out sets in a report: their table, their curves, the best checkpoint, and responses side by side."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.metrics import names as metrics
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.evaluation_statistics import ScoredResponse, estimates, with_intervals
from hybridflow.metrics.logger import Metrics
from hybridflow.report.choice import sections
from hybridflow.report.plots import LinePlot
from hybridflow.report.run_data import read_run
from hybridflow.rundir.samples.evaluation_texts import (
    EvaluationText,
    forget_after,
    steps_with_texts,
    text_file,
    write_texts,
)

FILES = MetricsConfig(console=False, csv=False, tensorboard=False)


def measured(*passing: int) -> dict[str, float]:
    """Figures of a set `aime` of as many prompts, with so many passing responses of 4 each."""
    groups = [
        [ScoredResponse(float(row < count), row < count, int(row < count)) for row in range(4)] for count in passing
    ]
    values = with_intervals(estimates(groups, 4, votes=True)) | {metrics.SET_PROMPTS: len(passing)}
    return {metrics.of_set("aime", name): value for name, value in values.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    with Metrics(FILES, directory) as sinks:
        for step, passing in ((0, (0, 0, 1)), (10, (4, 4, 2)), (20, (4, 0, 3))):
            sinks.log(step, {"reward/mean": 0.5})
            sinks.log(step, {"eval/accuracy": 0.25 + step / 100} | measured(*passing), phase="eval")
            sinks.log(step, {"checkpoint/best_step": min(step, 10), "checkpoint/best_value": 0.833}, phase="checkpoint")
            reward = None if step == 20 else 1.0
            texts = [
                EvaluationText(row, f"prompt {row}", f"<b>{step}</b> {row}", row, reward, passing[row], 4)
                for row in (0, 2)
            ]
            write_texts(text_file(directory / "evaluations", "aime", step), texts)
    (directory / "recipe.yaml").write_text("checkpoint: {keep_best: {metric: eval/aime/mean@4}}\n")
    return directory


def page(run: Path, *options: str) -> str:
    assert main(["report", str(run), *options]) == 0
    return (run / "report.html").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    body = text[text.index(f">{heading}</h2>") :]
    body = body[: body.index("</table>")]
    return [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", body, re.DOTALL)
    ]


def test_the_table_has_the_first_the_highest_and_the_last_value(run: Path) -> None:
    head, *body = rows(page(run), "Evaluation")
    assert head == ["set", "prompts", "figure", "first", "highest", "last"]
    assert [(row[0], row[1], row[2]) for row in body] == [
        ("aime", "3", "reward_mean"), ("", "", "mean@4"), ("", "", "pass@4"), ("", "", "maj@4")
    ]  # fmt: skip
    first, highest, last = body[1][3:]
    assert first.startswith("0.083 [0.000, 0.247] (step 0)")
    assert highest.startswith("0.833 [") and highest.endswith("(step 10)")
    assert last.startswith("0.583 [") and last.endswith("(step 20)")


def test_the_table_has_what_is_measured_of_preferences(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with Metrics(FILES, directory) as sinks:
        for step, value in ((0, 0.5), (10, 0.75)):
            sinks.log(step, {"preference/loss": 0.5})
            sinks.log(step, {"eval/preference_accuracy": value, "eval/prompts": 8}, phase="eval")
    (directory / "recipe.yaml").write_text("{}\n")
    [head, row] = rows(page(directory), "Evaluation")
    assert "preference_accuracy" in " ".join(row) and "0.750 (step 10)" in " ".join(row), (head, row)


def test_a_set_has_a_curve_with_its_intervals(run: Path) -> None:
    by_name = {plot.name: plot for section in sections(read_run(run)) for plot in section.plots}
    plot = by_name["evaluation-aime"]
    assert isinstance(plot, LinePlot)
    assert [line.label for line in plot.lines] == ["mean@4", "pass@4", "maj@4"]
    line = plot.lines[0]
    assert line.x.tolist() == [0, 10, 20] and line.low is not None and line.high is not None
    assert (line.low < line.y).all() and (line.y < line.high).all()
    assert "95 % confidence intervals" in plot.note
    assert [line.label for line in by_name["accuracy"].lines] == ["eval/accuracy"]  # type: ignore[attr-defined]


def test_the_best_checkpoint_is_named(run: Path) -> None:
    assert "<dt>Best checkpoint</dt><dd>step 10, eval/aime/mean@4 0.833</dd>" in page(run)


def test_responses_of_two_steps_stand_side_by_side(run: Path) -> None:
    head, *body = rows(page(run), "Responses to held-out prompts")
    assert head == ["set aime: prompt", "answer", "step 0", "step 20"]
    assert [row[:2] for row in body] == [["prompt 0", "0"], ["prompt 2", "2"]]
    assert body[0][2] == "&lt;b&gt;0&lt;/b&gt; 0\n<small>reward 1; 0 of 4 pass</small>"
    assert body[1][3] == "&lt;b&gt;20&lt;/b&gt; 2\n<small>no reward; 3 of 4 pass</small>"
    head, *_ = rows(page(run, "--steps", "10", "20"), "Responses to held-out prompts")
    assert head[2:] == ["step 10", "step 20"]


def test_a_step_without_texts_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--steps", "0", "5"]) == 2
    error = "hybridflow: report: no texts of held-out sets of step 5; there are those of steps [0, 10, 20]\n"
    assert capsys.readouterr().err == error


def test_a_run_that_resumes_forgets_what_it_makes_again(run: Path) -> None:
    forget_after(run / "evaluations", 10)
    assert steps_with_texts(run / "evaluations") == {"aime": [0, 10]}
    assert steps_with_texts(run / "none") == {}
