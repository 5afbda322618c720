"""Program that runs in the sandbox in front of a response's code: it calls the code, and writes what came of it.

It reads `question.json`, runs `solution.py` as a module (with the names of `typing` if a function is called: solutions
in the form of LeetCode leave out their import), and writes one line of JSON to standard output: the value of
an expression, or the word of a test that has run to its end. What the code prints goes nowhere.
"""

import json
import os
import sys
import types

_LONGEST_INTEGER = 1 << 1024


def encoded(value):  # type: ignore[no-untyped-def]
    """The value in JSON's types. TypeError for what is no value of Python's own types."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if abs(value) < _LONGEST_INTEGER else {"int": hex(value)}
    if kind in (list, tuple):
        return [encoded(entry) for entry in value]
    if kind in (set, frozenset):
        return {"set": [encoded(entry) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(entry)] for key, entry in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a value of type {kind.__name__}, expected one of Python's own types")


def main() -> None:
    """Answer the question."""
    with open("question.json") as file:  # noqa: PTH123
        question = json.load(file)
    os.remove("question.json")  # noqa: PTH107
    with open("solution.py", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        code = compile(file.read(), "solution.py", "exec")
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = sys.modules["solution"] = types.ModuleType("solution")
    names = vars(module)
    if "call" in question:
        exec("from typing import *", names)
    exec(code, names)
    if "test" in question:
        exec(compile(question["test"], "test.py", "exec"), names)
        answer = question["word"]
    elif "call" in question:
        name = question["call"]
        function = getattr(names["Solution"](), name) if name not in names and "Solution" in names else names[name]
        answer = encoded(function(*question["arguments"]))
    else:
        answer = encoded(eval(question["expression"], names))
    os.write(output, json.dumps(answer).encode())


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
