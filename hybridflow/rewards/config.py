"""Settings of the rewards."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from engine3d.settings import LONGEST_S, Settings
from hybridflow.rewards.builtin import (
    BUILTIN_REWARDS,
    CODE_TIMEOUT_S,
    PROVIDED_REWARDS,
    REMOTE_REWARDS,
    SAMPLE_TIMEOUT_S,
    TAGS,
)
from hybridflow.sandbox.config import SandboxSettings

MOST_WORKERS = 1024
"""Largest number of processes of all functions together, on one node."""
MOST_AT_ONCE = 16
"""Largest number of batches that functions score at a time."""
_LONGEST_WAIT_S = 60.0
FILES_OF_FUNCTIONS = (".py", ".pkl")
"""Suffixes of the files that a function's path may begin with."""

ENVIRONMENT = "environment"
"""Name and path of the reward that environments give."""

_OF_SAMPLES = ("generated_texts", "answers")
"""Parameters of provided functions that no setting gives."""
_PATIENCE = {"retries": 100, "longest_wait_s": 5.0}


@dataclass(frozen=True)
class JudgeServers:
    """Servers of the recipe's judge.

    Args:
        urls: of its servers, before `/chat/completions`.
        key_variable: the environment variable that holds their key.
        model: identity of the model.
    """

    urls: tuple[str, ...]
    key_variable: str
    model: str


def function_path(path: str) -> str:
    """The path of a function, with its file absolute: "file.py:function", or "module:function" as it is."""
    file, colon, function = path.rpartition(":")
    return f"{Path(file).absolute()}{colon}{function}" if file.endswith(FILES_OF_FUNCTIONS) else path


class RewardLimits(Settings):
    """Limits of the processes of a reward function."""

    memory_gb: float = Field(default=16.0, gt=0)
    """Memory of each process for its own data, in GB. Mapped files do not count. Beyond it the function gets a
    MemoryError."""
    processes: int = Field(default=256, ge=1)
    """Processes of a worker, itself included. If there are more, it is killed with all of them."""
    file_gb: float = Field(default=4.0, gt=0)
    """Size of each file that it writes, in GB."""
    open_files: int = Field(default=4096, ge=64)
    """Files that each process has open."""
    output_mb: float = Field(default=16.0, ge=0)
    """Printed output that is kept in the log, in MB. The rest is dropped."""

    def in_bytes(self) -> dict[str, float]:
        """The limits as `supervisor.py` reads them."""
        return {
            "memory_bytes": round(self.memory_gb * 1e9),
            "processes": self.processes,
            "file_bytes": round(self.file_gb * 1e9),
            "open_files": self.open_files,
            "output_bytes": round(self.output_mb * 1e6),
        }


