"""The reward `http`: samples are posted to a URL as JSON, and a server scores them.

    reward:
      functions: [{name: quality, path: http, timeout_s: 300, arguments: {url: "http://10.0.0.7:8000/score"}}]

It is sent {"responses": [...], "prompts": [...], "answers": [...]}, lists of the same length, and answers with as many
numbers, [1.0, 0.0], or with {"rewards": [...], "figures": {...}, "counts": {...}}. In place of a number, {"error":
"why"} is a failure of that sample. What is no such answer is a failure of the samples, never a reward.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from engine3d.errors import shortened
from hybridflow.rewards.function_process import OPTIONAL_COLUMNS, RewardError, check_figures
from hybridflow.rewards.remote.endpoint import Deadline, Endpoint, EndpointSettings, RequestError, Tally, settings_of

_TEXTS = "responses"
_MOST_BYTES, _BYTES_PER_SAMPLE = 1 << 16, 1 << 13


class HttpSettings(EndpointSettings):
    """Arguments of the reward `http`."""

    send: tuple[str, ...] = OPTIONAL_COLUMNS
    """What is posted beside the responses: prompts, answers, and fields of the data."""
    samples_per_request: int = Field(default=64, ge=1)
    """Most samples of a request."""

    @field_validator("send")
    @classmethod
    def _check_send(cls, send: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(send)) != len(send) or _TEXTS in send:
            raise ValueError(f"{list(send)}, expected each name once, and not {_TEXTS!r}, which are always sent")
        return send


class NoRewardError(Exception):
    """Why a sample has no reward."""


class HttpReward:
    """Posts samples to a server, several requests at a time. Arguments as of `HttpSettings`; ValueError for others."""

    def __init__(self, **arguments: Any) -> None:
        self._settings = settings_of(HttpSettings, arguments)
        self._endpoint = Endpoint(self._settings)
        self._loop = asyncio.Runner()

    def prepare(self, fields: Sequence[str] | None) -> Sequence[str]:
        """The columns to be sent. Raises ValueError for a name that the data have not, and where there is no key."""
        known = (*OPTIONAL_COLUMNS, *(fields or ()))
        if fields is not None and (unknown := [name for name in self._settings.send if name not in known]):
            raise ValueError(f"send names {unknown[0]!r}, expected of {', '.join(known)}")
        self._endpoint.read_key()
        return self._settings.send

    @property
    def needs_answers(self) -> bool:
        """True where answers are sent because the recipe names them."""
        return "answers" in self._settings.send and "send" in self._settings.model_fields_set

    def __call__(self, generated_texts: Sequence[str], *, timeout_s: float, **columns: Sequence[Any]) -> dict[str, Any]:
        """Score so many texts within so many seconds; those without an answer by then fail."""
        return self._loop.run(self._score(generated_texts, columns, Deadline(timeout_s)))

    async def _score(
        self, texts: Sequence[str], columns: Mapping[str, Sequence[Any]], deadline: Deadline
    ) -> dict[str, Any]:
        size = self._settings.samples_per_request
        parts = [slice(first, first + size) for first in range(0, len(texts), size)]
        asked = [
            self._ask({_TEXTS: texts[part]} | {name: column[part] for name, column in columns.items()}, deadline)
            for part in parts
        ]
        found = await asyncio.gather(*asked)
        return {
            "rewards": [value for each in found for value in each["rewards"]],
            **{kind: _joined([each[kind] for each in found], parts, len(texts)) for kind in ("figures", "counts")},
        }

    async def _ask(self, content: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """What the server gives for a request's samples, as a function would return it."""
        count, tally, started = len(content[_TEXTS]), Tally(), None
        try:
            async with asyncio.timeout(deadline.left_s), self._endpoint.places:
                started = time.monotonic()
                answer = await self._endpoint.post(content, tally, _MOST_BYTES + count * _BYTES_PER_SAMPLE)
            found = _checked(answer, count)
        except TimeoutError:
            found = _failed(f"{self._endpoint.url} did not answer within {deadline}", count)
        except RequestError as error:
            found = _failed(str(error), count)
        except RewardError as error:
            found = _failed(f"{self._endpoint.url} {error}", count)
        else:
            found["figures"]["latency_s"] = [time.monotonic() - started] * count
        # Of the request, and so not of each of its samples.
        none = [None] * (count - 1)
        found["counts"] |= {"requests": [tally.requests, *none], "retries": [tally.retries, *none]}
        return found


def _failed(reason: str, count: int) -> dict[str, Any]:
    return {"rewards": [NoRewardError(reason)] * count, "figures": {}, "counts": {}}


def _checked(answer: Any, count: int) -> dict[str, Any]:
    """What a server answered for so many samples. RewardError, to follow its URL, for what is no such thing."""
    if isinstance(answer, list):
        answer = {"rewards": answer}
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise RewardError(f"answered {shortened(repr(answer))}, expected a list of {count} numbers, or 'rewards'")
    if len(rewards) != count:
        raise RewardError(f"answered {len(rewards)} rewards for {count} responses, expected one for each")
    found = {kind: check_figures(kind, answer.get(kind, {}), count) for kind in ("figures", "counts")}
    return {"rewards": [_reward(each) for each in rewards], **found}


def _reward(given: Any) -> float | NoRewardError:
    if isinstance(given, dict) and isinstance(given.get("error"), str):
        return NoRewardError(f"the server says: {given['error']}")
    if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < math.inf:
        return given
    return NoRewardError(f"the server answered {shortened(repr(given))}, expected a finite number")


def _joined(
    found: Sequence[Mapping[str, Sequence[float | None]]], parts: Sequence[slice], count: int
) -> dict[str, list[float | None]]:
    """Figures of parts of so many samples, as of all of them."""
    columns: dict[str, list[float | None]] = {}
    for figures, part in zip(found, parts, strict=True):
        for name, column in figures.items():
            columns.setdefault(name, [None] * count)[part] = column
    return columns
