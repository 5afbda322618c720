"""Functions written for verl, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import RewardResult

pytestmark = pytest.mark.processes

TEXTS, PROMPTS, ANSWERS = ["4", "x", "4"], ["2+2=", "2+2=", "2+2="], ["4", "4", "5"]
FIELDS: dict[str, list[Any]] = {
    "data_source": ["gsm8k", "math", "math"],
    "extra_info": [{"index": 7}, None, {"index": 9}],
}

EXACT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert isinstance(extra_info, dict)
    return float(solution_str == ground_truth) + extra_info.get("index", 0) + (100 if data_source == "math" else 0)
"""
FALLBACK = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(data_source) + extra_info.get("level", 0)
"""
DETAILED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    found = {"score": float(right), "acc": right, "pred": solution_str, "mean": 1.0}
    return found if right else found | {"extra": 2}
"""
COROUTINE = """
import asyncio, time
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.5)
    return {"score": 1.0 if solution_str == ground_truth else 0.0}
"""
BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert len(data_sources) == len(extra_infos) == len(solution_strs)
    return [{"score": kwargs.get("scale", 1) * float(a == b)} for a, b in zip(solution_strs, ground_truths)]
"""
FEW = """
def compute_score(solution_str, ground_truth, method="strict"):
    return 1 if method == "flexible" and solution_str == ground_truth else 0
"""
OURS = """
def compute_score(generated_texts, ground_truth, solution_str):
    return [float(len(ground_truth) == len(solution_str) == len(generated_texts))] * len(generated_texts)
"""


def scored(directory: Path, source: str, fields: dict[str, list[Any]], **arguments: Any) -> RewardResult:
    path = directory / "mine.py"
    path.write_text(source)
    function = {"name": "mine", "path": f"{path}:compute_score", "arguments": arguments}
    config = RewardConfig.model_validate({"functions": [function]})
    with RewardFunctions(config, tuple(fields)) as rewards:
        return rewards.evaluate(TEXTS, PROMPTS, ANSWERS, fields, sources=["own"] * 3)


def failure(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        scored(*arguments, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_gets_what_verl_passes(tmp_path: Path) -> None:
    assert scored(tmp_path, EXACT, FIELDS).total.tolist() == [8, 100, 109]


def test_without_its_columns_it_gets_the_name_of_the_source_and_the_row(tmp_path: Path) -> None:
    assert scored(tmp_path, FALLBACK, {"level": [1, 2, 3]}).total.tolist() == [4, 5, 6]
    assert scored(tmp_path, FALLBACK, {}).total.tolist() == [3, 3, 3]


def test_a_dictionary_has_the_score_and_metrics(tmp_path: Path) -> None:
    result = scored(tmp_path, DETAILED, FIELDS)
    assert result.total.tolist() == [1, 0, 0]
    metrics = {name.rpartition("/")[2]: column.tolist() for name, column in result.metrics.items()}
    assert metrics["acc"] == [1, 0, 0] and metrics["extra"][1:] == [2, 2]
    assert metrics.keys() == {"acc", "extra"}


@pytest.mark.parametrize(
    ("source", "arguments", "rewards"),
    [
        (COROUTINE, {}, [1, 0, 0]),
        (BATCH, {"scale": 3}, [3, 0, 0]),
        (FEW, {"method": "flexible"}, [1, 0, 0]),
    ],
)
def test_coroutines_batches_and_arguments(
    tmp_path: Path, source: str, arguments: dict[str, Any], rewards: list[float]
) -> None:
    assert scored(tmp_path, source, FIELDS, **arguments).total.tolist() == rewards


def test_a_function_of_ours_with_such_columns_stays_one(tmp_path: Path) -> None:
    fields = {"ground_truth": ["a", "b", "c"], "solution_str": ["a", "b", "c"]}
    assert scored(tmp_path, OURS, fields).total.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {'acc': 1}", "returned {'acc': 1} (dict) for sample 0 ('4'), expected a finite number"),
        ("return None", "returned None (NoneType) for sample 0 ('4'), expected a finite number"),
        ("raise NotImplementedError(data_source)", "raised NotImplementedError at {path}:3: gsm8k on sample 0 ('4')"),
    ],
)
def test_what_is_no_score_is_one_line(tmp_path: Path, body: str, reason: str) -> None:
    source = f"\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    assert reason.replace("{path}", str(tmp_path / "mine.py")) in failure(tmp_path, source, FIELDS)


def test_a_parameter_that_nothing_is_passed_for_is_refused(tmp_path: Path) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth, tokenizer): return 1.0"
    assert "requires an argument 'tokenizer'" in failure(tmp_path, source, FIELDS)
    assert "gets 'ground_truth' of each sample" in failure(tmp_path, FEW, FIELDS, ground_truth="4")


def test_it_needs_answers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EXACT)
    config = {"name": "mine", "path": f"{tmp_path}/mine.py:compute_score"}
    with RewardFunctions(RewardConfig.model_validate({"functions": [config]})) as rewards:
        rewards.load()
        assert [function.name for function in rewards.needing_answers()] == ["mine"]
