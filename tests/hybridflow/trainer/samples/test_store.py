"""The samples of steps on their way to the disk: what is written, when, and what becomes of a disk that is full."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from hybridflow.batch.sample_table import batch_of
from hybridflow.data.tasks import Example
from hybridflow.rundir.samples.config import SamplesConfig
from hybridflow.rundir.samples.files import stored_steps
from hybridflow.rundir.samples.store import SampleFilter, StepFile
from hybridflow.trainer.samples import store as sample_store
from hybridflow.trainer.samples.store import SampleStore, TrainedSamples, write_samples
from hybridflow.trainer.samples.texts import answer_texts
from tests.support.stored_samples import LocalBatch, learned_from, samples_of

TEXTS = [("1+1=", "2"), ("1+1=", "3 abc"), ("1+1=", ""), ("1+1=", "22")]
REWARDS = [1.0, 0.0, 0.5, 0.25]


def a_step(number: int, *, tokens: int = 0) -> TrainedSamples:
    noise = "".join("0123456789"[digit] for digit in torch.randint(10, (tokens,)).tolist())
    return learned_from(number, samples_of([*TEXTS[:3], ("1+1=", f"2{noise}")], REWARDS, first=4 * number))


def written(store: Path) -> dict[int, list[int]]:
    """The ids of the samples of each step."""
    return {step: pq.read_table(path)["sample_id"].to_pylist() for step, path in stored_steps(store).items()}


def test_a_step_is_written_in_bounded_pieces_in_its_order(tmp_path: Path) -> None:
    batch = samples_of([("1+1=", "a" * length) for length in (5, 80, 5, 5, 5, 5)], [0.5] * 6)
    learned = learned_from(9, batch, advantages=torch.arange(6.0))
    with (tmp_path / "file").open("wb") as file:
        write_samples(file, learned, most_tokens=25)
    [local] = learned.batches
    assert isinstance(local, LocalBatch) and local.fetched == [10, 85, 20, 20]
    parquet = pq.ParquetFile(tmp_path / "file")
    assert parquet.num_row_groups == 4
    table = parquet.read()
    assert torch.equal(batch_of(table).tokens, batch.tokens)
    assert table["advantage"].to_pylist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert parquet.schema_arrow.metadata[b"hybridflow"] == b'{"format": 1, "step": 9, "version": 10, "batches": [6]}'


def test_samples_with_routes_are_written_in_smaller_pieces(tmp_path: Path) -> None:
    """100 bytes of routes take the memory of three more tokens."""
    batch = samples_of([("1+1=", "a" * 5) for _ in range(4)], [0.5] * 4)
    routes = torch.full((len(batch.tokens), 10), 255, dtype=torch.uint8)
    learned = learned_from(9, batch.replace(routes=routes), route_bytes=torch.full((4,), 100))
    with (tmp_path / "file").open("wb") as file:
        write_samples(file, learned, most_tokens=26)
    [local] = learned.batches
    assert isinstance(local, LocalBatch) and local.fetched == [20, 20]
    assert torch.equal(batch_of(pq.read_table(tmp_path / "file")).routes, routes)


def test_answers_are_stored_by_prompt_and_read_again(tmp_path: Path) -> None:
    learned = learned_from(1, samples_of(TEXTS, REWARDS, group=2))
    answers = answer_texts({7: Example("1+1=", [2, "zwei"]), 8: Example("2+1=", None)})
    path = tmp_path / "file"
    with path.open("wb") as file:
        write_samples(file, replace(learned, answers=answers))
    samples = [sample for _, sample in StepFile(path).find(SampleFilter())]
    assert {sample.prompt: sample.answer for sample in samples} == {7: '[2, "zwei"]', 8: None}
    assert len(answer_texts({7: Example("", "a" * 5000)})[7]) < 1100


def test_steps_are_there_when_the_run_ends_and_a_resumed_one_makes_later_ones_again(tmp_path: Path) -> None:
    store = tmp_path / "samples"
    with SampleStore(SamplesConfig(), store, 0) as samples:
        for step in (1, 2, 3):
            samples.keep(a_step(step))
        samples.keep(TrainedSamples(4, 5, ()))  # has learned from none
    assert written(store) == {step: list(range(4 * step, 4 * step + 4)) for step in (1, 2, 3)}
    with SampleStore(SamplesConfig(), store, 1) as samples:
        assert list(stored_steps(store)) == [1]
        samples.keep(learned_from(2, samples_of(TEXTS, REWARDS, first=100)))
    assert written(store) == {1: [4, 5, 6, 7], 2: [100, 101, 102, 103]}


def test_what_was_written_is_told_once(tmp_path: Path) -> None:
    with SampleStore(SamplesConfig(), tmp_path / "samples", 0) as samples:
        assert samples.take_metrics() == {}
        for step in (1, 2):
            samples.keep(a_step(step))
    sizes = [path.stat().st_size for path in stored_steps(tmp_path / "samples").values()]
    written = samples.take_metrics()
    assert written["samples/written_bytes"] == sum(sizes) > 0
    assert 0 < written["samples/write_ms"] < 60_000
    assert samples.take_metrics() == {}


def test_without_a_store_nothing_is_written(tmp_path: Path) -> None:
    with SampleStore(SamplesConfig(store=False), tmp_path / "samples", 0) as samples:
        samples.keep(a_step(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_old_steps_make_room(tmp_path: Path) -> None:
    with SampleStore(SamplesConfig(keep_mb=1), tmp_path, 0) as samples:
        for step in range(1, 6):
            samples.keep(a_step(step, tokens=600_000))
    sizes = [path.stat().st_size for path in stored_steps(tmp_path).values()]
    assert list(stored_steps(tmp_path))[-1] == 5 and 1 <= len(sizes) < 5
    assert len(sizes) == 1 or sum(sizes) <= 1e6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a disk of its own needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_on_a_full_disk_training_goes_on_with_one_line_and_later_steps_are_written_again(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "others").write_bytes(b"x" * (200 << 10))
    store = small_disk / "samples"
    with SampleStore(SamplesConfig(), store, 0) as samples:
        for step in (1, 2, 3):
            samples.keep(a_step(step, tokens=200_000))
        _settle(samples)
        assert stored_steps(store) == {} and list(store.iterdir()) == []
        (small_disk / "others").unlink()
        samples.keep(a_step(4))
    printed = capsys.readouterr()
    assert printed.err == (
        f"hybridflow: samples: {store} lacks those of step 1 on: No space left on device; training continues\n"
    )
    assert printed.out == "samples: written again from step 4 on; those of steps 1 to 3 are missing\n"
    assert written(store) == {4: [16, 17, 18, 19]}


def test_a_directory_that_cannot_be_written_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "samples"
    store.write_text("in its place")
    with SampleStore(SamplesConfig(), store, 0) as samples:
        samples.keep(a_step(1))
        samples.keep(a_step(2))
        _settle(samples)  # a store that closes says nothing of training
    line = f"hybridflow: samples: {store} lacks those of step 1 on: File exists; training continues\n"
    assert capsys.readouterr() == ("", line)


def test_a_disk_that_does_not_answer_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_PATIENCE_S": 0.2, "_END_S": 0.2}.items():
        monkeypatch.setattr(sample_store, name, value)
    answers, waited = threading.Event(), list[Any]()
    write = sample_store.write_samples
    monkeypatch.setattr(sample_store, "write_samples", lambda *given: (answers.wait(60), write(*given)))
    monkeypatch.setattr(threading.Condition, "wait_for", _noting(threading.Condition.wait_for, waited))
    with SampleStore(SamplesConfig(), tmp_path, 0) as samples:
        for step in range(1, 7):
            samples.keep(a_step(step))
        assert [limit_s for limit_s in waited if limit_s is not None] == [0.2, 0.2, 0.2, 0.0, 0.0, 0.0]
        assert len(samples._waiting) == 1  # and one is being written
    [line, *more] = capsys.readouterr().err.splitlines()
    assert "lacks those of step 3 on: those of 2 earlier steps have been waiting for the disk too long" in line
    assert not more
    answers.set()
    assert samples._thread is not None
    samples._thread.join(60)
    assert list(written(tmp_path)) == [1]


def test_a_checkpoint_waits_for_the_samples_of_its_step_but_not_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    write = sample_store.write_samples
    monkeypatch.setattr(sample_store, "write_samples", lambda *given: (answers.wait(60), write(*given)))
    with SampleStore(SamplesConfig(), tmp_path, 0) as samples:
        assert samples.written(1)  # of which nothing is to be written
        samples.keep(a_step(1))
        samples.keep(a_step(2))
        assert [samples.written(step) for step in (0, 1, 2)] == [True, False, False]
        monkeypatch.setattr(sample_store, "_PATIENCE_S", 0.0)
        with samples._changed:
            assert samples._changed.wait_for(lambda: samples._writing is not None, 60)
        assert samples.written(2)
        monkeypatch.setattr(sample_store, "_PATIENCE_S", 60.0)
        assert not samples.written(2)
        answers.set()
        _settle(samples)
        assert samples.written(2)


def _noting(wait_for: Any, limits: list[float | None]) -> Any:
    def noted(self: Any, condition: Any, timeout: float | None = None) -> Any:
        if threading.current_thread() is threading.main_thread():
            limits.append(timeout)
        return wait_for(self, condition, timeout)

    return noted


def _settle(samples: SampleStore) -> None:
    with samples._changed:
        assert samples._changed.wait_for(lambda: not samples._waiting and samples._writing is None, 60)
