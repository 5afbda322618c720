"""Diagnosis of the cause where several ranks and calls report a failure: a pure function of the calls' states.

A rank that fails takes others with it: its neighbours lose their connection in the middle of a collective, calls that
were to read its result have no input, ranks of another group wait for it until their limit. `findings` goes from the
call that somebody waits for to the calls that it depends on, and ends at the one that failed first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from engine3d.errors import LOST_RANKS, EngineError, UserError
from engine3d.out_of_memory import OUT_OF_MEMORY
from engine3d.stacks import stacks_path
from hybridflow.errors.rank_failure import Failure

# A lost neighbour often reaches the others before Ray knows of it: how long to wait for the rank that was first.
GRACE_S = 3.0

_DIED = "the process died"
DIED_WITHOUT_A_WORD = f"{_DIED} without a word, as by a signal, a crash or a lack of memory"
"""Error of a rank whose process is gone."""
ENDED_FOR_MEMORY = f"{_DIED}: Ray ended it because the machine was running out of memory"
"""Error of a rank that Ray's memory monitor killed."""
INPUT_LOST = "broken pipe: the process that was to make its input died"
"""Error of a rank whose input, from a rank of another call, is lost."""

_ENGINE_DIED = "EngineError: rollout engine died"  # whatever its last words were, but for those of a lost part

# What a rank reports whose neighbour went away in the middle of a collective.
_LOST_NEIGHBOUR = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo|nccl|process ?group|tcpstore|DistBackendError"
    r"|DistNetworkError|socket (timeout|closed)|timed out waiting"
    r"|\b(is gone|did not (answer|come) within)\b",
    re.IGNORECASE,
)

_LESS_SERVING = "a smaller rollout.engine.mem_fraction_static, max_total_tokens or max_running_requests"
_LESS_TRAINING = (
    "a smaller train.micro_batch_tokens, train.recompute=full, train.optimizer.precision_aware=true, "
    "rollout.engine.memory_saver=true, more of tp, pp, cp and ep in train.layout, or more GPUs"
)


class RankError(EngineError):
    """A rank failed, died or did not answer. The message is one line with role, rank, method, cause and log."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        """What the rank reported, its stack included; None where it could not."""


class RankUserError(UserError):
    """A rank refused its input: what the user can put right, with the rank that found it."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


class Kind(IntEnum):
    """Kinds of failures, the most telling of the cause first."""

    RAISED = 0
    """The rank found it itself, such as a wrong value or a lack of GPU memory."""
    DIED = 1
    """Its process, or its engine's, is gone."""
    LOST = 2
    """It only lost a neighbour or its input."""
    SILENT = 3
    """It did not answer."""


def kind_of(failure: Failure) -> Kind:
    """Classify a failure by its line."""
    if failure.error.startswith((_DIED, _ENGINE_DIED)):
        return Kind.LOST if LOST_RANKS in failure.error else Kind.DIED
    return Kind.LOST if not failure.user_error and _LOST_NEIGHBOUR.search(failure.error) else Kind.RAISED


@dataclass(frozen=True, slots=True, eq=False)
class CallState:
    """State of a call at one time.

    Args:
        role, method: what was called.
        failures: of the ranks that failed.
        silent: the ranks that have not answered.
        inputs: the calls that make its inputs, without those that went well or whose group is gone.
        earlier: the calls whose end it waits for before its turn, in their order, without the same.
        log_dir: where the logs of its ranks are.
    """

    role: str
    method: str
    failures: tuple[Failure, ...] = ()
    silent: tuple[int, ...] = ()
    inputs: tuple[CallState, ...] = ()
    earlier: tuple[CallState, ...] = ()
    log_dir: Path | None = None

    def log_path(self, rank: int) -> Path | None:
        """Return the log file of a rank."""
        return self.log_dir / f"{self.role}-{rank}.log" if self.log_dir else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A call whose group is to end.

    Args:
        call: the call.
        error: what its group died of, for every later call of it.
    """

    call: CallState
    error: RankError | RankUserError


def diagnose(call: CallState, limit_s: float, ended: frozenset[str] = frozenset()) -> list[Diagnosis]:
    """Return the calls whose groups end, from the awaited one to the one that failed first: the cause.

    An input that has failed is the cause; so is one that has not answered, of a call that has not either. An earlier
    call, whose end a call only needs to have its turn, is the cause where it has failed; one that is slow is named, and
    continues. Another call of a group that ends already is no cause: the call that was waited for says more.

    Args:
        call: which has failures or silent ranks.
        limit_s: seconds of the wait for it.
        ended: roles whose groups end already.
    """
    diagnoses, ended = [_diagnosis(call, limit_s)], ended | {call.role}
    for needed in call.inputs:
        if needed.role not in ended and (needed.failures or (needed.silent and not call.failures)):
            return diagnoses + diagnose(needed, limit_s, ended)
    for needed in call.earlier:
        if needed.role not in ended and needed.failures:
            return diagnoses + diagnose(needed, 0.0, ended)
    return diagnoses


def most_telling(failures: Sequence[Failure]) -> Failure:
    """Return the cause among failures: what a rank raised itself, else a death, else a lost neighbour; the first in
    time.
    """
    return min(failures, key=lambda failure: (kind_of(failure), failure.time, failure.rank))


def most_telling_error(errors: Sequence[BaseException]) -> BaseException:
    """Return the same of the errors of several groups. An error without a rank's report tells least."""

    def order(error: BaseException) -> tuple[Kind, float]:
        failure: Failure | None = getattr(error, "failure", None)
        return (kind_of(failure), failure.time) if failure is not None else (Kind.SILENT, 0.0)

    return min(errors, key=order)


def error_of(failure: Failure, log_path: Path | None) -> RankError | RankUserError:
    """Make the exception for the caller."""
    log = f" (log: {log_path})" if log_path else ""
    line = f"{where(failure.role, failure.method, [failure.rank])}: {failure.error}{_advice(failure)}"
    return RankUserError(line, failure) if failure.user_error else RankError(f"{line}{log}", failure)


def where(role: str, method: str, ranks: Sequence[int]) -> str:
    """Describe ranks at a call, for errors."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{role} {which}, {method}"


def _diagnosis(call: CallState, limit_s: float) -> Diagnosis:
    """Diagnose the call itself."""
    if call.failures:
        failure = most_telling(call.failures)
        # A failed input is reported as that of the rank that was to make it, whose log is another group's.
        return Diagnosis(call, error_of(failure, call.log_path(failure.rank) if failure.role == call.role else None))
    late = where(call.role, call.method, call.silent)
    # Those before it have ended, so that the first that has not is at work.
    holder = next((earlier for earlier in call.earlier if earlier.silent), None)
    if holder is not None:
        stacks = _stacks(holder)
        at_work = where(holder.role, holder.method, holder.silent)
        error = RankError(f"{late}: no turn within {limit_s:g} s, since {at_work} has not ended{stacks}")
        return Diagnosis(call, error)
    return Diagnosis(call, RankError(f"{late}: no answer within {limit_s:g} s{_stacks(call)}"))


def _stacks(call: CallState) -> str:
    """Name the file with the stacks of the first silent rank."""
    log = call.log_path(call.silent[0])
    return f"; the stacks of its threads are in {stacks_path(log)}" if log else ""


def _advice(failure: Failure) -> str:
    """Advise how to need less memory where a GPU's was full."""
    if OUT_OF_MEMORY not in failure.error:
        return ""
    less = _LESS_SERVING if failure.role == "rollout" else _LESS_TRAINING
    return f'; see "hybridflow check RECIPE --memory"; to need less: {less}'
