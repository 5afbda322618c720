"""The reward `judge`: a model behind an OpenAI-compatible endpoint gives its verdict on each response, by a rubric.

    reward:
      functions:
        - name: quality
          path: judge
          timeout_s: 300
          environment: [JUDGE_API_KEY]
          arguments:
            url: https://judge.example/v1
            model: judge-1
            api_key_variable: JUDGE_API_KEY
            rubric: |
              Question: {{ prompt }}
              Response: {{ response }}
              How helpful is the response, from 1 to 10?
            score_range: [1, 10]

Without `url` the judge is the run's own: the model of `judge.path`, which SGLang serves on devices of its own.

A verdict that cannot be read is requested again, and is then a failure, never a reward. So is a server that does not
answer. Generative reward models, which write their verdict as text, are judges too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from engine3d.errors import shortened
from engine3d.settings import MOST_TOKENS, Settings
from hybridflow.remote.endpoint import Deadline, Endpoint, EndpointSettings, RequestCounts, RequestError, settings_of
from hybridflow.rewards.processes.function_process import NoRewardError
from hybridflow.rewards.remote.rubric import COLUMNS, RESPONSE, Rubric, RubricError
from hybridflow.rewards.remote.verdict import MalformedError, Scale, StructuredVerdict, WrittenVerdict
from hybridflow.rewards.remote.verdict_cache import VerdictCache

_MOST_BYTES = 1 << 24
_OURS = ("messages", "model", "temperature", "max_tokens", "response_format", "stream", "n")
_MILLION = 1e6


class Price(Settings):
    """Price of a million tokens, in any currency."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)


class JudgeSettings(EndpointSettings):
    """Arguments of the reward `judge`. `url` ends before `/chat/completions`."""

    url: str | tuple[str, ...] | None = None  # type: ignore[assignment]
    """URL of the endpoint. Several serve the same model. That of the recipe's `judge` if null."""
    model: str | None = Field(default=None, min_length=1)
    """The model's name at the endpoint; with `url`."""
    cached_as: str | None = Field(default=None, min_length=1)
    """Name that stands for the URL in the cache, where the URL does not identify the model."""
    rubric: str
    """Template of the message to the judge: see `Rubric`."""
    system: str | None = None
    """Template of a system message before it."""
    score_field: str = Field(default="score", min_length=1)
    """The field of the verdict that is the score."""
    score_range: tuple[float, float] | None = None
    """Ends of the score, which is mapped to 0 to 1."""
    choices: dict[str, float] | None = None
    """Reward of each possible verdict, in place of a range."""
    json_schema: dict[str, Any] | None = None
    """Schema of the complete verdict. One with the score alone if null."""
    pattern: str | None = None
    """A regular expression whose last match is the score, for judges that write text: their form is free."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature. The endpoint's default if null."""
    max_tokens: int | None = Field(default=1024, ge=1, le=MOST_TOKENS)
    """Longest verdict, in tokens. The endpoint's default if null."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, such as {max_completion_tokens: 1024}."""
    verdict_retries: int = Field(default=2, ge=0, le=100)
    """Retries of a verdict that cannot be read."""
    cache_entries: int = Field(default=100_000, ge=0)
    """Verdicts that are kept, by each worker and in `cache_dir`; 0 for none."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """A directory of a local disk that keeps them beyond the run."""
    price: Price | None = None
    """Per million tokens, for the count `cost`."""

    @model_validator(mode="after")
    def _check(self) -> JudgeSettings:
        if self.pattern is not None and self.json_schema is not None:
            raise ValueError("pattern and json_schema, expected one of them")
        if self.pattern is not None and "score_field" in self.model_fields_set:
            raise ValueError("pattern and score_field, which is of a JSON object; expected one of them")
        if self.cache_dir is not None and not self.cache_entries:
            raise ValueError("cache_dir with cache_entries=0, which keeps none; expected some, or no cache_dir")
        if (self.url is None) != (self.model is None):
            raise ValueError("url and model, expected both, or neither for the recipe's judge")
        if ours := sorted(set(self.body) & set(_OURS)):
            raise ValueError(f"body: has {ours[0]!r}, which is set otherwise")
        return self


@dataclass
class _Spent(RequestCounts):
    """Cost of a sample's verdict."""

    malformed: int = 0
    cache_hits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    latency_s: float | None = None
    """Seconds from the first request to the verdict."""