class RewardFunctionConfig(Settings):
    """One reward function."""

    name: str = Field(min_length=1, max_length=200)
    """Names the reward in metrics and errors."""
    path: str
    """A function of this project ("arithmetic", "length", "math", "code", "matches", "length_limit", "repetition",
    "script", "http", "judge"), "package.module:function", "some/file.py:function", or "some/file.pkl:" for a function
    that cloudpickle has written. Modules and relative files are searched for from the working directory. In place of a
    function it may name a class, which is made with the `arguments`, and whose instance is called."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name, the same in every call: such as {extract: boxed} of "math"."""
    special_tokens: Literal["remove", "keep"] = "remove"
    """Treatment of the tokenizer's special tokens in the texts of responses: "remove" them, or "keep" them, but for
    the end-of-sequence tokens at the end, such as where tags of the answer are special tokens."""
    weight: float = 1.0
    """The reward of a sample is the weighted sum over all functions."""
    workers: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Processes that run the function in parallel, each with its own import of the module."""
    batch_size: int | None = Field(default=None, ge=1)
    """Most samples of one call; each worker's share of a step in one call if null."""
    timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_S)
    """Limit of one call, in seconds. Where `on_failure` is not "stop" and the call hangs or its process dies, its
    samples are tried again, one by one, and have as long again, all together."""
    load_timeout_s: float = Field(default=120.0, gt=0, le=LONGEST_S)
    """Limit of the import of the module, in seconds; of all that a worker makes within a step, together."""
    on_failure: Literal["stop", "value", "drop"] = "stop"
    """Treatment of a sample without a reward, since the function raises, hangs, dies or returns no finite number for
    it: "stop" the run, give the sample the `failure_value`, or "drop" it from the step. A step on all of whose samples
    the function fails stops the run in any case.
    """
    failure_value: float = 0.0
    """The unweighted reward of such a sample, for "value"."""
    retries: int = Field(default=0, ge=0, le=100)
    """Retries of samples without a reward before `on_failure` applies, for failures that may pass, such as those of a
    service. "http" and "judge" have `arguments.retries`, which retry such failures alone.
    """
    backoff_s: float = Field(default=1.0, gt=0, le=LONGEST_S)
    """Wait before the first retry, in seconds; twice as long before each further one, a minute at most, and by chance
    down to half of that."""

    environment: tuple[str, ...] = ()
    """Names of the environment variables, such as OPENAI_API_KEY, that the function sees in addition to those of every
    program (PATH, HOME, LANG and the like). It sees no others: neither keys nor tokens of the run."""
    limits: RewardLimits = RewardLimits()
    """Limits of its processes."""

    @property
    def builtin(self) -> bool:
        """True if `path` names a function that runs in the calling process, or is the reward of episodes."""
        return self.path in (*BUILTIN_REWARDS, ENVIRONMENT)

    @property
    def votes_with_special_tokens(self) -> bool:
        """True where the answers that responses vote for stand in texts with special tokens."""
        return self.path == "math" and self.special_tokens == "keep"

    @property
    def asks_recipes_judge(self) -> bool:
        """True if it queries the model of the recipe's `judge`."""
        return self.path == "judge" and self.arguments.get("url") is None

    def served_by(self, servers: JudgeServers) -> RewardFunctionConfig:
        """The function with these servers as its endpoint, if it queries the recipe's judge.

        A server that restarts is waited for, as long as `timeout_s` allows.
        """
        if not self.asks_recipes_judge:
            return self
        given = {"url": list(servers.urls), "model": "judge", "api_key_variable": servers.key_variable}
        arguments = {**_PATIENCE, "cached_as": servers.model, **self.arguments, **given}
        return self.model_copy(
            update={"arguments": arguments, "environment": (*self.environment, servers.key_variable)}
        )

    @property
    def imported_from(self) -> str:
        """Import path of the function, as "module:function" or the like."""
        return PROVIDED_REWARDS.get(self.path, self.path)

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        module, _, function = path.rpartition(":")
        written = module.endswith(".pkl") and not function
        provided = (*BUILTIN_REWARDS, *PROVIDED_REWARDS)
        if path not in provided and not written and not (module and function.isidentifier()):
            names = ", ".join(map(repr, provided))
            raise ValueError(f"{path!r} is no reward, expected 'module:function', 'file.py:function' or one of {names}")
        return function_path(path)

    @model_validator(mode="after")
    def _check(self) -> RewardFunctionConfig:
        if self.builtin and (self.workers != 1 or self.batch_size is not None):
            raise ValueError(
                f"workers {self.workers} and batch_size {self.batch_size} with {self.path!r}, which runs in the "
                "calling process; expected neither"
            )
        if self.retries and (self.builtin or self.path in REMOTE_REWARDS):
            reason = "has no failures that may pass" if self.builtin else "retries requests itself: arguments.retries"
            raise ValueError(f"retries {self.retries} with {self.path!r}, which {reason}; expected 0")
        self._check_arguments()
        if self.failure_value and self.on_failure != "value":
            raise ValueError(
                f"failure_value {self.failure_value:g} with on_failure {self.on_failure!r}, which does not use it; "
                "expected on_failure 'value', or no failure_value"
            )
        return self

    def _check_arguments(self) -> None:
        """Raises ValueError for arguments that a provided function does not take. Other functions check in their
        process."""
        if self.builtin and self.arguments:
            raise ValueError(f"arguments {self.arguments} with {self.path!r}, which takes none")
        try:
            json.dumps(self.arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments: {error}, expected what JSON has") from None
        if self.path not in PROVIDED_REWARDS:
            return
        module, _, name = self.imported_from.rpartition(":")
        function = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(function).parameters
        given: dict[str, Any] = {name: [] for name in _OF_SAMPLES if name in parameters}
        _check_names(self.path, self.arguments, parameters)
        try:
            function(**given, **self.arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments of {self.path!r}: {error}") from None
        default_s = {"math": SAMPLE_TIMEOUT_S, "code": CODE_TIMEOUT_S}.get(self.path)
        if default_s and (limit_s := self.arguments.get("sample_timeout_s", default_s)) >= self.timeout_s:
            raise ValueError(
                f"arguments.sample_timeout_s={limit_s:g} ({default_s:g} if none) with "
                f"timeout_s={self.timeout_s:g} of all samples of a call; expected less of it"
            )
        if self.path == "code":
            most = SandboxSettings.model_validate(self.arguments.get("sandbox", {})).most_processes
            if most > self.limits.processes:
                raise ValueError(
                    f"limits.processes={self.limits.processes} of a worker whose sandbox has up to {most} (at_a_time "
                    f"and limits.processes of arguments.sandbox), expected {most} or more"
                )
        key = self._endpoint.get("api_key_variable")
        if key is not None and key not in self.environment:
            raise ValueError(f"arguments.api_key_variable {key!r} is not in environment, expected environment: [{key}]")

        if self.asks_recipes_judge and (key or self.arguments.get("cached_as")):
            name = "api_key_variable" if key else "cached_as"
            raise ValueError(f"arguments.{name} without url, where the run says it itself; expected none")

    @property
    def _endpoint(self) -> Mapping[str, Any]:
        """Arguments that name a server, if there is one."""
        return (self.arguments.get("sandbox") or {}).get("remote") or self.arguments

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the servers that a function of the project asks; of a recipe's judge none, which the run starts."""
        url = self._endpoint.get("url") if self.path in ("http", "judge", "code") else None
        return (url,) if isinstance(url, str) else tuple(url or ())

    def limit_s(self, samples: int) -> float:
        """Longest time of a call on `samples` samples, in seconds, with retries and imports. See `Worker`."""
        share = -(-samples // self.workers)
        calls = -(-share // (self.batch_size or share or 1))
        return calls * (2 * (1 + self.retries) * self.timeout_s + sum(self.waits_s)) + self.load_timeout_s

    @property
    def waits_s(self) -> list[float]:
        """The longest wait before each retry, in seconds."""
        return [min(self.backoff_s * 2.0**number, _LONGEST_WAIT_S) for number in range(self.retries)]

    def token_looked_for(self, tokens: Iterable[str]) -> str | None:
        """First of these special tokens that a function of the project searches for in a text; None if there is none.

        "math" searches for its tags, "matches" for the tokens in its pattern.
        """
        looked_for = ""
        if self.path == "math" and self.arguments.get("extract") == "tag":
            looked_for = " ".join(TAGS)
        elif self.path == "matches":
            looked_for = str(self.arguments.get("pattern", "")).replace("\\", "")  # which escapes its bars
        return next((token for token in tokens if token in looked_for), None)


def _check_names(path: str, arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raises ValueError for an argument that a provided function lacks, and for one that it requires."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # which checks them itself
    names = [name for name in parameters if name not in _OF_SAMPLES]
    if unknown := next((name for name in arguments if name not in names), None):
        raise ValueError(f"arguments of {path!r}: {unknown}: no such argument, expected of {', '.join(names)}")
    required = (name for name in names if parameters[name].default is inspect.Parameter.empty)
    if missing := next((name for name in required if name not in arguments), None):
        raise ValueError(f"arguments of {path!r}: {missing} is missing and has no default")


class RewardConfig(Settings):
    """The reward functions of a run."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="arithmetic", path="arithmetic"),)
    """The functions; each item has the settings below."""

    def served_by(self, servers: JudgeServers) -> RewardConfig:
        """The functions with these servers for those that query the recipe's judge."""
        return self.model_copy(update={"functions": tuple(function.served_by(servers) for function in self.functions)})

    @property
    def batches_at_once(self) -> int:
        """Batches of a stream's samples that are scored at a time: each function has a worker for each of them.

        A slow call delays others only once every worker has one.
        """
        workers = [function.workers for function in self.functions if not function.builtin]
        return min([*workers, MOST_AT_ONCE]) if workers else 1

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        names = [function.name for function in self.functions]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"functions are named {names}, expected at least one, each name once")
        if (workers := sum(function.workers for function in self.functions)) > MOST_WORKERS:
            raise ValueError(f"functions have {workers:,} workers, expected at most {MOST_WORKERS:,} processes")
        return self
