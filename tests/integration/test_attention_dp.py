"""A run whose engine's ranks have attention of their own, from the trainer's memory and in turn with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.metrics import names as metrics
from tests.support.runs import DEMO, SMALL, records, rewarded_by_length, run_recipe

GROUPS = [
    "rollout.engine={tp: 2, ep: 2, attention_dp: 2, dtype: float32, memory_saver: true, fused_sampling: true}",
    "rollout.engine.deterministic=false",
    "placement.rollout=cpu:0-1",
]


@pytest.mark.processes
@pytest.mark.long
def test_a_run_with_groups_learns_from_what_they_draw(tmp_path: Path) -> None:
    settings = ["trainer.steps=3", "evaluation.eval.interval=2", "rollout.verify_weights=true"]
    done = run_recipe(DEMO, tmp_path, *GROUPS, *settings, rewarded_by_length(tmp_path))
    assert done.returncode == 0, done.stderr
    train = records(tmp_path / "small", "train")
    assert [record["step"] for record in train] == [1, 2, 3]
    # The engine's log-probs are those of the model that learns.
    assert all(record[metrics.MISMATCH_LOGPROB_MAX] < 1e-3 for record in train)
    assert all(record["rollout/throughput_tokens_per_sec"] > 0 for record in train)
    assert main(["report", str(tmp_path / "small")]) == 0
    assert "tp 2, ep 2, attention_dp 2" in (tmp_path / "small/report.html").read_text()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["rollout.stream={}", "placement.rollout=cpu:2-3"],
            "engine.attention_dp=2 with a stream, where it was not tried",
        ),
        (["rollout.engine.attention_dp=3"], "attention_dp is 3 and must divide tp, which is 2"),
        (["rollout.engine.max_total_tokens=30"], "the 8 that SGLang keeps, for each of attention_dp; or null"),
    ],
)
def test_what_was_not_tried_is_refused_by_check(
    overrides: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", DEMO, *SMALL, *GROUPS, *overrides]) == 2
    assert line in capsys.readouterr().err
