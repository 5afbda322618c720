"""Reference answers that reward functions need, in `check`."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from hybridflow.cli.main import main
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.planning.checks.environment import check_environment
from tests.support.resumable import DEMO

NEEDED = "def reward(generated_texts, answers): return [0.0] * len(generated_texts)"
OPTIONAL = "def reward(generated_texts, answers=None): return [0.0] * len(generated_texts)"


def checked(tmp_path: Path, answers: list[Any], function: dict[str, Any] | str, **source: Any) -> list[str]:
    """The arguments of `check` for rows with these answers."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", "answer": answer}) + "\n" for answer in answers))
    if isinstance(function, str):
        (tmp_path / "own.py").write_text(function)
        function = {"name": "own", "path": f"{tmp_path / 'own.py'}:reward"}
    files = {"train": [{"path": str(path), **source}], "cache": str(tmp_path / "cache")}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    return [
        *("check", str(DEMO), "warmup=null", f"evaluation.held_out.data.path={held_out}"),
        f"data={json.dumps({'source': 'files', 'files': files})}",
        f"reward.functions={json.dumps([function])}",
        "evaluation.eval=null",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [["2", None], ["2", float("nan")], ["2", ""], ["2", "\t"], [["2"], []]])
@pytest.mark.parametrize("function", [NEEDED, {"name": "own", "path": "arithmetic"}])
def test_a_function_that_needs_answers_is_refused_rows_without(
    tmp_path: Path, answers: list[Any], function: dict[str, Any] | str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(checked(tmp_path, answers, function)) == 2
    error = capsys.readouterr().err
    assert (
        "reward 'own' needs a reference answer, and 1 of 2 training rows have none (null, NaN, blank or empty); the "
        f"first is {tmp_path}/rows.jsonl:2; where: {{answer: {{present: true}}}} of the source drops them" in error
    )
    assert len(error.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "source"),
    [
        (OPTIONAL, {}),
        ({"name": "own", "path": "length"}, {}),
        (NEEDED, {"where": {"answer": {"present": True}}}),
        (NEEDED, {"rows": 1}),
    ],
)
def test_rows_without_answers_pass_where_none_is_needed(
    tmp_path: Path, function: dict[str, Any] | str, source: dict[str, Any]
) -> None:
    assert main(checked(tmp_path, ["2", None], function, **source)) == 0


@pytest.mark.slow
def test_a_function_that_may_fail_is_told_and_not_on_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(NEEDED)
    function = {"name": "own", "path": f"{tmp_path / 'own.py'}:reward", "on_failure": "drop"}
    assert main(checked(tmp_path, ["2", None], function)) == 0
    assert "1 of 2 training rows have none" in capsys.readouterr().out
    assert main(checked(tmp_path, ["2", "3"], function, answer=None)) == 2
    assert "2 of 2 training rows have none" in capsys.readouterr().err


