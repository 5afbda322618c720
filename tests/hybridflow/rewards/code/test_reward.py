"""The reward `code` in its process, with a sandbox."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.code.reward import extracted
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import RewardResult, reward_metrics

RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 1) == 1"]
TEXTS = {
    RIGHT: 1.0,
    "def add(a, b): return a + b": 0.0,
    "```python\ndef add(a, b):\n    return 3\n```": 0.0,
    "```python\ndef add(a, b):\n    raise ValueError\n```": 0.0,
    "```\ndef add(a, b):\n    while True: pass\n```": 0.0,
    "```py\nkept = []\nwhile True: kept.append(bytearray(10**6))\n```": 0.0,
    "```\nimport os\nwhile True: os.fork()\n```": 0.0,
    "```\nprint('x' * 10**7)\n\ud800\n```": 0.0,
}
LIMITS = {"timeout_s": 1, "memory_mb": 80, "processes": 6, "output_mb": 0.1}


def _config(**arguments: Any) -> RewardFunctionConfig:
    sandbox = {"limits": LIMITS, **arguments.pop("sandbox", {})}
    limits = arguments.pop("limits", {})
    return RewardFunctionConfig.model_validate(
        {
            "name": "code",
            "path": "code",
            "timeout_s": 250,
            "on_failure": "drop",
            "limits": limits,
            "arguments": {"sandbox": sandbox, **arguments},
        }
    )


def _scored(texts: list[str], answers: list[Any], **arguments: Any) -> RewardResult:
    with RewardFunctions(RewardConfig(functions=(_config(**arguments),))) as functions:
        try:
            functions.load()
        except UserError as error:
            pytest.skip(str(error))
        return functions.evaluate(texts, [""] * len(texts), answers)


@pytest.mark.processes
def test_programs_are_scored_and_counted() -> None:
    texts, answers = [*TEXTS, RIGHT], [*[TESTS] * len(TEXTS), ["assert add("]]
    result = _scored(texts, answers)
    assert result.by_name["code"][:-1].tolist() == list(TEXTS.values())
    assert result.dropped.tolist() == [False] * len(TEXTS) + [True]
    assert [failure.reason.partition(":")[0] for failure in result.failures] == [
        result.failures[0].reason.partition(":")[0]
    ]
    assert "which is no Python" in result.failures[0].reason
    metrics = reward_metrics(result)
    counted = {name: metrics[f"reward/code/{name}"] for name in ("passed", "missing", "timeout", "memory", "processes")}
    # The program that returns 3 passes the first of its cases.
    assert counted == {"passed": 4, "missing": 1, "timeout": 1, "memory": 1, "processes": 1}
    assert metrics["reward/code/crashed"] + metrics["reward/code/output"] == 2
    assert metrics["reward/code/wrong"] == 1
    assert metrics["reward/code/failed"] == 1
    assert metrics["reward/code/program_s"] > 0


@pytest.mark.processes
def test_shares_and_templates() -> None:
    texts = ["a + b", "3", "nonsense("]
    template = "def add(a, b):\n    return {code}"
    result = _scored(texts, [TESTS] * 3, extract="text", template=template, score="share")
    assert result.by_name["code"].tolist() == pytest.approx([1.0, 1 / 3, 0.0])


@pytest.mark.processes
def test_a_machine_at_fault_is_no_reward() -> None:
    """A limit of the worker leaves its sandbox without descriptors for the files of large test cases."""
    many = {"test": "x = 1", "entry_point": "add", "prompt": "#" * (5 << 20)}
    limits = {"file_gb": 0.004}
    result = _scored([RIGHT, RIGHT], [TESTS, many], limits=limits)
    assert result.dropped.tolist() == [False, True]
    assert "sandbox: the files of a program: File too large" in result.failures[0].reason


@pytest.mark.processes
def test_a_missing_sandbox_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = shutil.which("python3")
    assert python is not None
    (tmp_path / "python3").symlink_to(python)
    monkeypatch.setenv("PATH", str(tmp_path))
    with RewardFunctions(RewardConfig(functions=(_config(),))) as functions, pytest.raises(UserError) as caught:
        functions.load()
    assert "bwrap is not installed" in str(caught.value)
    assert "isolation: none" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"template": "x"}, "expected {code} in it once"),
        ({"sample_timeout_s": 300}, "expected less of it"),
        ({"sandbox": {"limits": {"processes": 1000}}}, "limits.processes=256"),
        ({"sandbox": {"isolation": "some"}}, "sandbox.isolation"),
        ({"tests": 1}, "no such argument"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"arguments|limits") as caught:
        _config(**changes)
    assert message in str(caught.value)


def test_the_last_block_of_python_is_the_program() -> None:
    assert extracted("a\n```python\n1\n```\nb\n```py\n2\n```\n```bash\n3\n```") == "2"
    assert extracted("````\n```\n1\n```\n````") == "```\n1\n```"
    assert extracted("  ~~~ python title=x\n  1\n  ~~~") == "1"
    assert (
        extracted("1. So:\n   ```python\n   def f():\n       return 1\n  # f\n   ```") == "def f():\n    return 1\n# f"
    )
    assert extracted("```py\n1\n```\nIt prints:\n```\n2\n```") == "1"
    assert extracted("```\n1\n```\nor\n```\n2\n```") == "2"
    assert extracted("```python\n1") is None
    assert extracted("1") is None
    assert extracted("```js\n1\n```") is None
