"""The load of experts of a step, and the file of it: bounded, and continued by a resumed run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine3d.errors import UserError
from engine3d.models.experts.load_balance import Routing
from hybridflow.metrics.config import MetricsConfig
from hybridflow.metrics.expert_loads import MOST_STEPS, ExpertLoads, read_expert_loads
from hybridflow.metrics.logger import Metrics

FILES = MetricsConfig(console=False, csv=False, tensorboard=False)


def loads(layers: int, experts: int, *, biased: bool = True) -> ExpertLoads:
    values = np.random.default_rng(layers).gamma(2.0, size=(2, layers, experts))
    values[0, 0, 0] = 0.0
    relative = values[0] / values[0].mean(axis=1, keepdims=True)
    return ExpertLoads(tuple(range(3, 3 + layers)), relative, values[1] if biased else None)


def steps_in(directory: Path) -> list[int]:
    return [record.step for record in read_expert_loads(directory / "expert_loads.jsonl")]


def test_loads_are_those_of_all_updates_of_a_step() -> None:
    first = Routing((1, 2), ((4, 4, 0, 0), (2, 6, 0, 0)), ((0.5, 0.5, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5)))
    second = Routing((1, 2), ((8, 0, 0, 0), (0, 0, 8, 0)), ((0.5, 0.5, 0.6, 0.8), (0.4, 0.4, 0.4, 0.4)))
    step = ExpertLoads.of([first, second])
    assert step is not None and step.layers == (1, 2) and step.biases is not None
    assert step.loads.tolist() == [[3, 1, 0, 0], [0.5, 1.5, 2, 0]]
    np.testing.assert_allclose(step.biases, np.array([[-0.1, -0.1, 0, 0.2], [0, 0, 0, 0]]), atol=1e-12)
    assert step.dead.tolist() == [2, 1]
    assert ExpertLoads.of([]) is None


def test_entropy_is_1_for_even_loads_and_0_for_one_expert() -> None:
    even, one = np.ones((1, 8)), np.asarray([[4.0, 0.0, 0.0, 0.0]])
    assert ExpertLoads((0,), even).entropies == pytest.approx([1.0])
    assert ExpertLoads((0,), one).entropies == pytest.approx([0.0])
    assert ExpertLoads((0,), np.ones((1, 1))).entropies.tolist() == [1.0]


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    actor, critic = loads(3, 8), loads(2, 4, biased=False)
    with Metrics(FILES, tmp_path) as log:
        log.log_expert_loads(1, {"actor": actor, "critic": critic})
        log.log_expert_loads(2, {})
    [record] = read_expert_loads(tmp_path / "expert_loads.jsonl")
    assert (record.phase, record.step, list(record.models)) == ("train", 1, ["actor", "critic"])
    for written, read in ((actor, record.models["actor"]), (critic, record.models["critic"])):
        assert read.layers == written.layers and read.loads[0, 0] == 0
        np.testing.assert_allclose(read.loads, written.loads, rtol=1e-3)
    assert record.models["critic"].biases is None
    assert record.models["actor"].biases is not None


def test_models_without_experts_have_no_file(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        log.log(1, {"train/loss": 1.0})
        log.log_expert_loads(1, {})
    assert not (tmp_path / "expert_loads.jsonl").exists()


@pytest.mark.slow
def test_the_file_has_a_limit_and_the_newest_steps(tmp_path: Path) -> None:
    model, path = loads(61, 256), tmp_path / "expert_loads.jsonl"
    with Metrics(FILES, tmp_path) as log:
        most = 0
        for step in range(1, 1001):
            log.log_expert_loads(step, {"actor": model})
            most = max(most, path.stat().st_size)
    steps = steps_in(tmp_path)
    assert len(steps) <= MOST_STEPS and steps[-1] == 1000 and steps == sorted(steps)
    old = [step for step in steps if step <= 960]
    assert set(np.diff(old)) == {32} and len(steps) > MOST_STEPS // 2
    # 61 layers of 256 experts, loads and biases, in base64 of two bytes each.
    assert most <= MOST_STEPS * (61 * 256 * 2 * 2 * 4 / 3 + 600) < 5.5e6


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    with Metrics(FILES, tmp_path) as log:
        for step in range(1, MOST_STEPS + 6):
            log.log_expert_loads(step, {"actor": loads(1, 4)})
    kept = steps_in(tmp_path)
    assert kept[0] == 2 and kept[-1] == MOST_STEPS + 5
    with Metrics(FILES, tmp_path, resume_from_step=50) as log:
        for step in range(51, 120):
            log.log_expert_loads(step, {"actor": loads(1, 4)})
    steps = steps_in(tmp_path)
    assert steps[-1] == 119 and len(steps) <= MOST_STEPS and len(set(steps)) == len(steps)
    assert {step for step in kept if step <= 50 and step % 4 == 0} <= set(steps)
    with pytest.raises(UserError, match=r"expert_loads\.jsonl already holds"):
        Metrics(FILES.model_copy(update={"samples_per_step": 0}), _only_loads(tmp_path))


def _only_loads(directory: Path) -> Path:
    (directory / "metrics.jsonl").unlink()
    return directory


@pytest.mark.parametrize(
    "line",
    ["[1]", '{"phase": "train", "step": 1}', '{"phase": "", "step": 1, "models": {"actor": {"layers": [0]}}}'],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "loads").write_text(line + "\n")
    with pytest.raises(UserError, match=r"loads:1: .* has no expert loads, expected an object with phase"):
        read_expert_loads(tmp_path / "loads")
