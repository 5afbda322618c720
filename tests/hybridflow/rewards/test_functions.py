"""Rewards: right values, one clear line for every failure, and no process left over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.rewards.builtin import arithmetic
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.functions import RewardFunctions
from tests.support.work import calls_of

TEXTS = ["a", "bb", "ccc"]
PROMPTS = ["p0", "p1", "p2"]
ANSWERS = ["a", "x", "ccc"]


def wait_until(condition: object, limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} not within {limit_s} s"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """True if a process has ended (or is a zombie of another parent)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def configured(tmp_path: Path, source: str, **settings: object) -> RewardConfig:
    path = tmp_path / "my_rewards.py"
    path.write_text(source)
    function = {"name": "mine", "path": f"{path}:reward", **settings}
    return RewardConfig.model_validate({"functions": [function]})


def values_of(config: RewardConfig) -> list[float]:
    with RewardFunctions(config) as rewards:
        return rewards.evaluate(TEXTS, PROMPTS, ANSWERS).total.tolist()


def failure_of(config: RewardConfig) -> str:
    with RewardFunctions(config) as rewards:
        with pytest.raises(UserError) as error:
            rewards.evaluate(TEXTS, PROMPTS, ANSWERS)
        assert "\n" not in str(error.value)
        return str(error.value)


OF_FIELDS = """
def reward(texts, answers, limit, unit=None, seed=7):
    assert seed == 7 and set(unit) <= {None, "m"}
    return [limit[row]["most"] + (answers[row] or 0) for row in range(len(texts))]
"""
FIELDS: dict[str, list[Any]] = {
    "limit": [{"most": 1}, {"most": 2}, {"most": 3}],
    "unit": [None, "m", "m"],
    "of_no_interest": [0, 0, 0],
}


@pytest.mark.slow
def test_fields_of_the_data_reach_functions_that_ask_for_them_by_name(tmp_path: Path) -> None:
    config = configured(tmp_path, OF_FIELDS, workers=2)
    with RewardFunctions(config, list(FIELDS)) as rewards:
        assert rewards.evaluate(TEXTS, PROMPTS, [0.5, None, 2], FIELDS).total.tolist() == [1.5, 2.0, 5.0]
    everything = "def reward(texts, **columns):\n    assert sorted(columns) == COLUMNS\n    return [0.0] * len(texts)\n"
    columns = ["answers", "limit", "of_no_interest", "prompts", "unit"]
    with RewardFunctions(configured(tmp_path, everything.replace("COLUMNS", str(columns))), list(FIELDS)) as rewards:
        assert rewards.evaluate(TEXTS, PROMPTS, ANSWERS, FIELDS).total.tolist() == [0.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (
            OF_FIELDS,
            ("unit", "level"),
            "requires an argument 'limit', .* answers and fields of the data \\(unit, level\\)",
        ),
        (OF_FIELDS, (), "requires an argument 'limit', .* answers; the data have no other fields"),
        ("def reward(texts, answers): pass", ("answers",), "asks for 'answers', which is a field of the data too"),
    ],
)
def test_what_the_data_have_not_is_found_before_anything_is_generated(
    tmp_path: Path, source: str, fields: tuple[str, ...], message: str
) -> None:
    with RewardFunctions(configured(tmp_path, source), fields) as rewards, pytest.raises(UserError, match=message):
        rewards.load()
    with RewardFunctions(configured(tmp_path, OF_FIELDS), None) as rewards:
        rewards.load()


