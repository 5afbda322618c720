"""Metrics: what each sink holds after growth, kills and resumption."""

from __future__ import annotations

import csv
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine3d.errors import UserError
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.logger import Metrics, Timer

FILES = MetricsConfig(console=False, tensorboard=False)
CONSOLE = MetricsConfig(jsonl=False, csv=False, tensorboard=False)


def records(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_records_are_on_disk_when_log_returns(tmp_path: Path) -> None:
    log = Metrics(FILES, tmp_path)
    log.log(1, {"train/loss": 0.5, "count": 3})
    assert records(tmp_path) == [{"phase": "train", "step": 1, "train/loss": 0.5, "count": 3}]
    assert rows(tmp_path) == [{"phase": "train", "step": "1", "train/loss": "0.5", "count": "3"}]


def test_csv_columns_grow_and_every_value_stays_under_its_name(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, {"b": 1.0})
        log.log(2, {"a": 2.0, "b": 3.0})
        log.log(3, {"a": 4.0})
        log.log(4, {"c": 5.0, "b": 6.0})
    assert (tmp_path / "metrics.csv").read_text() == (
        "phase,step,b,a,c\ntrain,1,1.0,,\ntrain,2,3.0,2.0,\ntrain,3,,4.0,\ntrain,4,6.0,,5.0\n"
    )


def test_nan_and_infinity_survive_in_valid_json(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, {"train/loss": float("nan"), "x": float("-inf")})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"phase": "train", "step": 1, "train/loss": "nan", "x": "-inf"}
    assert rows(tmp_path)[0]["train/loss"] == "nan"


def test_resumption_drops_what_will_be_made_again_and_a_half_written_line(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for step in range(1, 9):
            log.log(step, {"sft/loss": 1.0 / step}, phase="sft")
        for step in range(1, 6):
            log.log(step, {"train/loss": float(step)})
            log.log(step, {"eval/accuracy": 0.5}, phase="eval")
    for name in ("metrics.jsonl", "metrics.csv"):
        with (tmp_path / name).open("a") as file:
            file.write('{"phase": "train", "step": 3' if name.endswith("l") else "train,3")
    with Metrics(FILES, tmp_path, resume_from_step=3) as log:
        log.log(4, {"train/loss": 40.0, "new": 1.0})
        log.log(5, {"train/loss": 50.0})
    expected = [("sft", step) for step in range(1, 9)]
    expected += [(phase, step) for step in range(1, 4) for phase in ("train", "eval")] + [("train", 4), ("train", 5)]
    assert [(record["phase"], record["step"]) for record in records(tmp_path)] == expected
    assert [(row["phase"], int(row["step"])) for row in rows(tmp_path)] == expected
    losses = [record["train/loss"] for record in records(tmp_path) if record["phase"] == "train"]
    assert losses == [1.0, 2.0, 3.0, 40.0, 50.0]
    assert [float(row["train/loss"]) for row in rows(tmp_path) if row["phase"] == "train"] == losses
    assert rows(tmp_path)[-2]["new"] == "1.0"


def test_resumption_where_no_metrics_are_starts_new_files(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path, resume_from_step=7) as log:
        log.log(8, {"a": 1.0})
    assert len(records(tmp_path)) == len(rows(tmp_path)) == 1


@pytest.mark.parametrize("sink", ["jsonl", "csv", "tensorboard"])
def test_a_fresh_run_does_not_overwrite_another(tmp_path: Path, sink: str) -> None:
    config = MetricsConfig.model_validate({name: name == sink for name in ("console", "jsonl", "csv", "tensorboard")})
    with Metrics(config, tmp_path) as log:
        log.log(1, {"a": 1.0})
    with pytest.raises(UserError, match="already holds the metrics of a run: resume that run, or choose another"):
        Metrics(config, tmp_path)


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    program = (
        "import itertools, sys; from pathlib import Path\n"
        "from hybridflow.metrics.config import MetricsConfig; from hybridflow.metrics.logger import Metrics\n"
        "log = Metrics(MetricsConfig(console=False, tensorboard=False), Path(sys.argv[1]))\n"
        "for step in itertools.count(1): log.log(step, {f'm{step % 50}': 0.5, 'a': 1.0})\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or (tmp_path / "metrics.jsonl").stat().st_size < 20_000:
        assert time.monotonic() < deadline, "the writer wrote nothing for 60 s"
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=10)
    with Metrics(FILES, tmp_path, resume_from_step=100) as log:
        log.log(101, {"a": 2.0})
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 102))
    assert [int(row["step"]) for row in rows(tmp_path)] == list(range(1, 102))
    assert all(row["a"] in ("1.0", "2.0") for row in rows(tmp_path))


