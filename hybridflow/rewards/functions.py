"""All reward functions of a run, evaluated at the same time and in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from engine3d.errors import UserError
from hybridflow.rewards.builtin import BUILTIN_REWARDS
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.processes.handle import CallError, CallResult, RewardInputs, RewardProcess
from hybridflow.rewards.processes.pool import ProcessPool
from hybridflow.rewards.result import RewardResult, combine
from hybridflow.rewards.scoring import Scoring, Worker


class PendingRewards:
    """Rewards of a batch that threads and processes work on. Made by `RewardFunctions.submit`.

    Args:
        scorings: of the batch, one a function.
        workers: that make their calls.
        failed: called with an error of one of the calls.
        ended: called with this batch and its error once `result` has its result.
        complete: as of `RewardFunctions.submit`.
    """

    def __init__(
        self,
        scorings: Sequence[Scoring],
        workers: Sequence[Worker],
        failed: Callable[[BaseException], None],
        ended: Callable[[PendingRewards, BaseException | None], None],
        *,
        complete: bool = True,
    ) -> None:
        self._scorings, self._failed, self._ended, self._complete = scorings, failed, ended, complete
        self.errors: list[BaseException] = []
        """Errors, the cause first: of this batch, or of another that is scored at the same time."""
        self._outcome: RewardResult | BaseException | None = None
        # Daemons: at the end of the program they do not wait for their processes, which end with it.
        self._threads = [threading.Thread(target=self._run, args=(worker,), daemon=True) for worker in workers]

    def start(self) -> None:
        """Begin. Once, by `RewardFunctions.submit`."""
        for thread in self._threads:
            thread.start()

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except BaseException as error:  # raised in the caller's thread, by `result`
            self._failed(error)

    def done(self) -> bool:
        """True if `result` returns or raises without waiting."""
        return not any(thread.is_alive() for thread in self._threads)

    def result(self) -> RewardResult:
        """Wait for the rewards. A second call gives the same.

        Raises:
            UserError: a function failed whose `on_failure` is "stop", a function failed on all samples, or every
                sample is dropped; in this batch or in another that is scored at the same time. One line that names the
                reward, and the sample where known. No process is left.
            RuntimeError: `RewardFunctions.close` was called before.
        """
        if self._outcome is None:
            try:
                self._outcome = self._wait()
            except BaseException as error:
                self._outcome = error
            self._ended(self, self._outcome if isinstance(self._outcome, BaseException) else None)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _wait(self) -> RewardResult:
        self.join()
        if self.errors:
            raise self.errors[0]  # the others are of processes killed because of it
        return combine(self._scorings, complete=self._complete)

    def join(self) -> None:
        """Wait for the end of its threads."""
        for thread in self._threads:
            if thread.ident is not None:  # an interrupt may have come before it was started
                thread.join()


class RewardFunctions:
    """Evaluates all functions of a `RewardConfig` at the same time, a user's function in processes of its own.

    Batches may be scored at the same time, in threads of their own: their calls take turns with a function's workers.
    After an error every process is gone, the other batches in flight fail with it, and the next call starts new
    processes. Use as a context manager, or `close`.

    Args:
        config: of the functions.
        fields: that the data have, by name; None if that is not known, and then nothing can be evaluated.
        output_lines: most lines of the output of each process that are kept; as many as its limits allow if None.
    """

    def __init__(
        self, config: RewardConfig, fields: Sequence[str] | None = (), *, output_lines: int | None = None
    ) -> None:
        self._functions, self._fields = config.functions, fields
        self._processes = {
            function.name: ProcessPool([RewardProcess(function, fields, output_lines) for _ in range(function.workers)])
            for function in config.functions
            if not function.builtin
        }
        self._ending = threading.RLock()  # no batch begins while all end
        self._lock = threading.Lock()  # of what follows
        self._in_flight: list[PendingRewards] = []
        self._error: BaseException | None = None

    def load(self) -> None:
        """Import every function, in each of its workers.

        Raises:
            UserError: one cannot be loaded, or its arguments do not fit.
            RuntimeError: rewards are in flight.
        """
        if self._in_flight:
            raise RuntimeError("rewards: a batch is scored, or its result was not taken; expected load before that")
        try:
            for process in self._all_processes():
                process.start()
            for process in self._all_processes():
                process.load()
        except CallError as error:
            self.close()
            raise UserError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def needing_answers(self) -> list[RewardFunctionConfig]:
        """The loaded functions that cannot score a sample without a reference answer."""
        processes = {process.config.name: process for process in self._all_processes()}
        return [
            function
            for function in self._functions
            if (function.path == "arithmetic" if function.builtin else processes[function.name].needs_answers)
        ]

    def without_reward(self, name: str, answers: Sequence[Any]) -> dict[int, str]:
        """Call a loaded function, which needs no fields, with empty texts.

        Args:
            name: of the function, which is no builtin.
            answers: one for each text.

        Returns:
            The reason of each text without a number, in words that follow "it"; nothing if the call as a whole failed.
        """
        batch = RewardInputs([""] * len(answers), [""] * len(answers), answers)
        with self._processes[name].taken() as process:
            try:
                values = process.call(batch, range(len(answers)), process.config.timeout_s).values
            except CallError:
                return {}
        return {number: value for number, value in enumerate(values) if isinstance(value, str)}

    def evaluate(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        answers: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        unstripped: Sequence[str] | None = None,
        sources: Sequence[str] = (),
        complete: bool = True,
    ) -> RewardResult:
        """The rewards of B generated texts: `submit` and its `result`, with the arguments and errors of both."""
        return self.submit(
            texts, prompts, answers, fields, unstripped=unstripped, sources=sources, complete=complete
        ).result()

    def submit(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        answers: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        unstripped: Sequence[str] | None = None,
        sources: Sequence[str] = (),
        complete: bool = True,
    ) -> PendingRewards:
        """Begin with the rewards of B generated texts, given the B prompts and answers that belong to them.

        Returns at once. The work continues in the background, with the import of functions that are not loaded.

        Args:
            texts, prompts: (B,).
            answers: (B,), each what JSON may hold.
            fields: (B,) each, by name: those that the data have.
            unstripped: (B,) the texts with their special tokens, for functions that keep these; `texts` if None.
            sources: (B,) the name of each row's source, or none.
            complete: true if these are all samples of a step, of which a function must not fail on all.
        """
        fields = fields or {}
        if not len(texts) == len(prompts) == len(answers):
            raise ValueError(f"rewards: {len(texts)} texts, {len(prompts)} prompts, {len(answers)} answers")
        if set(fields) != set(self._fields or ()) or any(len(values) != len(texts) for values in fields.values()):
            raise ValueError(f"rewards: fields {list(fields)}, expected {len(texts)} values each of {self._fields}")
        batch = RewardInputs(tuple(texts), tuple(prompts), tuple(answers), fields, tuple(sources))
        kept = batch if unstripped is None else replace(batch, texts=tuple(unstripped))
        scorings = [
            Scoring(function, kept if function.special_tokens == "keep" else batch) for function in self._functions
        ]
        workers = []
        for scoring in scorings:
            function = scoring.config
            if function.builtin:
                values = BUILTIN_REWARDS[function.path](scoring.batch.texts, answers=batch.answers)
                scoring.record(range(len(values)), CallResult(values))
            else:
                pool = self._processes[function.name]
                workers += [Worker(pool, scoring) for _ in range(scoring.most_workers)]
        pending = PendingRewards(scorings, workers, self._fail, self._ended, complete=complete)
        with self._ending:
            with self._lock:
                self._in_flight.append(pending)
                pending.errors += [self._error] if self._error is not None else []
            pending.start()
        return pending

    def close(self) -> None:
        """Kill every process, whatever it is doing. May be called twice."""
        self._end(RuntimeError("rewards: closed before their result was taken"))

    def _fail(self, error: BaseException) -> None:
        """End all batches in flight with an error."""
        with self._lock:
            self._error = self._error or error
            for pending in self._in_flight:
                pending.errors.append(error)
        for pool in self._processes.values():
            pool.kill()

    def _ended(self, pending: PendingRewards, error: BaseException | None) -> None:
        with self._ending:
            if (
                pending not in self._in_flight
            ):  # it was ended with another, and the batches in flight now are later ones
                return
            if error is not None:
                self._end(error)
                return
            with self._lock:
                self._in_flight.remove(pending)

    def _end(self, error: BaseException) -> None:
        with self._ending:
            self._fail(error)
            for pending in self._in_flight:
                pending.join()
            with self._lock:
                self._in_flight.clear()
                self._error = None
            for pool in self._processes.values():
                pool.close()

    def _all_processes(self) -> list[RewardProcess]:
        return [process for pool in self._processes.values() for process in pool.processes]

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
