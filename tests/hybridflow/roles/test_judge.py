"""Restarts of a judge model's server, and the errors that end them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import EngineError
from engine3d.layout import Layout
from engine3d.serving.config import ServerConfig
from hybridflow.roles.judge import JudgeWorker
from hybridflow.workers.context import WorkerContext


class _Dead:
    """A server that has died, and that nothing starts again."""

    is_alive = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def check(self) -> None:
        raise EngineError("judge: the server died")

    def start(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "judge: the server died; it was started again 2 times"),
        (RuntimeError("something else"), "judge: RuntimeError: something else"),
    ],
)
def test_a_server_that_cannot_be_started_again_is_told(
    error: Exception, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.roles.judge._LOOK_EVERY_S", 0.01)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).touch()
    context = WorkerContext("judge", 0, 0, Layout(), Layout().coordinates(0), (0,), "", None)
    worker: Any = JudgeWorker(context, tmp_path, ServerConfig(), key="key", restarts=2)
    worker._server = _Dead(error)
    worker._watch.start()
    worker._watch.join(10)
    with pytest.raises(EngineError, match=line):
        worker.check()
