"""Test cases of the usual data forms, as programs of a sandbox and comparisons of their output.

| form | data sets that have it |
|---|---|
| `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls of a function | APPS, TACO, CodeContests |
| `[{"input": ..., "output": ..., "testtype": ...}, ...]`, with `fn_name` likewise | LiveCodeBench |
| `["assert ...", ...]`, also as `test_list` with `test_setup_code` | MBPP |
| `{"test": ..., "entry_point": ...}`, with the code in front of the response as `prompt` | HumanEval |

Each may be JSON in a text. What a program should return is compared outside the sandbox, so that no program can know
it or say that it is right. Tests that only Python can decide run with the program, in one process.
"""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from engine3d.errors import shortened
from hybridflow.sandbox.program import SandboxProgram, SandboxResult, Verdict, python_program

_HARNESS = Path(__file__).with_name("harness.py").read_text()
_FORMS = "inputs and outputs, a list of asserts, or test and entry_point"


class CasesError(Exception):
    """An answer holds no test cases. The message says what it holds, and what would be right."""


@dataclass(frozen=True)
class Case:
    """One test case.

    Args:
        program: of a response's source code.
        passed: true if the program's result is right. Asked of programs that ended with exit code 0.
    """

    program: Callable[[str], SandboxProgram]
    passed: Callable[[SandboxResult], bool]


