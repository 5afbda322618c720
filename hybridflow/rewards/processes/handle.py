"""A user's reward function in a process of its own, which can be killed when the function hangs."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.rewards.compute_score import SOURCE
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.rewards.processes import function_process
from hybridflow.rewards.processes.supervised_process import SupervisedProcess, import_setup, in_words

_ANSWER_BYTES, _BYTES_PER_SAMPLE = 1 << 16, 1 << 13
"""Largest size of an answer, and of each of its samples on top of it."""


@dataclass(frozen=True)
class RewardInputs:
    """B generated texts, each with its prompt, its answer, and fields of its example."""

    texts: Sequence[str]
    prompts: Sequence[str]
    answers: Sequence[Any]
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sources: Sequence[str] = ()
    """The name of each row's source; empty where data have none."""

    def column(self, name: str) -> Sequence[Any]:
        """Values that a function's parameter of this name gets."""
        if name == SOURCE:
            return self.sources or [""] * len(self.texts)
        return {"prompts": self.prompts, "answers": self.answers}.get(name) or self.fields.get(name, ())


@dataclass(frozen=True)
class CallResult:
    """Result of a call on n samples.

    Args:
        values: (n,) the function's number, or the reason for none, in words that name the sample and follow "it".
        metrics, counts: (n,) each, by name: further values that the function gives, None for a sample without one.
    """

    values: Sequence[float | str]
    metrics: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    counts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


class CallError(Exception):
    """A function could not be loaded, or a call gave no values. The message is one line, which names the reward."""

    def __init__(self, function: RewardFunctionConfig, reason: str) -> None:
        super().__init__(f"reward {function.name!r} ({function.path}) {reason}")
        self.reason = reason
        """The message without the name, to follow "it"."""


class KilledError(Exception):
    """`RewardProcess.kill` has ended the call."""


