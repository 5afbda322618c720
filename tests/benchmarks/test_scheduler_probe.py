from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_PATH = Path(__file__).resolve().parents[2] / "benchmarks/beside_verl/scheduler_probe/scheduler_probe.py"


@pytest.fixture
def module() -> Any:
    spec = importlib.util.spec_from_file_location("scheduler_probe", _PATH)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_decoding_steps_are_summed_by_rollout(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe.jsonl"
    probe = module._Probe(path)
    batch, calls = SimpleNamespace(reqs=["request"] * 3), []
    waits: list[bool] = []
    result = SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: waits.append(True)))
    for _ in range(85):
        assert probe.timed("run")(lambda: "batch") == "batch"
        assert probe.processed(lambda *arguments: calls.append(arguments), "processor", batch, result) is None
    assert calls == [("processor", batch, result)] * 85 and len(waits) == 85
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["rollout"], record["requests"]) for record in records] == [(1, 3), (1, 3)]
    assert all(record["step_ms"] > record["process_ms"] > 0 for record in records)
    assert all(record["arithmetic_us"] > 0 and record["misses_us"] > 0 for record in records)
    monkeypatch.setattr(sys, "argv", ["scheduler_probe.py", str(path)])
    module.main()
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("rollout\tstep_ms\tnext_batch_ms\trun_ms\twait_ms\tprocess_ms")
    assert row.startswith("1\t")


@pytest.mark.slow
def test_the_plugin_names_functions_that_sglang_has(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookRegistry

    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    module.register()
    assert not targets
    monkeypatch.setenv("SCHEDULER_PROBE", "probe.jsonl")
    module.register()
    assert len(targets) == 3 and all(callable(pkgutil.resolve_name(target)) for target in targets)
