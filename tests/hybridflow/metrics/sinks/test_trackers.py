"""The sinks for MLflow and trackio, which are no requirements of the project; runs of them need their libraries."""

from __future__ import annotations

import importlib.util
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.config import MetricsConfig, MlflowConfig, TrackioConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.metrics.sinks.trackers import check_trackers

NOTHING = {"console": False, "jsonl": False, "csv": False, "tensorboard": False, "samples_per_step": 0}


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def metrics(**sinks: Any) -> MetricsConfig:
    return MetricsConfig.model_validate(NOTHING | sinks)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: run\ntrainer: {steps: 4}\n")
    return run


def write(config: MetricsConfig, run: Path) -> None:
    """Two steps, one of a phase of its own, and a third after a resumption."""
    with Metrics(config, run) as log:
        log.log(1, {"loss": 2.0}, phase="sft")
        log.log(1, {"train/loss": 0.5, "train/gradient_norm": math.nan})
    with Metrics(config, run, resume_from_step=1) as log:
        log.log(2, {"train/loss": 0.25, "eval/pass@8": 1.0})
    with pytest.raises(UserError, match="already holds"):
        Metrics(config, run)


@pytest.mark.parametrize(
    ("library", "arguments"), [("mlflow", (MlflowConfig(), None)), ("trackio", (None, TrackioConfig()))]
)
def test_a_library_that_is_not_installed_is_refused(library: str, arguments: tuple[Any, Any], run: Path) -> None:
    if installed(library):
        pytest.skip(f"{library} is installed")
    line = f"metrics.{library}: {library} is not installed here; install it with .venv/bin/uv pip install"
    with pytest.raises(UserError, match=line):
        check_trackers(*arguments)
    with pytest.raises(UserError, match=line):
        Metrics(metrics(**{library: True}), run)


def test_true_stands_for_all_defaults() -> None:
    config = metrics(mlflow=True, trackio={"project": "p"})
    assert config.mlflow == MlflowConfig() and config.trackio == TrackioConfig(project="p")
    assert metrics(mlflow=False).mlflow is None
    assert MetricsConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_run_of_mlflow_resumes_under_its_identifier(run: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    with pytest.raises(UserError, match="no tracking_uri, expected one such as"):
        check_trackers(MlflowConfig(), None)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write(metrics(mlflow={"tracking_uri": uri, "experiment": "sums", "tags": {"a": "b"}}), run)
    client = mlflow.MlflowClient(tracking_uri=uri)
    [tracked] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (tracked.info.run_name, tracked.info.status, tracked.data.tags["a"]) == ("run", "FINISHED", "b")
    assert tracked.data.params["trainer.steps"] == "4"
    history = client.get_metric_history(tracked.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert client.get_metric_history(tracked.info.run_id, "eval/pass_8")[0].step == 2
    assert client.get_metric_history(tracked.info.run_id, "sft/loss")[0].value == 2.0
    with pytest.raises(UserError, match=r"metrics\.mlflow: refuses to begin: "):
        Metrics(metrics(mlflow={"tracking_uri": "nonsense://x"}), tmp_path / "other")


def test_a_run_of_trackio_resumes_under_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trackio")
    write(metrics(trackio={"project": "sums"}), run)
    with sqlite3.connect(run.parent / "database" / "sums.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("run", 1), ("run", 1), ("run", 2)]
    assert json.loads(rows[0][2]) == {"sft/loss": 2.0} and json.loads(rows[2][2])["train/loss"] == 0.25
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("metrics.wandb.mode=disabled", "expected online or offline; metrics.wandb=false leaves Weights & Biases out"),
        ("metrics.wandb=disabled", "expected true, false, or a mapping of its settings"),
        ("metrics.mlflow=disabled", "expected true, false, or a mapping of its settings"),
        ("metrics.trackio=my-project", "expected true, false, or a mapping of its settings"),
    ],
)
def test_a_sink_that_is_named_as_elsewhere_says_what_to_write(override: str, said: str) -> None:
    setting, _, value = override.partition("=")
    with pytest.raises(UserError) as refused:
        load_recipe("launch/recipes/demo.yaml", [override])
    assert str(refused.value) == f"override {override}: {setting}: {value!r}, {said}"