def test_tensorboard_reads_back_one_run_a_phase_without_the_dropped_steps(tmp_path: Path) -> None:
    config = MetricsConfig(console=False, jsonl=False, csv=False)
    with Metrics(config, tmp_path) as log:
        for step in range(1, 5):
            log.log(step, {"sft/loss": 9.0}, phase="sft")
            log.log(step, {"train/loss": float(step)})
            log.log(step, {"eval/accuracy": float(step)}, phase="eval")
    with Metrics(config, tmp_path, resume_from_step=2) as log:
        log.log(3, {"train/loss": 30.0})
        log.log(4, {"eval/accuracy": 40.0}, phase="eval")

    def scalars(phase: str, name: str) -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard" / phase))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert scalars("train", "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars("eval", "eval/accuracy") == [(1, 1.0), (2, 2.0), (4, 40.0)]
    assert [step for step, _ in scalars("sft", "sft/loss")] == [1, 2, 3, 4]


def test_records_wait_where_files_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics(FILES, tmp_path) as log:
        log.log(1, {"train/loss": 1.0})
        size = min((tmp_path / name).stat().st_size for name in ("metrics.jsonl", "metrics.csv"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, limits[1]))  # as on a full disk: the start of a line fits
        try:
            log.log(2, {"train/loss": 2.0})
            log.log(3, {"train/loss": 3.0, "train/entropy": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [record["step"] for record in records(tmp_path)] == [1]
        assert (tmp_path / "metrics.csv").read_text().splitlines() == ["phase,step,train/loss", "train,1,1.0"]
        log.log(4, {"train/loss": 4.0})
    assert [(record["step"], record["train/loss"]) for record in records(tmp_path)] == [
        (n, float(n)) for n in range(1, 5)
    ]
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows == [
        "phase,step,train/loss,train/entropy",
        "train,1,1.0,",
        "train,2,2.0,",
        "train,3,3.0,0.5",
        "train,4,4.0,",
    ]
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("hybridflow: metrics: ")] == [
        f"hybridflow: metrics: {tmp_path}/{name} cannot be written: File too large; records are kept until it can"
        for name in ("metrics.jsonl", "metrics.csv")
    ]


def test_records_that_could_never_be_written_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = MetricsConfig(console=False, tensorboard=False, csv=False)
    try:
        with Metrics(config, tmp_path) as log:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
            log.log(1, {"sft/loss": 1.0}, phase="sft")
            log.log(1, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"hybridflow: metrics: {tmp_path}/metrics.jsonl cannot be written: File too large; the records "
        "from sft 1 to train 1 are lost"
    )


def test_what_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        with pytest.raises(ValueError, match="metric 'a' of step 1 is 'x', expected a number"):
            log.log(1, {"a": "x"})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="metric name 'step' is taken"):
            log.log(1, {"step": 2.0})
    assert records(tmp_path) == []


def test_timer_adds_up_milliseconds_also_when_the_phase_fails() -> None:
    values: dict[str, float] = {}
    with Timer(values, "train/step_time_ms") as timer:
        time.sleep(0.02)
    with pytest.raises(KeyError), Timer(values, "train/step_time_ms"):
        raise KeyError
    assert 20 <= timer.milliseconds < 2000
    assert timer.milliseconds <= values["train/step_time_ms"] < timer.milliseconds + 1000
