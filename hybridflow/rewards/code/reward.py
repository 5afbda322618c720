"""The reward `code`: a response is a program, which is run against the test cases of its answer.

    reward:
      functions: [{name: code, path: code, timeout_s: 300, on_failure: drop, arguments: {extract: fenced}}]

A sample has no reward where the sandbox fails, where its answer holds no test cases, and where the call's time ends
before its tests. What its program does is never a reason for that.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from engine3d.errors import UserError
from engine3d.settings import LONGEST_S, Settings
from hybridflow.remote.endpoint import Deadline, settings_of
from hybridflow.rewards.builtin import CODE_TIMEOUT_S
from hybridflow.rewards.code.cases import Case, CasesError, cases_of, ended_well
from hybridflow.rewards.processes.function_process import NoRewardError
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.opening import open_sandbox
from hybridflow.sandbox.program import Sandbox, SandboxError, Verdict

_CODE = "{code}"
_FENCE = re.compile(r"([ \t]*)(```+|~~~+)[ \t]*([\w+-]*)[^`]*")
_PYTHON = ("python", "python3", "py")
_COUNTS: dict[Verdict, str] = {
    **{verdict: verdict.value for verdict in Verdict if verdict not in (Verdict.EXITED, Verdict.FAILED)},
    Verdict.FAILED: "crashed",
}


class CodeSettings(Settings):
    """Arguments of the reward `code`."""

    extract: Literal["fenced", "text"] = "fenced"
    """Program of a response: the last block of code between ``` that is Python or names no language ("fenced"), or its
    complete text ("text")."""
    template: str = _CODE
    """Source code around the program, which is put in place of {code}, such as "def f(x): return {code}"."""
    score: Literal["all", "share"] = "all"
    """Reward: 1 if all test cases pass, else 0 ("all"), or the share that passes ("share")."""
    most_cases: int | None = Field(default=None, ge=1)
    """Test cases of an answer that are run, the first ones. All if null."""
    sample_timeout_s: float = Field(default=CODE_TIMEOUT_S, gt=0, le=LONGEST_S)
    """Time of all programs of a sample together, in seconds. Test cases that come after it do not pass."""
    sandbox: SandboxSettings = SandboxSettings()
    """The sandbox, and limits of each program."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        if template.count(_CODE) != 1:
            raise ValueError(f"{template!r}, expected {_CODE} in it once")
        return template


@dataclass
class _Score:
    """Results of a sample's programs so far."""

    passed: int = 0
    programs: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str) -> None:
        """Count the end of a test case."""
        self.counts[name] = self.counts.get(name, 0) + 1


class Code:
    """Runs programs against test cases. Arguments as of `CodeSettings`; ValueError for others."""

    needs_answers = True
    takes_threads = True

    def __init__(self, **arguments: Any) -> None:
        self._settings = settings_of(CodeSettings, arguments)
        self._sandbox: Sandbox = open_sandbox(self._settings.sandbox)

    def _run_in_loop[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of this instance, which calls of all threads share."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="programs", daemon=True).start()
        return loop

    def prepare(self, fields: Sequence[str] | None) -> Sequence[str]:
        """Start the sandbox. Raises ValueError where programs cannot run as the settings ask."""
        del fields
        try:
            self._run_in_loop(self._sandbox.start())
        except (UserError, SandboxError) as error:
            raise ValueError(str(error)) from None
        return ("answers",)

    def __call__(self, generated_texts: Sequence[str], *, answers: Sequence[Any], timeout_s: float) -> dict[str, Any]:
        """Score texts within `timeout_s` seconds. Those whose tests have not ended by then have no reward."""
        return self._run_in_loop(self._score(generated_texts, answers, Deadline(timeout_s)))

    async def _score(self, texts: Sequence[str], answers: Sequence[Any], deadline: Deadline) -> dict[str, Any]:
        scores = [_Score() for _ in texts]
        rewards = await asyncio.gather(
            *(self._reward(*sample, deadline) for sample in zip(texts, answers, scores, strict=True))
        )
        names = ("passed", "wrong", "missing", *_COUNTS.values())
        return {
            "rewards": rewards,
            "metrics": {
                "program_s": [score.seconds / score.programs if score.programs else None for score in scores],
                "programs": [score.programs for score in scores],
            },
            "counts": {name: [score.counts.get(name, 0) for score in scores] for name in names},
        }

    async def _reward(self, text: str, answer: Any, score: _Score, deadline: Deadline) -> float | NoRewardError:
        settings = self._settings
        try:
            cases = cases_of(answer)[: settings.most_cases]
        except CasesError as error:
            return NoRewardError(f"the tests of its answer: {error}")
        code = extracted(text) if settings.extract == "fenced" else text
        if code is None:
            score.count("missing")
            return 0.0
        source = settings.template.replace(_CODE, code)
        try:
            async with asyncio.timeout(deadline.left_s):
                await self._run(source, cases, score)
        except TimeoutError:
            return NoRewardError(f"its tests had not ended within {deadline}")
        except SandboxError as error:
            return NoRewardError(str(error))
        return score.passed / len(cases) if settings.score == "share" else float(score.passed == len(cases))

    async def _run(self, source: str, cases: Sequence[Case], score: _Score) -> None:
        """Run the test cases in order. After one that does not pass the others do not matter for "all".

        Raises:
            SandboxError: the machine is at fault.
        """
        for case in cases:
            if score.seconds > self._settings.sample_timeout_s:
                score.count("timeout")
                return
            result = await self._sandbox.run(case.program(source))
            score.programs += 1
            score.seconds += result.seconds
            if not ended_well(result):
                score.count(_COUNTS[result.verdict])
            elif case.passed(result):
                score.passed += 1
                score.count("passed")
                continue
            else:
                score.count("wrong")
            if self._settings.score == "all":
                return


def extracted(text: str) -> str | None:
    """Return the last block of a text between fences that is marked as Python, without the indentation of its fence.

    None of which is: the last block without a mark, which may be output too; None if there is none.
    """
    last: dict[bool, str] = {}
    fence, indentation, language = "", 0, ""
    lines: list[str] = []
    for line in text.splitlines():
        if fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            if language in _PYTHON or not language:
                last[bool(language)] = "\n".join(lines)
            fence = ""
        elif fence:
            lines.append(line[min(indentation, len(line) - len(line.lstrip(" \t"))) :])
        elif (match := _FENCE.fullmatch(line)) is not None:
            indentation, fence, language, lines = len(match[1]), match[2], match[3].lower(), []
    return last.get(True, last.get(False))
