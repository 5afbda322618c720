"""`benchmarks/routing_replay.py` on a tiny model: routes of the engine, and of the pass before an optimizer step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from tests.support.tiny_models import make_qwen3_moe

PROGRAM = str(ROOT / "benchmarks" / "routing_replay.py")
SIZES = ["--prompts", "2", "--samples", "2", "--input", "12", "--output", "12", "--lr", "3e-3"]


@pytest.mark.processes
@pytest.mark.long
def test_log_probs_with_and_without_the_routes_of_an_engine(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path / "model", seed=0)
    done = subprocess.run(
        [sys.executable, PROGRAM, "--model", str(tmp_path / "model"), *SIZES],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert results.keys() == {"float32", "bfloat16"}
    for result in results.values():
        assert result["rollout"]["different"] <= result["none"]["different"]
        assert result["none"]["tokens"] == result["rollout"]["tokens"] == 4 * 12
        assert (result["route_bytes"], result["route_bytes_of_a_token"]) == (4 * 23 * 4, 4)
        after = result["after_step"]
        assert after["gradient_norm"] > 0 and after["update"]["mean"] > 0 and after["none"]["different"] > 0
        assert after["update"]["mean"] != after["none"]["mean"]
    assert results["float32"]["rollout"]["different"] == 0
    assert results["float32"]["rollout"]["largest"] < 1e-3
    assert results["bfloat16"]["rollout"]["mean"] < 0.1


def test_a_model_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.routing_replay import main

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "rms_norm_eps": 1e-6}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["--model", str(tmp_path)]) == 2
    assert "--model: LlamaForCausalLM has no experts, expected a model with routes" in capsys.readouterr().err
    assert main(["--model", str(tmp_path), "--dtypes", "float16"]) == 2