def test_texts_are_compared_with_texts() -> None:
    with pytest.raises(UserError, match=r"reward arithmetic: an answer is '0.5' \(float\), expected text or whole"):
        arithmetic(["0.5"], answers=[0.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "right"),
    [("42", True), (" 42\n", True), ("042", False), ("42+1", False), ("4", False), ("-42", False), ("", False)],
)
def test_the_arithmetic_verifier_takes_the_whole_text(text: str, right: bool) -> None:
    assert arithmetic([text], answers=["42"]) == [float(right)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "def reward(generated_texts): return [len(t) for t in generated_texts]",
        "def reward(texts, prompts=None): return [len(t) + (prompts[i] != f'p{i}') for i, t in enumerate(texts)]",
        "def reward(texts, *, answers, prompts): return [float(len(a)) if a != 'x' else 2 for a in answers]",
        "def reward(texts, **columns): return [len(t) for t in texts if sorted(columns) == ['answers', 'prompts']]",
        "import numpy\ndef reward(texts): return numpy.array([len(t) for t in texts], dtype=numpy.float32)",
        "import numpy\ndef reward(texts): return tuple(numpy.int64(len(t)) for t in texts)",
        "class R:\n  def __call__(self, texts): print('noise'); return [len(t) for t in texts]\nreward = R()",
    ],
)
def test_functions_of_every_accepted_form(tmp_path: Path, source: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert values_of(configured(tmp_path, source)) == [1.0, 2.0, 3.0]
    assert capfd.readouterr().out == ""


def test_weighted_sum_over_functions_in_a_module_and_builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_package").mkdir()
    (tmp_path / "reward_package" / "inner.py").write_text("def length(texts): return [len(t) for t in texts]")
    monkeypatch.chdir(tmp_path)
    functions = (
        RewardFunctionConfig(name="right", path="arithmetic", weight=2.0),
        RewardFunctionConfig(name="length", path="reward_package.inner:length", weight=-0.5),
    )
    with RewardFunctions(RewardConfig(functions=functions)) as rewards:
        result = rewards.evaluate(TEXTS, PROMPTS, ANSWERS)
    assert result.total.tolist() == [1.5, -1.0, 0.5]
    assert {name: column.tolist() for name, column in result.by_name.items()} == {
        "right": [1.0, 0.0, 1.0],
        "length": [1.0, 2.0, 3.0],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def reward(texts):\n  return [1 / (len(t) - 2) for t in texts]",
            "raised ZeroDivisionError at {path}:2: division by zero on sample 1 ('bb'); expected 3 numbers",
        ),
        ("def reward(texts): return [1.0]", "returned 1 values for 3 generated texts, expected one for each"),
        ("def reward(texts): return None", "returned None (NoneType), expected a list of 3 numbers"),
        ("def reward(texts): return 0.5", "returned 0.5 (float), expected a list of 3 numbers"),
        (
            "def reward(texts): return [0.0, float('nan'), 1.0]",
            "returned nan (float) for sample 1 ('bb'), expected a finite number",
        ),
        ("def reward(texts): return [0, 1, '2']", "returned '2' (str) for sample 2 ('ccc'), expected a finite number"),
        ("def reward(texts): return [0, 1, 1e300]", "returned 1e+300 for sample 2, expected a number within the range"),
        ("def reward(texts): raise SystemExit(3)", "raised SystemExit at {path}:1: 3 on sample 0 ('a'); expected 3"),
        ("import os\ndef reward(texts): os._exit(7)", "ended with exit code 7 instead of returning"),
        ("import os\ndef reward(texts): os.kill(os.getpid(), 11)", "was killed by SIGSEGV instead of returning"),
        ("def other(texts): pass", "has no function 'reward'"),
        ("def reward(texts, threshold): pass", "requires an argument 'threshold', expected reward_fn(generated_texts)"),
        ("def reward(): pass", "takes no positional argument for the generated texts"),
        (
            "def reward(prompts, completions, **kwargs): pass",
            "takes prompts first, expected the generated texts there: reward_fn(completions, prompts, ...)",
        ),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError at {path}:1: No module named"),
        ("def reward(texts:", "cannot be imported: SyntaxError"),
    ],
)
def test_every_failure_is_one_line_that_names_the_reward(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "my_rewards.py"
    failure = failure_of(configured(tmp_path, source))
    assert failure.startswith(f"reward 'mine' ({path}:reward) ")
    assert message.format(path=path) in failure


def test_load_finds_a_missing_file_without_any_sample(tmp_path: Path) -> None:
    config = RewardConfig(functions=(RewardFunctionConfig(name="mine", path=f"{tmp_path}/no.py:f"),))
    with RewardFunctions(config) as rewards, pytest.raises(UserError, match=r"no\.py does not exist"):
        rewards.load()


SPAWNS = """
import os, subprocess, sys, time
from pathlib import Path
def reward(texts):
    child = subprocess.Popen(["sleep", "600"])
    Path({marker!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
    {hang}
"""
HANGS = {
    "a sleep": "time.sleep(600)",
    "a loop that swallows everything": "signal = __import__('signal'); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    while True: pass",
    # A regular expression that backtracks for ever holds the interpreter: no thread of the process runs meanwhile.
    "C code that never lets go": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
}


def process_ids(marker: Path) -> list[int]:
    wait_until(lambda: marker.exists() and len(marker.read_text().split()) == 2, 30, "the reward function has started")
    return [int(pid) for pid in marker.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_is_killed_in_time_with_its_children_and_the_next_call_works(tmp_path: Path, hang: str) -> None:
    marker = tmp_path / "marker"
    source = SPAWNS.format(marker=str(marker), hang=HANGS[hang])
    config = configured(tmp_path, source, timeout_s=1.0)
    with RewardFunctions(config) as rewards:
        rewards.load()
        started = time.monotonic()
        with pytest.raises(UserError, match="did not return the rewards of 3 samples within 1 s and was killed"):
            rewards.evaluate(TEXTS, PROMPTS, ANSWERS)
        assert time.monotonic() - started < 300
        for pid in process_ids(marker):
            wait_until(lambda pid=pid: gone(pid), 30, f"process {pid} has ended")  # type: ignore[misc]
        (tmp_path / "my_rewards.py").write_text("def reward(texts): return [len(t) for t in texts]")
        assert rewards.evaluate(TEXTS, PROMPTS, ANSWERS).total.tolist() == [1.0, 2.0, 3.0]


def test_a_module_that_hangs_while_it_is_imported_is_killed(tmp_path: Path) -> None:
    config = configured(tmp_path, "import time; time.sleep(600)", load_timeout_s=1.0)
    assert "did not finish its import within 1 s and was killed" in failure_of(config)


@pytest.mark.processes
@pytest.mark.parametrize("hang", HANGS)
def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, hang: str) -> None:
    marker = tmp_path / "marker"
    configured(tmp_path, SPAWNS.format(marker=str(marker), hang=HANGS[hang]))
    program = (
        "import sys; from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig\n"
        "from hybridflow.rewards.functions import RewardFunctions\n"
        "function = RewardFunctionConfig(name='mine', path=sys.argv[1] + ':reward', timeout_s=600)\n"
        "RewardFunctions(RewardConfig(functions=(function,))).evaluate(['a'], ['b'], ['c'])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "my_rewards.py")])
    try:
        pids = process_ids(marker)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
    wait_until(lambda: all(map(gone, pids)), 30, "the reward process and its child have ended")


def test_close_leaves_no_process(tmp_path: Path) -> None:
    rewards = RewardFunctions(configured(tmp_path, "import os\ndef reward(texts): return [os.getpid()] * len(texts)"))
    pid = int(rewards.evaluate(TEXTS, PROMPTS, ANSWERS).total[0])
    assert not gone(pid)
    rewards.close()
    rewards.close()
    assert gone(pid)


@pytest.mark.slow
def test_functions_run_at_the_same_time_and_one_failure_ends_all(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\ndef reward(texts):\n    begin = time.monotonic()\n    time.sleep(1.0)\n"
        f"    print(begin, time.monotonic(), file=open(f'{tmp_path}/{{os.getpid()}}.span', 'w'))\n"
        "    return [1.0] * len(texts)"
    )
    (tmp_path / "wrong.py").write_text("def reward(texts): return []")
    slow = [RewardFunctionConfig(name=f"slow{i}", path=f"{tmp_path}/slow.py:reward") for i in range(3)]
    with RewardFunctions(RewardConfig(functions=tuple(slow))) as rewards:
        rewards.load()
        assert rewards.evaluate(TEXTS, PROMPTS, ANSWERS).total.tolist() == [3.0] * 3
    spans = [tuple(map(float, path.read_text().split())) for path in tmp_path.glob("*.span")]
    assert len(spans) == 3 and max(begin for begin, _ in spans) < min(end for _, end in spans)
    wrong = RewardFunctionConfig(name="wrong", path=f"{tmp_path}/wrong.py:reward")
    with RewardFunctions(RewardConfig(functions=(wrong, *slow))) as rewards:
        with pytest.raises(UserError, match="reward 'wrong'"):
            rewards.evaluate(TEXTS, PROMPTS, ANSWERS)
        assert not any(process.running for pool in rewards._processes.values() for process in pool.processes)


def test_a_step_of_256_samples_is_one_question(tmp_path: Path) -> None:
    source = "def reward(texts, answers): return [float(t == a) for t, a in zip(texts, answers)]"
    with RewardFunctions(configured(tmp_path, source)) as rewards:
        rewards.load()
        rewards.evaluate(["x"], ["p"], ["y"])  # imports torch, which is no question
        results: list[Any] = []
        calls = calls_of(lambda: results.append(rewards.evaluate(["x" * 4000] * 256, ["p"] * 256, ["y"] * 256)))
    assert calls < 30 * 256  # of this process; a question for each sample would take more
    assert results[0].total.sum() == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": []}, "expected at least one"),
        ({"functions": [{"name": "a", "path": "arithmetic"}, {"name": "a", "path": "m:f"}]}, "each name once"),
        (
            {"functions": [{"name": "a", "path": "arithmetics"}]},
            "'arithmetics' is no reward, expected 'module:function'",
        ),
        ({"functions": [{"name": "a", "path": "m:f", "timeout_s": 0}]}, "timeout_s"),
    ],
)
def test_reward_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig.model_validate(settings)
