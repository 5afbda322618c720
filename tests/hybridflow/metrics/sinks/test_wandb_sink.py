"""The sink for Weights & Biases, by what its own files hold. Needs wandb, which is no requirement of the project."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine3d.errors import UserError
from hybridflow.cli.main import main
from hybridflow.metrics.config import MetricsConfig, WandbConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.metrics.sinks.wandb_sink import check_wandb, mode_of

ROOT = Path(__file__).parents[4]
DEMO = str(ROOT / "launch/recipes/demo.yaml")
ONLY_WANDB = MetricsConfig(console=False, jsonl=False, csv=False, tensorboard=False, wandb=True)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_recipe_that_asks_for_it_where_it_is_not_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as a run elsewhere leaves it; Python would import it as an empty package
    monkeypatch.syspath_prepend(tmp_path)
    line = "metrics.wandb: wandb is not installed here; install it with "
    assert main(["check", DEMO, "metrics.wandb=true"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"hybridflow: {line}.venv/bin/uv pip install")
    with pytest.raises(UserError, match=line):
        Metrics(ONLY_WANDB, tmp_path / "run")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb.sdk")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(directory: Path) -> Iterator[Any]:
    """Return the records that one start of a run wrote: LevelDB's log format, in which wandb keeps its messages."""
    from wandb.proto import wandb_internal_pb2

    [file] = directory.glob("*.wandb")
    data, block, message = file.read_bytes(), 32768, b""
    at = 7  # wandb's own header
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the last part of a message
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def history(directory: Path) -> list[dict[str, str]]:
    """The rows, values as JSON."""
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records(directory)
        if record.HasField("history")
    ]


def starts(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*"))


@pytest.mark.usefixtures("offline")
def test_each_phase_has_its_own_steps_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: run\ntrainer: {steps: 4}\n")
    with Metrics(ONLY_WANDB, run) as log:
        log.log(1, {"sft/loss": 2.0, "train/gradient_norm": 3.0}, phase="sft")
        log.log(1, {"train/loss": 0.5, "train/gradient_norm": math.nan})
        log.log(2, {"train/loss": 0.25})
        log.log(2, {"eval/accuracy": 0.75}, phase="eval")
    [first] = starts(run)
    rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history(first)]
    assert rows == [
        {"sft/step": "1", "sft/loss": "2", "sft/train/gradient_norm": "3"},
        {"train/step": "1", "train/loss": "0.5", "train/gradient_norm": "NaN"},
        {"train/step": "2", "train/loss": "0.25"},
        {"eval/step": "2", "eval/accuracy": "0.75"},
    ]
    defined = {record.metric.name: record.metric.step_metric for record in records(first) if record.HasField("metric")}
    expected = {name: f"{name.partition('/')[0]}/step" for row in rows for name in row if not name.endswith("/step")}
    assert {name: step for name, step in defined.items() if step} == expected

    time.sleep(1.1)  # wandb names a start by the second
    with Metrics(ONLY_WANDB, run, resume_from_step=2) as log:
        log.log(3, {"train/loss": 0.125})
    identity, again = (next(record.run for record in records(start) if record.HasField("run")) for start in starts(run))
    assert identity.run_id == again.run_id == (run / "wandb" / "run-id").read_text().strip()
    assert (identity.project, identity.display_name) == ("hybridflow", "run")
    assert history(starts(run)[1])[-1]["train/step"] == "3"
    with pytest.raises(UserError, match="already holds the metrics of a run"):
        Metrics(ONLY_WANDB, run)


@pytest.mark.processes
@pytest.mark.usefixtures("offline")
def test_a_killed_run_keeps_whole_records_and_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from hybridflow.metrics.config import MetricsConfig; from hybridflow.metrics.logger import Metrics\n"
        "off = dict(console=False, jsonl=False, csv=False, tensorboard=False)\n"
        "log = Metrics(MetricsConfig(**off, wandb=True), Path(sys.argv[1]))\n"
        "for step in range(1, 51): log.log(step, {'train/loss': 0.5})\n"
        "print('logged', flush=True); time.sleep(600)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "logged\n"
        children = psutil.Process(writer.pid).children(recursive=True)
        assert children
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=10)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    [start] = starts(tmp_path)
    kept = [row["train/step"] for row in history(start)]  # wandb writes some seconds later
    assert kept == [str(step) for step in range(1, len(kept) + 1)]


@pytest.mark.usefixtures("offline")
def test_what_wandb_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(UserError, match=r"wandb refuses to begin: .*sometimes"):
        Metrics(ONLY_WANDB, tmp_path / "run")


def test_secrets_of_the_command_line_are_not_kept(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hybridflow", "train", "a.api_key=hunter2-of-this-test", "a.b=kept"])
    with Metrics(ONLY_WANDB, tmp_path / "run"):
        pass
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"hunter2" not in written and b"a.b=kept" in written


def test_true_stands_for_all_defaults_and_false_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert ONLY_WANDB.wandb == WandbConfig() and mode_of(WandbConfig()) == "online"
    assert MetricsConfig.model_validate({"wandb": False}).wandb is None
    config = MetricsConfig.model_validate({"wandb": {"project": "p", "tags": ["a"], "mode": "offline"}})
    assert MetricsConfig.model_validate(config.model_dump(mode="json")) == config
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode_of(WandbConfig()) == "disabled" and mode_of(WandbConfig(mode="online")) == "online"


@pytest.mark.usefixtures("offline")
def test_project_entity_tags_and_mode_are_those_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "other")
    wandb = WandbConfig(project="sums", entity="team", tags=("a", "b"), mode="offline")
    with Metrics(ONLY_WANDB.model_copy(update={"wandb": wandb}), tmp_path / "run") as log:
        log.log(1, {"train/loss": 0.5})
    [start] = starts(tmp_path / "run")
    run = next(record.run for record in records(start) if record.HasField("run"))
    assert (run.project, run.entity, list(run.tags)) == ("sums", "team", ["a", "b"])


@pytest.mark.usefixtures("offline")
def test_check_wants_a_key_where_it_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    check_wandb(WandbConfig())
    with pytest.raises(UserError, match=r"wandb has no API key here; .*metrics\.wandb\.mode=offline keeps"):
        check_wandb(WandbConfig(mode="online"))
    assert capfd.readouterr().err == ""
