"""The lines of a run on its console, and its progress on a terminal."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.metrics import names as metrics
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.metrics.sinks.console import console_line
from hybridflow.metrics.sinks.files import Record

CONSOLE = MetricsConfig(jsonl=False, csv=False, tensorboard=False)


def test_the_console_shows_one_line_a_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Metrics(CONSOLE, tmp_path, totals={"train": 20, "sft": 100}, stream=stream) as log:
        log.begin("train", "GRPO: 20 steps of 8 prompts x 4 samples")
        log.log(3, {metrics.REWARD_MEAN: 0.25, metrics.TRAIN_STEP_TIME: 1500.0, "of/no_interest": 1.0})
        log.log(14, {metrics.REWARD_MEAN: -0.5, metrics.ROLLOUT_THROUGHPUT: 12345.6})
        log.log(1, {metrics.SFT_LOSS: 2.0}, phase="sft")
    assert stream.getvalue() == (
        "GRPO: 20 steps of 8 prompts x 4 samples\n"
        "train 3/20   reward  0.250  step   1.50 s\n"
        "train 14/20  reward -0.500  tokens/s  12,346\n"
        "warm-up 1/100    loss  2.0000\n"
    )


OF_PPO = {
    metrics.REWARD_MEAN: 0.801,
    metrics.TRAIN_LOSS: -0.0070,
    metrics.CRITIC.value_loss: 0.1234,
    metrics.CRITIC.explained_variance: -0.456,
    metrics.TRAIN_REFERENCE_KL: 0.0123,
    metrics.TRAIN_ENTROPY: 0.128,
    metrics.TRAIN_GRADIENT_NORM: 1.23e-05,
    metrics.MISMATCH_LOGPROB_MEAN: 1.5e-7,
    metrics.ROLLOUT_THROUGHPUT: 123_456.0,
    metrics.TRAIN_STEP_TIME: 123_456.0,
}


def test_the_console_shows_the_share_of_each_held_out_set_that_passes() -> None:
    values = {"eval/aime/reward_mean": 0.3, "eval/aime/mean@16": 0.25, "eval/aime/mean@16_low": 0.2}
    record = Record("eval", 40, {"eval/accuracy": 0.5} | values | {"eval/sums/mean@1": 1.0})
    assert console_line(record, None, None) == "eval 40  accuracy 0.500  aime mean@16 0.250  sums mean@1 1.000"


@pytest.mark.parametrize("width", range(80, 121))
def test_a_line_fits_the_terminal_and_shows_what_matters_most(width: int) -> None:
    line = console_line(Record("train", 12_345, OF_PPO), 99_999, width)
    assert len(line) <= width
    assert line.startswith("train 12345/99999  reward 0.801  loss -0.0070  ")
    assert "explained -0.46" in line and line.endswith("step 123.46 s")
    undefined = OF_PPO | {metrics.CRITIC.explained_variance: math.nan}
    assert "explained -  " in console_line(Record("train", 3, undefined), None, None)


def test_a_line_of_a_file_has_all_figures() -> None:
    assert console_line(Record("train", 3, OF_PPO), None, None) == (
        "train 3  reward 0.801  loss -0.0070  value loss 0.1234  explained -0.46  kl 0.0123  entropy 0.128  "
        "gradient 1.23e-05  mismatch 1.5e-07  tokens/s 123,456  step 123.46 s"
    )


def _all_of(reader: int) -> bytes:
    """Read what was written to a pseudo-terminal whose other end is closed: it comes in parts and ends with EIO."""
    chunks = []
    with os.fdopen(reader, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while chunk := file.read(100_000):
            chunks.append(chunk)
    return b"".join(chunks)


def _on_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Callable[[Metrics], None], **environment: str
) -> str:
    """Record on a pseudo-terminal of 100 columns; what it was sent."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    reader, writer = pty.openpty()
    with (
        os.fdopen(writer, "w") as terminal,
        Metrics(CONSOLE, tmp_path, totals={"train": 20, "sft": 7}, resume_from_step=2, stream=terminal) as log,
    ):
        record(log)
    return _all_of(reader).decode()


def _lines_of(shown: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", shown)
    return plain.replace("\r", "\n").splitlines()


def _warm_up_and_train(log: Metrics) -> None:
    log.begin("sft", "warm-up: 7 steps of 4 examples")
    log.log(1, {metrics.SFT_LOSS: 3.0}, phase="sft")
    log.log(7, {metrics.SFT_LOSS: 1.0}, phase="sft")
    log.begin("train", "GRPO: steps 3 to 20, each of 8 prompts x 4 samples")
    log.log(3, OF_PPO)
    log.log(3, {"eval/accuracy": 0.5}, phase="eval")


def test_the_terminal_shows_lines_over_one_line_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _on_terminal(tmp_path, monkeypatch, _warm_up_and_train)
    lines = _lines_of(shown)
    assert all(len(line) <= 100 for line in lines)
    printed = [
        line.strip() for line in lines if re.match(r"(warm-up|train|eval|GRPO):? [^ ]", line) and "left" not in line
    ]
    assert printed == [
        "warm-up: 7 steps of 4 examples",
        "warm-up 7/7  loss  1.0000",
        "GRPO: steps 3 to 20, each of 8 prompts x 4 samples",
        "train 3/20   reward  0.801  loss -0.0070  explained -0.46  kl  0.0123  entropy 0.128  step 123.46 s",
        "eval 3  accuracy 0.500",
    ]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"warm-up +━+ +7/7 +0:00:0\d 0:00:0\d left", plain), plain
    assert re.search(r"train +[━╺]+ +2/20 +0:00:0\d -:--:-- left", plain), (
        plain
    )  # the steps before the resumption are done
    assert re.search(r"train +[━╺]+ +3/20", plain), plain
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown, also while a run goes on


def test_a_phase_that_nobody_has_begun_shows_its_progress_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _on_terminal(tmp_path, monkeypatch, lambda log: log.log(3, OF_PPO))
    assert "3/20" in shown and "left" in shown


@pytest.mark.parametrize("columns", ["60", "40"])
def test_a_narrow_terminal_has_one_line_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    shown = _on_terminal(tmp_path, monkeypatch, _warm_up_and_train, COLUMNS=columns)
    progress = [line for line in _lines_of(shown) if "━" in line]
    assert progress and all(len(line) <= int(columns) for line in progress)


def test_a_terminal_that_cannot_move_its_cursor_gets_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _on_terminal(tmp_path, monkeypatch, _warm_up_and_train, TERM="dumb")
    assert "warm-up 1/7  loss  3.0000" in shown and "━" not in shown and "\x1b" not in shown


def test_without_colours_nothing_but_the_cursor_is_controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _on_terminal(tmp_path, monkeypatch, _warm_up_and_train, NO_COLOR="1")
    assert not re.search(r"\x1b\[(3|4|9)[0-9]", shown), shown
