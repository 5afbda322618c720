"""The samplers' benchmark, which holds both to the log-probs of the logits."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from benchmarks import sampling
from engine3d.platform.cpu import sglang as sglang_cpu


def _run(arguments: list[str]) -> None:
    raise SystemExit(sampling.main(arguments))


@pytest.mark.processes
def test_both_samplers_draw(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in sglang_cpu.environment(1).items():
        monkeypatch.setenv(variable, value)
    # Forked, since SGLang takes a quarter of a minute to import, and a process can be one engine's rank alone.
    arguments = ["--requests", "3,8", "--vocabulary", "500", "--rounds", "2"]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(arguments,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    out, err = capfd.readouterr()
    printed: dict[str, Any] = json.loads(out[out.index("{") :])
    assert printed["requests"].keys() == {"3", "8"}
    for by_sampler in printed["requests"].values():
        assert by_sampler.keys() == {"sglang", "fused"} and all(
            measurement["ms"] > 0 for measurement in by_sampler.values()
        )
    assert "8 requests: sglang" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--requests", "4,x"], "--requests 4,x: expected whole numbers of at least 1"),
        (["--requests", "0"], "--requests 0: expected whole numbers of at least 1"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sampling.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"sampling.py: {line}")
