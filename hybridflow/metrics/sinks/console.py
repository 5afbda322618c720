"""The lines of a run on its console, and on a terminal one line below them that shows its progress."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from hybridflow.metrics.sinks.files import Record
from hybridflow.rundir.status.progress import where_now

_STEPS, _WARM_UP = "train", "sft"
_REFRESHES_PER_S = 2
_ROOM, _BAR, _WIDE = 4, 20, 80
"""Columns: left free at the end, of the bar, and of a terminal that has room for a bar of that width."""
_LONGEST_ESTIMATE_S = 3600.0
"""Number of the newest steps by which the remaining time is estimated."""


@dataclass(frozen=True)
class _Figure:
    """A figure of the console's lines.

    Args:
        rank: where a line has no room for all, those of the highest ranks are left out.
        width: of the value in aligned lines.
    """

    name: str
    label: str
    form: Callable[[float], str]
    rank: int
    width: int


_CONSOLE_FIGURES = (
    _Figure("sft/loss", "loss", "{:.4f}".format, 0, 7),
    _Figure("eval/accuracy", "accuracy", "{:.3f}".format, 0, 5),
    _Figure("eval/reward_mean", "reward", "{:.3f}".format, 0, 6),
    _Figure("eval/score_mean", "score", "{:.3f}".format, 0, 6),
    _Figure("reward/mean", "reward", "{:.3f}".format, 0, 6),
    _Figure("cost/mean", "cost", "{:.3f}".format, 3, 6),
    _Figure("train/loss", "loss", "{:+.4f}".format, 2, 7),
    _Figure("critic/value_loss", "value loss", "{:.4f}".format, 7, 7),
    # Of returns that do not vary, as before the first rewards, there is none.
    _Figure("critic/explained_variance", "explained", lambda share: "-" if share != share else f"{share:.2f}", 4, 5),
    _Figure("train/reference_kl", "kl", "{:.4f}".format, 5, 7),
    _Figure("distillation/kl_k1", "teacher kl", "{:.4f}".format, 5, 7),
    _Figure("train/entropy", "entropy", "{:.3f}".format, 6, 5),
    _Figure("train/gradient_norm", "gradient", "{:.3g}".format, 8, 8),
    _Figure("mismatch/logprob_abs_diff_mean", "mismatch", "{:.1e}".format, 9, 7),
    _Figure("rollout/throughput_tokens_per_sec", "tokens/s", "{:,.0f}".format, 10, 7),
    _Figure("stream/throughput_tokens_per_sec", "tokens/s", "{:,.0f}".format, 10, 7),
    _Figure("train/step_time_ms", "step", lambda milliseconds: f"{milliseconds / 1000:.2f} s", 1, 8),
    _Figure("checkpoint/written_bytes", "written", lambda nbytes: f"{nbytes / 1e6:,.1f} MB", 0, 10),
    _Figure("checkpoint/stall_ms", "stall", lambda milliseconds: f"{milliseconds / 1000:.3f} s", 0, 7),
    _Figure("checkpoint/complete_after_sec", "complete after", "{:.2f} s".format, 0, 7),
    _Figure("checkpoint/failed", "save", lambda _: "failed", 0, 6),
)
_OF_SET = re.compile(r"eval/([^/]+)/(mean@\d+)")
"""The figure of a held-out set that is shown."""
_PHASE_LABELS = {"sft": "warm-up"}


def console_line(record: Record, total: int | None, width: int | None, *, aligned: bool = False) -> str:
    """The line that shows a record.

    Args:
        record: whose metrics are shown.
        total: steps of its phase, if known.
        width: columns that the line may have; None for any number.
        aligned: whether values stand below those of the line before.
    """
    label = _PHASE_LABELS.get(record.phase, record.phase)
    shown = [figure for figure in _CONSOLE_FIGURES if figure.name in record.values]
    shown += [
        _Figure(name, f"{match[1]} {match[2]}", "{:.3f}".format, 1, 5)
        for name in record.values
        if (match := _OF_SET.fullmatch(name))
    ]
    head = f"{label} {record.step}" + (f"/{total}" if total is not None else "")
    if aligned and total is not None:
        head = head.ljust(len(f"{label} {total}/{total}"))
    while True:
        values = [(figure, figure.form(record.values[figure.name])) for figure in shown]
        columns = [f"{figure.label} {value.rjust(figure.width if aligned else 0)}" for figure, value in values]
        line = "  ".join([head, *columns])
        if width is None or len(line) <= width or len(shown) <= 1:
            return line
        shown.remove(max(shown, key=lambda figure: figure.rank))


class ConsoleSink:
    """Writes one line a record with the metrics worth watching.

    On a terminal a line has as many as there is room for. Below the lines stands the progress of the phase, which has
    its steps, times, current activity and, in place of lines of their own, the newest step of the warm-up.

    Args:
        stream: to write to.
        totals: steps of the phases, by name.
        first_step: of phase "train", that the run resumes after.
    """

    def __init__(self, stream: TextIO, totals: Mapping[str, int], first_step: int) -> None:
        self._totals, self._first_step = totals, first_step
        self._console = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress: Progress | None = None
        self._activity = _Activity()
        self._phase: str | None = None

    def begin(self, phase: str, sentence: str) -> None:
        """Print the sentence that says what a phase is, and show its progress from here on."""
        self._print(sentence)
        self._show(phase)

    def write(self, record: Record) -> None:
        total = self._totals.get(record.phase)
        if total is not None and record.phase != self._phase:
            self._show(record.phase)
        is_last = record.step == total
        if self._progress is not None and total is not None:
            self._activity.newest = record if record.phase == _WARM_UP else None
            self._progress.update(self._task, completed=record.step, refresh=record.phase != _WARM_UP)
        # The progress below the lines shows the warm-up, whose steps are many and short, but for its last one.
        if self._progress is None or record.phase != _WARM_UP or is_last:
            width = self._console.width if self._console.is_terminal else None
            self._print(console_line(record, total, width, aligned=True))
        if record.phase == _WARM_UP and is_last:
            self.close()  # until the steps begin, once all roles are there

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, line: str) -> None:
        self._console.print(line)
        self._console.file.flush()

    def _show(self, phase: str) -> None:
        """Show the progress of a phase whose steps are known, on a terminal that can."""
        self._phase, self._activity.newest = phase, None
        total = self._totals.get(phase)
        if not self._is_live or total is None:
            return
        label, done = _PHASE_LABELS.get(phase, phase), self._first_step if phase == _STEPS else 0
        self.close()  # the clock and the estimate begin with each phase
        self._progress = _OneLine(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=_BAR if self._console.width >= _WIDE else _BAR // 2),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left", style="progress.remaining"),
            self._activity,
            console=self._console,
            expand=True,
            transient=True,
            refresh_per_second=_REFRESHES_PER_S,
            speed_estimate_period=_LONGEST_ESTIMATE_S,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(label, total=total, completed=done)
        self._progress.start()
        self._console.show_cursor()  # a run that is killed cannot show it again


class _OneLine(Progress):
    """Progress in one line, with room at its end for the ^C that a terminal shows."""

    def get_renderable(self) -> RenderableType:
        return _Narrower(super().get_renderable())


@dataclass(frozen=True)
class _Narrower:
    """Something in less than the width of the terminal."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(max(1, options.max_width - _ROOM)))


class _Activity(ProgressColumn):
    """The newest step of the warm-up, or the phase of the current step, in what room is left."""

    max_refresh = 0.4

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis", ratio=1))
        self.newest: Record | None = None

    def render(self, task: Task) -> Text:
        if self.newest is None:
            return Text(where_now())
        return Text(console_line(self.newest, None, None, aligned=True).partition("  ")[2])