class RewardProcess:
    """Runs one reward function. One thread at a time may use it; any other may `kill` it meanwhile.

    After a hang or a death no process is left, and the next `start` or `load` starts a new one; a function that raises
    or returns the wrong number of values leaves its process ready for the next call.

    Args:
        config: of the function.
        fields: that the data have, by name; None if that is not known.
        output_lines: most lines of its output that are kept; as many as its limits allow if None.
    """

    def __init__(
        self, config: RewardFunctionConfig, fields: Sequence[str] | None = (), output_lines: int | None = None
    ) -> None:
        self.config = config
        self._supervision = {**config.limits.in_bytes(), "output_lines": output_lines, "name": config.name}
        self._fields = fields
        self._columns: list[str] = []
        self._lock = threading.Lock()  # of what `kill` touches: the descriptors and the mark
        self._killed = threading.Event()
        self._process: SupervisedProcess | None = None
        self._calls = 0
        self.needs_answers = False
        """True if the loaded function cannot score a sample without a reference answer."""
        self._loaded = False
        self._deadline = self._limit_s = 0.0
        self._where = ""

    @property
    def running(self) -> bool:
        """True if a process is running."""
        return self._process is not None

    def start(self, limit_s: float | None = None) -> None:
        """Start the process and the loading of the function, without waiting for it. Nothing if it runs already.

        Args:
            limit_s: of the loading, in seconds; the function's `load_timeout_s` if None.

        Raises:
            CallError: the process died at once.
            KilledError: `kill` was called, and `close` not since.
        """
        with self._lock:
            if self._killed.is_set():
                raise KilledError
            if self._process is not None:
                return
            self._process = SupervisedProcess(self._supervision, self.config.environment)
        self._loaded = False
        self._where = " from its import"
        setup = import_setup(self.config.imported_from, self.config.arguments, str(Path.cwd()))
        self._send(
            setup | {"fields": self._fields},
            self.config.load_timeout_s if limit_s is None else limit_s,
        )

    def load(self, limit_s: float | None = None) -> None:
        """Wait until the function is loaded, starting its process if need be. Arguments and errors as of `start`.

        Raises:
            CallError: the function cannot be loaded, or not in time, or its arguments do not fit.
        """
        self.start(limit_s)
        if not self._loaded:
            reply = self._receive("finish its import", _ANSWER_BYTES)
            if "error" in reply:
                raise self._failure(in_words(reply["error"]))
            self._columns = self._offered_columns(reply.get("columns"))
            self.needs_answers = reply.get("needs_answers") is True
            self._loaded = True

    def _offered_columns(self, names: Any) -> list[str]:
        """Columns that the function's process requests. Raises CallError for names that it was not offered."""
        offered = {*function_process.OPTIONAL_COLUMNS, SOURCE, *(self._fields or ())}
        if not isinstance(names, list) or not all(isinstance(name, str) and name in offered for name in names):
            raise self._failure("requested columns that it was not offered")
        return names

    def call(self, batch: RewardInputs, samples: range, timeout_s: float) -> CallResult:
        """Call the loaded function with some of the samples of a batch.

        Raises:
            CallError: it raised, did not return one value for each sample within `timeout_s` seconds, or died.
            KilledError: `kill` was called meanwhile.
        """
        texts = batch.texts[samples.start : samples.stop]
        task = f"return the rewards of {len(samples)} samples"
        self._where = ""
        if len(samples) == 1:
            sample = f"sample {samples.start} ({texts[0][:60]!r})"
            task, self._where = f"return the reward of {sample}", f" on {sample}"
        self._calls += 1
        request = {
            "call": self._calls,
            "texts": texts,
            "columns": {name: batch.column(name)[samples.start : samples.stop] for name in self._columns},
            "first": samples.start,
            "find_sample": self.config.on_failure == "stop",
            "timeout_s": timeout_s,
        }
        self._send(request, timeout_s)
        reply = self._receive(task, _ANSWER_BYTES + _BYTES_PER_SAMPLE * len(samples))
        if reply.get("call") != self._calls:
            raise self._failure("gave an answer to a call that was not made")
        if "error" in reply:
            reason = in_words(reply["error"])
            memory = f"; limits.memory_gb is {self.config.limits.memory_gb:g}" if "MemoryError" in reason else ""
            raise CallError(self.config, reason + memory)
        values = reply.get("values")
        if not isinstance(values, list) or len(values) != len(samples):
            raise self._failure(f"gave no answer with {len(samples)} values")
        try:
            given = {
                kind: function_process.check_metrics(kind, reply.get(kind, {}), len(samples))
                for kind in ("metrics", "counts")
            }
        except function_process.RewardError as error:
            raise self._failure(f"answered what it may not: it {in_words(error)}") from None
        return CallResult([_checked(value, sample) for value, sample in zip(values, samples, strict=True)], **given)

    def pause(self, seconds: float) -> None:
        """Wait between two calls. Raises KilledError where `kill` is called meanwhile."""
        if self._killed.wait(seconds):
            raise KilledError

    def kill(self) -> None:
        """Kill the process and whatever it started, from any thread, and let none start until `close`."""
        with self._lock:
            self._killed.set()
            if self._process is not None:
                self._process.cut_lifeline()
                with contextlib.suppress(OSError):  # the other end is gone
                    self._process.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer

    def close(self) -> None:
        """Kill the process and whatever it started, and wait for its end. May be called twice, and it can start again.

        No other thread may use the process any more.
        """
        self._end()
        self._killed.clear()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _send(self, message: dict[str, Any], timeout_s: float) -> None:
        assert self._process is not None
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = timeout_s
        self._process.connection.settimeout(timeout_s)
        try:
            self._process.connection.sendall(function_process.encode_message(message))
        except TimeoutError:
            raise self._failure(f"did not take its input within {timeout_s:g} s and was killed") from None
        except OSError:
            raise self._death() from None

    def _receive(self, task: str, most_bytes: int) -> dict[str, Any]:
        assert self._process is not None
        try:
            reply = function_process.read_message(self._process.connection, self._deadline, most_bytes)
            if reply is not None and not isinstance(reply, dict):
                raise ValueError(f"a message that is a {type(reply).__name__}")
        except ValueError as error:
            raise self._failure(f"answered with {in_words(str(error))}") from None
        except TimeoutError:
            raise self._failure(f"did not {task} within {round(self._limit_s, 3):g} s and was killed") from None
        except OSError:
            reply = None
        if reply is None:
            raise self._death()
        return reply

    def _death(self) -> CallError | KilledError:
        with self._lock:
            process, self._process = self._process, None
        assert process is not None
        reason = f"{process.death()} instead of returning{self._where}"
        if process.lost_connection:
            reason += "; expected it to close what it has opened"
        return self._failure(reason)

    def _failure(self, reason: str) -> CallError | KilledError:
        self._end()
        return KilledError() if self._killed.is_set() else CallError(self.config, reason)


def _checked(value: Any, sample: int) -> float | str:
    """Check a process's value for a sample. Returns a finite float32 or words; other words for what is neither."""
    if isinstance(value, str):
        return in_words(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            struct.pack("!f", number := float(value))
            if math.isfinite(number):
                return number
    return f"answered {str(value)[:60]} for sample {sample}, expected a finite number within the range of float32"