class Judge:
    """Asks for a verdict on each text, several at a time. Arguments as of `JudgeSettings`; ValueError for others."""

    def __init__(self, **arguments: Any) -> None:
        self._settings = settings = settings_of(JudgeSettings, arguments)
        self._templates = {"system": settings.system, "user": settings.rubric}
        self._rubrics: dict[str, Rubric] = {}
        for role, source in self._templates.items():
            if source is not None:
                try:
                    self._rubrics[role] = Rubric(source)
                except ValueError as error:
                    raise ValueError(f"{'rubric' if role == 'user' else role}: {error}") from None
        if RESPONSE not in self._names:
            raise ValueError(f"rubric: asks for no {{{{ {RESPONSE} }}}}, expected it to")
        scale = Scale(settings.score_range, settings.choices)
        self._verdict: StructuredVerdict | WrittenVerdict
        if settings.pattern is not None:
            self._verdict = WrittenVerdict(settings.pattern, scale)
        else:
            self._verdict = StructuredVerdict(settings.score_field, scale, settings.json_schema)
        self._cache = VerdictCache(
            settings.cache_entries, Path(settings.cache_dir).absolute() if settings.cache_dir is not None else None
        )
        self._endpoint = Endpoint(settings, "/chat/completions")
        self._loop = asyncio.Runner()

    @property
    def _names(self) -> set[str]:
        return {name for rubric in self._rubrics.values() for name in rubric.names}

    def prepare(self, fields: Sequence[str] | None) -> list[str]:
        """The columns that the rubric needs. Raises ValueError for a name that nothing has, and for a missing key.

        A field of the data that is named as one of `COLUMNS`, or as the response, is not what the rubric gets.
        """
        known = [*COLUMNS, RESPONSE, *(fields or ())]
        if fields is not None and (unknown := sorted(self._names - set(known))):
            raise ValueError(f"the rubric asks for {unknown[0]!r}, expected of {', '.join(known)}")
        self._endpoint.read_key()
        self._cache.open()
        return [COLUMNS.get(name, name) for name in sorted(self._names - {RESPONSE})]

    def __call__(self, generated_texts: Sequence[str], *, timeout_s: float, **columns: Sequence[Any]) -> dict[str, Any]:
        """Judge texts within `timeout_s` seconds. Those without a verdict by then fail."""
        if self._settings.url is None:
            raise ValueError("has no url, and the recipe has no judge")
        return self._loop.run(self._judge(generated_texts, columns, Deadline(timeout_s)))

    async def _judge(
        self, texts: Sequence[str], columns: Mapping[str, Sequence[Any]], deadline: Deadline
    ) -> dict[str, Any]:
        spent = [_Spent() for _ in texts]
        in_flight: dict[str, asyncio.Task[float]] = {}
        singular = {column: name for name, column in COLUMNS.items()}
        judged = []
        for row, text in enumerate(texts):
            values = {singular.get(name, name): column[row] for name, column in columns.items()}
            judged.append(self._sample(values | {RESPONSE: text}, spent[row], in_flight, deadline))
        return {"rewards": await asyncio.gather(*judged), **self._metrics(spent)}

    async def _sample(
        self, values: Mapping[str, Any], spent: _Spent, in_flight: dict[str, asyncio.Task[float]], deadline: Deadline
    ) -> float | NoRewardError:
        """Reward of a sample, from the cache or from a sample with the same question, or the reason for none."""
        try:
            question = self._question(values)
            key = hashlib.sha256(json.dumps([self._where, self._read_by, question]).encode()).hexdigest()
            if (kept := self._cache.get(key)) is not None:
                spent.cache_hits += 1
                return kept
            shares = self._settings.cache_entries > 0
            if shares and key in in_flight:
                spent.cache_hits += 1
                return await in_flight[key]
            in_flight[key] = task = asyncio.ensure_future(self._ask(question, spent, deadline))
            score = await task
        except (RubricError, RequestError) as error:
            return NoRewardError(str(error))
        self._cache.put(key, score)
        return score

    @property
    def _where(self) -> Any:
        """Identity of the endpoint in the key of a verdict, next to the model's name."""
        return self._settings.cached_as or self._settings.url

    @property
    def _read_by(self) -> list[Any]:
        """Settings, other than the question, that decide the score of a verdict."""
        settings = self._settings
        return [settings.score_field, settings.score_range, settings.choices, settings.pattern]

    def _question(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a request. Raises RubricError where a template cannot be filled in."""
        messages = [{"role": role, "content": rubric.render(values)} for role, rubric in self._rubrics.items()]
        settings = self._settings
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        given = {name: value for name, value in limits.items() if value is not None}
        return {**settings.body, "model": settings.model, **given, **self._verdict.request(), "messages": messages}

    async def _ask(self, question: Mapping[str, Any], spent: _Spent, deadline: Deadline) -> float:
        """The score of a verdict. Raises RequestError where there is none in the end."""
        try:
            async with asyncio.timeout(deadline.left_s), self._endpoint.slots:
                started = time.monotonic()
                score = await self._asked_again(question, spent)
                spent.latency_s = time.monotonic() - started
                return score
        except TimeoutError:
            raise RequestError(f"{self._endpoint.url} gave no verdict within {deadline}") from None

    async def _asked_again(self, question: Mapping[str, Any], spent: _Spent) -> float:
        again = self._settings.verdict_retries
        for number in range(again + 1):
            answer = await self._endpoint.post(dict(question), spent, _MOST_BYTES)
            try:
                return self._verdict.score(self._text(answer, spent))
            except MalformedError as error:
                spent.malformed += 1
                if number == again:
                    times = f", {number + 1} times; the last" if number else ""
                    raise RequestError(f"{self._endpoint.url} gave no verdict{times}: {error}") from None
        raise AssertionError

    def _text(self, answer: Any, spent: _Spent) -> str:
        """The text of a chat completion. Raises RequestError for what is none, MalformedError for one without."""
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            text, finished = choice["message"].get("content"), choice.get("finish_reason")
            spent.input_tokens += int(usage.get("prompt_tokens") or 0)
            spent.output_tokens += int(usage.get("completion_tokens") or 0)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError):
            shown = shortened(repr(answer), 100)
            raise RequestError(f"{self._endpoint.url} answered {shown}, expected a chat completion") from None
        if finished == "length":
            raise MalformedError(f"it was cut off after {usage.get('completion_tokens')} tokens (max_tokens)")
        if not isinstance(text, str) or not text.strip():
            raise MalformedError("it has no text")
        return text

    def _metrics(self, spent: Sequence[_Spent]) -> dict[str, Any]:
        names = ("requests", "retries", "malformed", "cache_hits", "input_tokens", "output_tokens")
        counts: dict[str, list[float]] = {name: [getattr(sample, name) for sample in spent] for name in names}
        if (price := self._settings.price) is not None:
            counts["cost"] = [
                (sample.input_tokens * price.input + sample.output_tokens * price.output) / _MILLION for sample in spent
            ]
        return {"metrics": {"latency_s": [sample.latency_s for sample in spent]}, "counts": counts}
