"""A user's reward function in a process of its own, which can be killed when the function hangs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.rewards import function_process, supervisor
from hybridflow.rewards.compute_score import SOURCE
from hybridflow.rewards.config import RewardFunctionConfig

_KILL_TIMEOUT_S = 10.0
_LAST_WORD_S = 2.0
_ANSWER_BYTES, _BYTES_PER_SAMPLE = 1 << 16, 1 << 13
"""Most of an answer, and what each of its samples may add."""
_LONGEST_REASON = 1000
# What a program needs to find its interpreter, libraries, language and temporary files. The marker is by what the
# processes of a run are found.
_ENVIRONMENT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|CUDA_VISIBLE_DEVICES|HYBRIDFLOW_RAY"
)


@dataclass(frozen=True)
class RewardInputs:
    """B generated texts with what belongs to each of them: its prompt, its answer, and fields of its example."""

    texts: Sequence[str]
    prompts: Sequence[str]
    answers: Sequence[Any]
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sources: Sequence[str] = ()
    """The name of each row's source; empty where data have none."""

    def column(self, name: str) -> Sequence[Any]:
        """What a function gets that has a parameter of this name."""
        if name == SOURCE:
            return self.sources or [""] * len(self.texts)
        return {"prompts": self.prompts, "answers": self.answers}.get(name) or self.fields.get(name, ())


@dataclass(frozen=True)
class Answer:
    """What a call gave for each of its n samples.

    Args:
        values: (n,) the function's number, or why there is none, in words that name the sample and follow "it".
        figures, counts: (n,) each, by name: what the function gives beside, None for a sample that has none.
    """

    values: Sequence[float | str]
    figures: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
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
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lifeline: socket.socket | None = None
        self._calls = 0
        self.needs_answers = False
        """True, once loaded, where the function cannot score a sample without a reference answer."""
        self._loaded = False
        self._deadline = self._limit_s = 0.0
        self._where = ""

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._connection is not None

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
            if self._connection is not None:
                return
            self._connection, connection = socket.socketpair()
            self._lifeline, lifeline = socket.socketpair()
            passed = [connection.fileno(), lifeline.fileno()]
            arguments = [*map(str, [*passed, os.getpid()]), json.dumps(self._supervision)]
            with connection, lifeline:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", supervisor.__file__, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward function prints must not mix with the output of the run
                    pass_fds=passed,
                    start_new_session=True,
                    env=_environment(self.config.environment),
                )
        self._loaded = False
        self._where = " from its import"
        here = str(Path.cwd())
        # What lies in the working directory stands in for no module but the one that the function is named to be in.
        sys_path = [*(entry for entry in sys.path if entry not in ("", here)), here]
        self._send(
            {
                "path": self.config.imported_from,
                "arguments": self.config.arguments,
                "sys_path": sys_path,
                "directory": here,
                "fields": self._fields,
            },
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
                raise self._failure(_in_words(reply["error"]))
            self._columns = self._offered_columns(reply.get("columns"))
            self.needs_answers = reply.get("needs_answers") is True
            self._loaded = True

    def _offered_columns(self, names: Any) -> list[str]:
        """What the function asks for, as its process says. Raises CallError for names that it was not offered."""
        offered = {*function_process.OPTIONAL_COLUMNS, SOURCE, *(self._fields or ())}
        if not isinstance(names, list) or not all(isinstance(name, str) and name in offered for name in names):
            raise self._failure("asked for columns that it was not offered")
        return names

    def call(self, batch: RewardInputs, samples: range, timeout_s: float) -> Answer:
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
            reason = _in_words(reply["error"])
            memory = f"; limits.memory_gb is {self.config.limits.memory_gb:g}" if "MemoryError" in reason else ""
            raise CallError(self.config, reason + memory)
        values = reply.get("values")
        if not isinstance(values, list) or len(values) != len(samples):
            raise self._failure(f"gave no answer with {len(samples)} values")
        try:
            given = {
                kind: function_process.check_figures(kind, reply.get(kind, {}), len(samples))
                for kind in ("figures", "counts")
            }
        except function_process.RewardError as error:
            raise self._failure(f"answered what it may not: it {_in_words(error)}") from None
        return Answer([_checked(value, sample) for value, sample in zip(values, samples, strict=True)], **given)

    def pause(self, seconds: float) -> None:
        """Wait between two calls. Raises KilledError where `kill` is called meanwhile."""
        if self._killed.wait(seconds):
            raise KilledError

    def kill(self) -> None:
        """Kill the process and whatever it started, from any thread, and let none start until `close`."""
        with self._lock:
            self._killed.set()
            self._cut_lifeline()
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the other end is gone
                    self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer

    def close(self) -> None:
        """Kill the process and whatever it started, and wait for its end. May be called twice, and it can start again.

        No other thread may use the process any more.
        """
        self._end()
        self._killed.clear()

    def _end(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._cut_lifeline()
        if self._process is not None:
            self._process.wait(timeout=_KILL_TIMEOUT_S)
            self._process = None

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def _send(self, message: dict[str, Any], timeout_s: float) -> None:
        assert self._connection is not None
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = timeout_s
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(function_process.encode_message(message))
        except TimeoutError:
            raise self._failure(f"did not take its input within {timeout_s:g} s and was killed") from None
        except OSError:
            raise self._death() from None

    def _receive(self, task: str, most_bytes: int) -> dict[str, Any]:
        assert self._connection is not None
        try:
            reply = function_process.read_message(self._connection, self._deadline, most_bytes)
            if reply is not None and not isinstance(reply, dict):
                raise ValueError(f"a message that is a {type(reply).__name__}")
        except ValueError as error:
            raise self._failure(f"answered with {_in_words(str(error))}") from None
        except TimeoutError:
            raise self._failure(f"did not {task} within {round(self._limit_s, 3):g} s and was killed") from None
        except OSError:
            reply = None
        if reply is None:
            raise self._death()
        return reply

    def _death(self) -> CallError | KilledError:
        assert self._process is not None
        process = self._process
        reason = self._last_word()
        self._end()
        if reason:
            return self._failure(f"{reason} and was killed instead of returning{self._where}")
        code = process.returncode
        if code == function_process.LOST_CONNECTION:
            return self._failure(
                f"closed a file descriptor that it had not opened, the one for its answers, instead of "
                f"returning{self._where}; expected it to close what it has opened"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return self._failure(f"{how} instead of returning{self._where}")

    def _last_word(self) -> str:
        """Why the supervisor has killed the process, if it has; it ends then."""
        if self._lifeline is None:
            return ""
        self._lifeline.settimeout(_LAST_WORD_S)
        with contextlib.suppress(OSError):
            return _in_words(self._lifeline.recv(_LONGEST_REASON).decode(errors="replace"))
        return ""

    def _failure(self, reason: str) -> CallError | KilledError:
        self._end()
        return KilledError() if self._killed.is_set() else CallError(self.config, reason)


def _environment(names: Sequence[str]) -> dict[str, str]:
    """What a function sees of this process's environment, beside the variables of these names."""
    return {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name) or name in names}


def _checked(value: Any, sample: int) -> float | str:
    """What a process answers for a sample, if it is a finite float32 or words; other words if it is neither."""
    if isinstance(value, str):
        return _in_words(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            struct.pack("!f", number := float(value))
            if math.isfinite(number):
                return number
    return f"answered {str(value)[:60]} for sample {sample}, expected a finite number within the range of float32"


def _in_words(reason: object) -> str:
    """What a process says, as one line of bounded length without control characters."""
    text = " ".join(str(reason).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