@pytest.mark.slow
def test_remarks_in_place_of_answers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(checked(tmp_path, ["2", "proof", "proof", "notfound"], NEEDED)) == 0
    assert (
        "among the answers of 4 training rows are 2 'proof', 1 'notfound', which reward 'own' takes as answers like "
        'any other; where: {answer: {none_of: ["proof", "notfound"]}} of the source drops them'
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_placeholders_that_rewards_refuse_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(checked(tmp_path, ["2", "See solution", "TBD"], NEEDED)) == 0
    assert "among the answers of 3 training rows are 1 'See solution', 1 'TBD'" in capsys.readouterr().out


def test_an_evaluation_set_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = checked(tmp_path, ["2", "3"], NEEDED)
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+2=", "answer": null}\n{"prompt": "1+3=", "answer": "4"}\n')
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "evaluation.held_out: reward 'own' needs a reference answer, and 1 of 2 evaluation.held_out rows" in error
    assert f"the first is {tmp_path}/held_out.jsonl:1" in error


@pytest.mark.slow
def test_rows_without_test_cases_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = [["assert f(1) == 2"], {"inputs": ["1"], "outputs": []}, "4"]
    function = {"name": "code", "path": "code", "arguments": {"sandbox": {"isolation": "none"}}}
    assert main(checked(tmp_path, answers, function)) == 2
    assert (
        "reward 'code' needs test cases, and 2 of the first 3 training rows have none; the first is "
        f"{tmp_path}/rows.jsonl:2: 1 inputs and 0 outputs, expected as many, one at least"
    ) in capsys.readouterr().err


@pytest.mark.slow
def test_answers_that_mathematics_cannot_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = {"name": "right", "path": "math"}
    unreadable: list[Any] = [True, "We see that there is no such $n$ (why?)."]
    answers = [r"\frac{1}{2}", *unreadable, "42", ["no", "none"], r"\log 100"]
    line = f"of 2 of the first 6 training rows; the first is {tmp_path}/rows.jsonl:2: the right answer "
    assert main(checked(tmp_path, answers, function)) == 2
    assert f"reward 'right' cannot read the answers {line}" in capsys.readouterr().err
    assert main(checked(tmp_path, answers, function | {"on_failure": "drop"})) == 0
    printed = capsys.readouterr().out
    assert line in printed and "; on_failure is drop" in printed
    assert main(checked(tmp_path, unreadable, function | {"on_failure": "drop"})) == 2
    assert "of 2 of the first 2 training rows" in capsys.readouterr().err


NEEDS_LEVEL = "def reward(generated_texts, level): return [0.0] * len(generated_texts)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "reward", "code", "said"),
    [
        (
            ["2", None],
            "arithmetic",
            2,
            "reward 'environment.tools' needs a reference answer, and 1 of 2 training rows have none (null, NaN, blank "
            "or empty); the first is {}/rows.jsonl:2; where: {{answer: {{present: true}}}} of the source drops them",
        ),
        (
            ["2", None],
            NEEDED,
            0,
            "reward 'environment.tools' needs a reference answer, and 1 of 2 training rows have none (null, NaN, blank "
            "or empty); the first is {}/rows.jsonl:2; their episodes are dropped; where: ",
        ),
        (["2"], NEEDS_LEVEL, 2, "reward 'environment.tools' ({}/own.py:reward) requires an argument 'level', expected"),
        ([None], "length", 0, ""),
    ],
)
def test_the_reward_of_tools_is_looked_at_too(
    tmp_path: Path, answers: list[Any], reward: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, function = tmp_path / "rows.jsonl", reward
    question = [{"role": "user", "content": "ab"}]
    rows.write_text("".join(json.dumps({"prompt": question, "answer": answer}) + "\n" for answer in answers))
    if " " in reward:
        (tmp_path / "own.py").write_text(reward)
        function = f"{tmp_path / 'own.py'}:reward"
    files = {"train": [{"path": str(rows)}], "sft": [], "cache": str(tmp_path / "cache")}
    settings = [f"data.files={json.dumps(files)}", "data.files.chat.template=launch/recipes/data/tools.jinja"]
    recipe = DEMO.with_name("tools.yaml")
    assert main(["check", str(recipe), *settings, "warmup=null", f"environment.tools.reward={function}"]) == code
    printed = capsys.readouterr()
    assert said.format(tmp_path) in (printed.err if code else printed.out)


@pytest.mark.slow
def test_an_environment_is_checked_in_a_notebook_too() -> None:
    async def cell(name: str) -> None:
        check_environment(EnvironmentConfig(path=f"hybridflow.environments.guess:{name}"))

    asyncio.run(cell("Guess"))
    with pytest.raises(UserError, match="has no function 'Missing'"):
        asyncio.run(cell("Missing"))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["http", "judge"])
def test_a_server_that_does_not_accept_connections_is_named(
    tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and accepts nothing
        urls = [f"http://127.0.0.1:{server.getsockname()[1]}/v1" for server in (listening, bound)]
        arguments = {"url": urls} | (
            {"model": "any", "rubric": "{{ response }}", "score_range": [0, 1]} if path == "judge" else {}
        )
        function = {"name": "asked", "path": path, "arguments": arguments}
        assert main(checked(tmp_path, ["2", "3"], function)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "accepts connections" in line]
    assert [line.partition(", as seen")[0] for line in lines] == [
        f"reward 'asked': nothing accepts connections at {urls[1]} (Connection refused)"
    ]
