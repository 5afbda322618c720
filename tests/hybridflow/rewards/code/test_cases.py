"""Test cases of the usual data forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.rewards.code.cases import CasesError, cases_of, same_output
from hybridflow.sandbox.program import SandboxProgram, SandboxResult, Verdict

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
SWAP = "class Solution:\n    def swap(self, a, b):\n        return b, a"
HUMAN_EVAL = {
    "prompt": "from typing import List\n\ndef add(numbers: List[int]) -> int:\n    '''Add them.'''\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert abs(candidate([0.5]) - 0.5) < 1e-9\n",
    "entry_point": "add",
}

RIGHT: list[tuple[str, Any, str]] = [
    ("pairs", {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}, SUM),
    ("pairs in lines", {"inputs": [["1 2"]], "outputs": [["3"]]}, SUM),
    ("calls", {"inputs": [[1, 2], ["a", "b"]], "outputs": [[3], "ab"], "fn_name": "add"}, ADD),
    ("calls of a method", {"inputs": [[1, "x"]], "outputs": [["x", 1]], "fn_name": "swap"}, SWAP),
    ("calls without imports", {"inputs": [[[1, 2]]], "outputs": [3], "fn_name": "add"},
     "class Solution:\n    def add(self, numbers: List[int]) -> Optional[int]:\n        return sum(numbers)"),
    ("calls that return text", {"inputs": [["1"], [True]], "outputs": ["1", "True"], "fn_name": "str"}, "str = str"),
    ("text that is JSON", {"inputs": [[1]], "outputs": ["[1, 2]"], "fn_name": "f"}, "f = lambda x: [x, 2]"),
    ("annotations", ["assert A(1).x == 1"], "from __future__ import annotations\nfrom dataclasses import dataclass\n"
     "@dataclass\nclass A:\n    x: int"),
    ("listed", [{"input": "1 2", "output": "3", "testtype": "stdin"}], SUM),
    ("listed calls", [{"input": "1\n[2]", "output": "[1, 2]", "testtype": "functional", "fn_name": "f"}],
     "f = lambda a, b: [a] + b"),
    ("asserts", ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(0.1, 0.2) != 0.3"], ADD),
    ("setup", {"test_list": ["assert add(math.pi, 0) > 3"], "test_setup_code": "import math"}, ADD),
    ("function", HUMAN_EVAL, "def add(numbers):\n    return sum(numbers)"),
    ("body alone", {**HUMAN_EVAL}, "    return sum(numbers)"),
    ("test code", "assert add(1, 2) == 3", ADD),
    ("JSON", json.dumps({"inputs": ["1 2"], "outputs": ["3"]}), SUM),
    ("with null", {"inputs": ["1 2"], "outputs": ["3"], "fn_name": None}, SUM),
    ("kinds", ["assert f() == {'a': (1, 2.5), 2: {3, 4}, (1,): None, 'b': b'x', 'c': 1j, 'd': True}"],
     "def f():\n    return {'a': [1, 2.5], 2: {4, 3}, (1,): None, 'b': b'x', 'c': 1j, 'd': True}"),
    ("large", ["assert f() == " + str(10**400)], "def f():\n    return 10**400"),
    ("prints too", ["assert f() == 1"], "print('noise')\ndef f():\n    print('noise')\n    return 1"),
]  # fmt: skip

WRONG: list[tuple[str, Any, str]] = [
    ("pairs", {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}, SUM),
    ("no output", {"inputs": ["1 2"], "outputs": ["3"]}, ""),
    ("calls", {"inputs": [[1, 2]], "outputs": [4], "fn_name": "add"}, ADD),
    ("text for a number", [{"input": "1", "output": "1", "testtype": "functional", "fn_name": "f"}], "f = str"),
    ("no function", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, "x = 1"),
    ("asserts", ["assert add(1, 2) == 4"], ADD),
    ("claims equality", ["assert f() == 3"], "class A:\n    def __eq__(self, other): return True\ndef f(): return A()"),
    ("is an int", ["assert f() == 3"], "class A(int):\n    def __eq__(self, other): return True\ndef f(): return A()"),
    ("ends early", ["assert f(1) > 3"], "import os\nos._exit(0)"),
    ("exits early", ["assert f(1) > 3"], "import sys\nsys.exit(0)"),
    ("ends early in a call", ["assert f(1) == 3"], "import os\ndef f(x):\n    os._exit(0)"),
    ("prints the answer", ["assert f(1) == 3"], "print(3)\nimport sys\nsys.exit()"),
    ("function", HUMAN_EVAL, "def add(numbers):\n    return 0"),
    ("no Python", ["assert f(1) == 3"], "def f(x:"),
    ("null byte", ["assert f(1) == 3"], "def f(x): return 3\0"),
    ("lone surrogate", {"inputs": ["1"], "outputs": ["\ud800"]}, "print('\ud800')"),
    ("not UTF-8", {"inputs": ["1"], "outputs": ["1"]}, "import sys\nsys.stdout.buffer.write(b'1\\xff')"),
    ("nested deeply", ["assert f() == [[]]"], "def f():\n    x = []\n    for _ in range(5000): x = [x]\n    return x"),
    ("nan", ["assert f() == 1.0"], "def f():\n    return float('nan')"),
    ("unhashable", ["assert f() == 1.0"], "import os\nos.write(1, b'{\"set\": [{\"dict\": []}]}')\nf = lambda: {1: 2}"),
]  # fmt: skip


def executed(program: SandboxProgram, directory: Path) -> SandboxResult:
    """Run a program of these tests, which is trusted, as any other process."""
    for name, content in program.files.items():
        (directory / name).write_bytes(content)
    command = [sys.executable, *program.command[1:]]
    done = subprocess.run(command, cwd=directory, input=program.stdin, capture_output=True, timeout=120)
    verdict = Verdict.FAILED if done.returncode else Verdict.EXITED
    return SandboxResult(verdict, done.returncode, done.stdout, done.stderr, 0.1)


def _passed(answer: Any, source: str, directory: Path) -> list[bool]:
    results = []
    for case in cases_of(answer):
        result = executed(case.program(source), directory)
        results.append(result.verdict is Verdict.EXITED and case.passed(result))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("case", RIGHT, ids=[case[0] for case in RIGHT])
def test_right_programs_pass(case: tuple[str, Any, str], tmp_path: Path) -> None:
    assert all(_passed(case[1], case[2], tmp_path))


@pytest.mark.processes
@pytest.mark.parametrize("case", WRONG, ids=[case[0] for case in WRONG])
def test_wrong_programs_do_not(case: tuple[str, Any, str], tmp_path: Path) -> None:
    assert not all(_passed(case[1], case[2], tmp_path))


def test_right_values_stay_outside() -> None:
    for answer in (["assert f(1) == 'secret'"], {"inputs": [[1]], "outputs": ["secret"], "fn_name": "f"}):
        program = cases_of(answer)[0].program("def f(x): return 1")
        assert not any(b"secret" in content for content in (*program.files.values(), program.stdin))


def test_output_is_compared_by_words() -> None:
    assert same_output(b"1 2  \n3\n\n", "1 2\n3")
    assert same_output(b"0.50 1", "0.5 1.0")
    assert not same_output(b"1\n2", "1 2")
    assert not same_output(b"1 2", "1")
    assert not same_output(b"", "1")
    assert not same_output(b"0." + b"0" * 2000, "0.0")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{'inputs': []}", "no JSON"),
        ("4", "expected inputs and outputs"),
        ({}, "expected inputs and outputs"),
        ([], "expected inputs and outputs"),
        (None, "expected inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": "1", "outputs": ["1"]}, "inputs: '1', expected a list"),
        ({"inputs": ["1"]}, "outputs: None, expected a list"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": 3}, "expected the name of a function"),
        ({"inputs": ["{x"], "outputs": ["1"], "fn_name": "f"}, "expected JSON on each line"),
        ({"inputs": [{}], "outputs": ["1"]}, "a case has {}, expected text"),
        ({"test": "def check(f): pass", "entry_point": None}, "expected inputs and outputs"),
        ({"test": 5, "entry_point": "f"}, "test: 5, expected text"),
        ({"test": "def check(f", "entry_point": "f"}, "which is no Python"),
        (["assert f("], "which is no Python"),
        ({"test_list": ["assert f(1) == 1"], "test_setup_code": "class Node"}, "which is no Python"),
        ({"test_list": "assert f(1) == 1"}, "tests: 'assert f(1) == 1', expected texts"),
        ({"inputs": [b"1"], "outputs": ["1"]}, "a case has b'1', expected text"),
        ({"inputs": [[{1}]], "outputs": [1], "fn_name": "f"}, "expected a list of what JSON has"),
        ([{"input": "1", "output": "1", "fn_name": ["f"]}], "fn_name: ['f'], expected the name of a function"),
        ([1], "expected texts such as"),
        ([{"input": "1"}], "case 0 is {'input': '1'}, expected input and output"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "expected the same fn_name"),
    ],
)
def test_malformed_answers_are_named(answer: Any, message: str) -> None:
    with pytest.raises(CasesError, match=r"expected|no JSON|no Python") as caught:
        cases_of(answer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
