"""The benchmark of episodes: every episode is played to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.episodes import main


@pytest.mark.slow
def test_every_episode_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "episodes.json"
    arguments = ["--episodes", "16", "--turns", "3", "--wait-ms", "1", "--workers", "1", "--output", str(output)]
    assert main(arguments) == 0
    result = json.loads(output.read_text())
    assert (result["episodes"], result["turns"], result["dropped"]) == (16, 48, 0)
    assert result["seconds"] > result["least_s"] == pytest.approx(3 * (0.001 + 16 * 0.002))
    assert "16 episodes, 48 turns in " in capsys.readouterr().out