def cases_of(answer: Any) -> list[Case]:
    """The test cases of an answer. Raises CasesError."""
    if isinstance(answer, str):
        answer = _parsed(answer)
    if isinstance(answer, Mapping):
        answer = {name: value for name, value in answer.items() if value is not None}
        if "test_list" in answer:
            return _asserts(answer["test_list"], _text(answer, "test_setup_code", ""))
        if "entry_point" in answer:
            test, name = _text(answer, "test"), _text(answer, "entry_point")
            _statements(f"{test}\n\ncheck({name})\n")
            return [_check(f"{test}\n\ncheck({name})\n", before=_text(answer, "prompt", ""))]
        if "inputs" in answer or "outputs" in answer:
            return _pairs(answer.get("inputs"), answer.get("outputs"), answer.get("fn_name"))
    if isinstance(answer, Sequence) and not isinstance(answer, str) and answer:
        if all(isinstance(case, Mapping) for case in answer):
            return _listed(answer)
        return _asserts(answer, "")
    raise CasesError(f"{_shown(answer)}, expected {_FORMS}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith(("assert", "def ", "import", "from")):
            raise CasesError(f"{_shown(text)}, which is no JSON ({error}), expected {_FORMS}") from None
    return [text]


def _text(answer: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = answer.get(name, default)
    if not isinstance(value, str):
        raise CasesError(f"{name}: {_shown(value)}, expected text")
    return value


def _listed(cases: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Cases in LiveCodeBench's form."""
    for number, case in enumerate(cases):
        if not {"input", "output"} <= case.keys():
            raise CasesError(f"case {number} is {_shown(case)}, expected input and output")
    name = cases[0].get("fn_name")
    functional = any(case.get("testtype") == "functional" for case in cases)
    if any(case.get("fn_name") != name for case in cases) or (functional and name is None):
        names = sorted({str(case.get("fn_name")) for case in cases})
        raise CasesError(f"cases of functions {names}, expected the same fn_name in each")
    return _pairs([case["input"] for case in cases], [case["output"] for case in cases], name)


def _pairs(inputs: Any, outputs: Any, name: Any) -> list[Case]:
    for kind, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise CasesError(f"{kind}: {_shown(values)}, expected a list")
    if len(inputs) != len(outputs) or not inputs:
        raise CasesError(f"{len(inputs)} inputs and {len(outputs)} outputs, expected as many, one at least")
    if name is None:
        return [_printed(_lines(given), _lines(right)) for given, right in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not name.isidentifier():
        raise CasesError(f"fn_name: {_shown(name)}, expected the name of a function")
    return [
        _called(name, _arguments(given), _returned(given, right)) for given, right in zip(inputs, outputs, strict=True)
    ]


def _lines(value: Any) -> str:
    """Standard input or output of a case: text, or lines in a list."""
    if isinstance(value, str):
        return value
    is_list = isinstance(value, Sequence) and not isinstance(value, bytes)
    if is_list and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    raise CasesError(f"a case has {_shown(value)}, expected text")


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or text with one in JSON on each line."""
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise CasesError(f"arguments {_shown(given)}, expected JSON on each line") from None
    try:
        if isinstance(given, Sequence):
            json.dumps(given)
            return list(given)
    except (TypeError, ValueError, RecursionError):
        pass
    raise CasesError(f"arguments {_shown(given)}, expected a list of what JSON has")


def _returned(given: Any, right: Any) -> list[Any]:
    """Values that a call may return: of a text what it is in JSON, or itself where the arguments are no text either."""
    if not isinstance(right, str):
        return [right, *(right if isinstance(right, list) and len(right) == 1 else [])]
    try:
        value = json.loads(right)
    except (ValueError, RecursionError):
        return [right]
    return [*_returned(None, value), *([] if isinstance(given, str) else [right])]


def _printed(given: str, right: str) -> Case:
    """A program that reads standard input and prints."""
    stdin = given.encode(errors="replace")

    def program(source: str) -> SandboxProgram:
        return python_program(source, stdin=stdin)

    return Case(program, lambda result: same_output(result.stdout, right))


def same_output(output: bytes, right: str) -> bool:
    """True if a program's output is the right one, but for white space at line ends, empty lines at the end, and the
    form of decimal numbers. Output that is not UTF-8 is not."""
    try:
        lines = [line.split() for line in output.decode().rstrip().splitlines()]
    except UnicodeDecodeError:
        return False
    right_lines = [line.split() for line in right.rstrip().splitlines()]
    return len(lines) == len(right_lines) and all(
        len(words) == len(right_words) and all(map(_same_word, words, right_words))
        for words, right_words in zip(lines, right_lines, strict=True)
    )


def _same_word(word: str, right: str) -> bool:
    if word == right:
        return True
    if len(word) > 1000 or "." not in word + right:
        return False
    try:
        return Decimal(word) == Decimal(right)
    except InvalidOperation:
        return False


def _called(name: str, arguments: list[Any], rights: list[Any]) -> Case:
    def program(source: str) -> SandboxProgram:
        return _with_harness(source, {"call": name, "arguments": arguments})

    return Case(program, lambda result: _value_is(result, rights))


def _asserts(tests: Any, setup: str) -> list[Case]:
    is_list = isinstance(tests, Sequence) and not isinstance(tests, str)
    if not is_list or not tests or not all(isinstance(test, str) for test in tests):
        raise CasesError(f"tests: {_shown(tests)}, expected texts such as 'assert add(1, 2) == 3'")
    _statements(setup)
    return [_assert(test, setup) for test in tests]


def _statements(test: str) -> list[ast.stmt]:
    """The statements of a test. Raises CasesError for what is no Python."""
    try:
        return ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CasesError(f"test {_shown(test)}, which is no Python: {error}") from None


def _assert(test: str, setup: str) -> Case:
    match _statements(test):
        case [ast.Assert(ast.Compare(left, [ast.Eq()], [right]))] if values := _literal(right):
            expression = ast.unparse(left)
        case _:
            return _check(test, before=setup)

    def program(source: str) -> SandboxProgram:
        return _with_harness(f"{setup}\n{source}", {"expression": expression})

    return Case(program, lambda result: _value_is(result, values))


def _literal(node: ast.expr) -> list[Any]:
    """The value of a literal, none for another expression."""
    try:
        return [ast.literal_eval(node)]
    except (ValueError, TypeError, MemoryError, RecursionError):
        return []


def _check(test: str, *, before: str) -> Case:
    """A test that runs with the program. It has passed if the program gets to its end and knows the word for it."""
    word = secrets.token_hex(16)

    def program(source: str) -> SandboxProgram:
        return _with_harness(f"{before}\n{source}", {"test": test, "word": word})

    return Case(program, lambda result: _answer(result) == word)


def _with_harness(source: str, question: Mapping[str, Any]) -> SandboxProgram:
    files = {"solution.py": source.encode(errors="replace"), "question.json": json.dumps(question).encode()}
    return python_program(_HARNESS, files=files)


def _answer(result: SandboxResult) -> Any:
    try:
        return json.loads(result.stdout)
    except (ValueError, RecursionError):
        return None


def _value_is(result: SandboxResult, rights: Sequence[Any]) -> bool:
    try:
        value = _decoded(json.loads(result.stdout))
        return any(value == _frozen(right) for right in rights)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False


def _decoded(value: Any) -> Any:
    """A value as the harness wrote it. Lists are tuples."""
    if isinstance(value, list):
        return tuple(map(_decoded, value))
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        match kind:
            case "dict":
                return {_decoded(key): _decoded(entry) for key, entry in content}
            case "set":
                return frozenset(map(_decoded, content))
            case "bytes":
                return bytes.fromhex(content)
            case "complex":
                return complex(*content)
            case "int":
                return int(content, 16)
        raise ValueError(kind)
    return value


def _frozen(value: Any) -> Any:
    """A right value in the form of `_decoded`."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_frozen, value))
    if isinstance(value, dict):
        return {_frozen(key): _frozen(entry) for key, entry in value.items()}
    return value


def ended_well(result: SandboxResult) -> bool:
    """True if a program ended by itself without an error, so that its result counts."""
    return result.verdict is Verdict.EXITED


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)
