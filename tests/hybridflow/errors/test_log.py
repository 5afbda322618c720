"""Streams of log lines, by level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridflow.errors.log import log, set_level


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    yield
    set_level(None)


def test_progress_is_on_stdout_and_the_rest_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log.debug("nothing")
    log.info("start 1.0 s  100 % of %s")
    log.warning("a file could not be removed")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("start 1.0 s  100 % of %s\n", "hybridflow: a file could not be removed\n")


def test_only_what_is_as_grave_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    set_level("error")
    log.info("one")
    log.warning("two")
    log.error("three")
    assert "".join(capsys.readouterr()) == "hybridflow: three\n"


def test_an_unknown_level_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    set_level("loud")
    log.info("one")
    captured = capsys.readouterr()
    assert captured.out == "one\n"
    assert captured.err == (
        "hybridflow: HYBRIDFLOW_LOG_LEVEL=loud: expected one of DEBUG, INFO, WARNING, ERROR; INFO is taken\n"
    )
