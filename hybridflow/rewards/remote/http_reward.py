"""The reward `http`: samples are posted to a URL as JSON, and a server scores them.

    reward:
      functions: [{name: quality, path: http, timeout_s: 300, arguments: {url: "http://10.0.0.7:8000/score"}}]

It is sent {"responses": [...], "prompts": [...], "answers": [...]}, lists of the same length, and answers with as many
numbers, [1.0, 0.0], or with {"rewards": [...], "metrics": {...}, "counts": {...}}. In place of a number, {"error":
"why"} is a failure of that sample. Any other answer is a failure of the samples, never a reward.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from engine3d.errors import shortened
from hybridflow.remote.endpoint import Deadline, Endpoint, EndpointSettings, RequestCounts, RequestError, settings_of
from hybridflow.rewards.processes.function_process import OPTIONAL_COLUMNS, NoRewardError, RewardError, check_metrics

_TEXTS = "responses"
_MOST_BYTES, _BYTES_PER_SAMPLE = 1 << 16, 1 << 13


class HttpSettings(EndpointSettings):
    """Arguments of the reward `http`."""

    send: tuple[str, ...] = OPTIONAL_COLUMNS
    """Columns posted with the responses: prompts, answers, and fields of the data."""
    samples_per_request: int = Field(default=64, ge=1)
    """Most samples of a request."""

    @field_validator("send")
    @classmethod
    def _check_send(cls, send: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(send)) != len(send) or _TEXTS in send:
            raise ValueError(f"{list(send)}, expected each name once, and not {_TEXTS!r}, which are always sent")
        return send


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
        """Score texts within `timeout_s` seconds. Those without an answer by then fail."""
        return self._loop.run(self._score(generated_texts, columns, Deadline(timeout_s)))

    async def _score(
        self, texts: Sequence[str], columns: Mapping[str, Sequence[Any]], deadline: Deadline
    ) -> dict[str, Any]:
        size = self._settings.samples_per_request
        batches = [slice(first, first + size) for first in range(0, len(texts), size)]
        requests = [
            self._ask({_TEXTS: texts[batch]} | {name: column[batch] for name, column in columns.items()}, deadline)
            for batch in batches
        ]
        results = await asyncio.gather(*requests)
        return {
            "rewards": [value for result in results for value in result["rewards"]],
            **{
                kind: _joined([result[kind] for result in results], batches, len(texts))
                for kind in ("metrics", "counts")
            },
        }

    async def _ask(self, content: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Post a request's samples. Returns what a function would return for them."""
        count, tally, started = len(content[_TEXTS]), RequestCounts(), None
        try:
            async with asyncio.timeout(deadline.left_s), self._endpoint.slots:
                started = time.monotonic()
                answer = await self._endpoint.post(content, tally, _MOST_BYTES + count * _BYTES_PER_SAMPLE)
            result = _checked(answer, count)
        except TimeoutError:
            result = _failed(f"{self._endpoint.url} did not answer within {deadline}", count)
        except RequestError as error:
            result = _failed(str(error), count)
        except RewardError as error:
            result = _failed(f"{self._endpoint.url} {error}", count)
        else:
            result["metrics"]["latency_s"] = [time.monotonic() - started] * count
        # They belong to the request, not to each of its samples.
        none = [None] * (count - 1)
        result["counts"] |= {"requests": [tally.requests, *none], "retries": [tally.retries, *none]}
        return result


def _failed(reason: str, count: int) -> dict[str, Any]:
    return {"rewards": [NoRewardError(reason)] * count, "metrics": {}, "counts": {}}


def _checked(answer: Any, count: int) -> dict[str, Any]:
    """Check a server's answer for `count` samples. Raises RewardError, to follow its URL, for any other."""
    if isinstance(answer, list):
        answer = {"rewards": answer}
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise RewardError(f"answered {shortened(repr(answer))}, expected a list of {count} numbers, or 'rewards'")
    if len(rewards) != count:
        raise RewardError(f"answered {len(rewards)} rewards for {count} responses, expected one for each")
    if "figures" in answer:
        raise RewardError("answered 'figures', expected them as 'metrics'")
    extras = {kind: check_metrics(kind, answer.get(kind, {}), count) for kind in ("metrics", "counts")}
    return {"rewards": [_reward(reward) for reward in rewards], **extras}


def _reward(given: Any) -> float | NoRewardError:
    if isinstance(given, dict) and isinstance(given.get("error"), str):
        return NoRewardError(f"the server says: {given['error']}")
    if isinstance(given, int | float) and not isinstance(given, bool) and abs(given) < math.inf:
        return given
    return NoRewardError(f"the server answered {shortened(repr(given))}, expected a finite number")


def _joined(
    columns_of: Sequence[Mapping[str, Sequence[float | None]]], batches: Sequence[slice], count: int
) -> dict[str, list[float | None]]:
    """Columns of all `count` samples, from those of each batch."""
    columns: dict[str, list[float | None]] = {}
    for by_name, batch in zip(columns_of, batches, strict=True):
        for name, column in by_name.items():
            columns.setdefault(name, [None] * count)[batch] = column
    return columns
