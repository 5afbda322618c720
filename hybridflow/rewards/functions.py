"""All reward functions of a run, evaluated at the same time and beside what their caller does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from engine3d.errors import UserError
from hybridflow.rewards.builtin import BUILTIN_REWARDS
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.process_handle import Answer, CallError, RewardInputs, RewardProcess
from hybridflow.rewards.result import RewardResult, combine
from hybridflow.rewards.scoring import Scoring, Worker


class PendingRewards:
    """Rewards that threads and processes work on. Made by `RewardFunctions.submit`; for the thread that called it."""

    def __init__(
        self, scorings: Sequence[Scoring], workers: Sequence[Worker], close: Callable[[], None], *, whole: bool = True
    ) -> None:
        self._scorings = scorings
        self._workers = workers
        self._close = close
        self._whole = whole
        self._errors: list[BaseException] = []
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
            self._errors.append(error)
            for other in self._workers:
                other.process.kill()

    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def taken(self) -> bool:
        """Whether `result` has returned or raised."""
        return self._outcome is not None

    def result(self) -> RewardResult:
        """Wait for the rewards. A second call gives the same.

        Raises:
            UserError: a function failed whose `on_failure` is "stop", a function failed on all samples, or every
                sample is dropped. One line that names the reward, and the sample where known. No process is left.
            RuntimeError: `RewardFunctions.close` was called before.
        """
        if self._outcome is None:
            try:
                self._outcome = self._wait()
            except BaseException as error:
                self._outcome = error
                self._close()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _wait(self) -> RewardResult:
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]  # the others are of processes killed because of it
        return combine(self._scorings, whole=self._whole)

    def cancel(self) -> None:
        """End the work: `result` raises unless it was called before."""
        if self._outcome is None:
            self._outcome = RuntimeError("rewards: closed before their result was asked for")
        for worker in self._workers:
            worker.process.kill()
        for thread in self._threads:
            if thread.is_alive():  # an interrupt may have come before it was started
                thread.join()


class RewardFunctions:
    """Evaluates all functions of a `RewardConfig` at the same time, a user's function in processes of its own.

    After an error every process is gone, and the next call starts anew. Use as a context manager, or `close`.
    Its methods are for one thread.

    Args:
        config: of the functions.
        fields: that the data have, by name; None if that is not known, and then nothing can be evaluated.
    """

    def __init__(self, config: RewardConfig, fields: Sequence[str] | None = ()) -> None:
        self._functions, self._fields = config.functions, fields
        self._processes = {
            function.name: [RewardProcess(function, fields) for _ in range(function.workers)]
            for function in config.functions
            if not function.builtin
        }
        self._pending: PendingRewards | None = None

    def load(self) -> None:
        """Import every function, in each of its workers.

        Raises:
            UserError: one cannot be loaded, or its arguments do not fit.
            RuntimeError: rewards are under way.
        """
        self._check_idle()
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

    def evaluate(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        answers: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        whole: bool = True,
    ) -> RewardResult:
        """The rewards of B generated texts: `submit` and its `result`, with the arguments and errors of both."""
        return self.submit(texts, prompts, answers, fields, whole=whole).result()

    def submit(
        self,
        texts: Sequence[str],
        prompts: Sequence[str],
        answers: Sequence[Any],
        fields: Mapping[str, Sequence[Any]] | None = None,
        *,
        whole: bool = True,
    ) -> PendingRewards:
        """Begin with the rewards of B generated texts, given the B prompts and answers that belong to them.

        Returns at once; the work goes on whatever the caller does, with the import of functions that are not loaded.

        Args:
            texts, prompts: (B,).
            answers: (B,), each what JSON may hold.
            fields: (B,) each, by name: those that the data have.
            whole: whether these are all of a step, of which a function must not fail on all.

        Raises:
            RuntimeError: the result of an earlier submit has not been taken. The processes are for one batch at a time.
        """
        fields = fields or {}
        if not len(texts) == len(prompts) == len(answers):
            raise ValueError(f"rewards: {len(texts)} texts, {len(prompts)} prompts, {len(answers)} answers")
        if set(fields) != set(self._fields or ()) or any(len(values) != len(texts) for values in fields.values()):
            raise ValueError(f"rewards: fields {list(fields)}, expected {len(texts)} values each of {self._fields}")
        self._check_idle()
        batch = RewardInputs(tuple(texts), tuple(prompts), tuple(answers), fields)
        scorings = [Scoring(function, batch) for function in self._functions]
        workers = []
        for scoring in scorings:
            function = scoring.config
            if function.builtin:
                values = BUILTIN_REWARDS[function.path](batch.texts, answers=batch.answers)
                scoring.record(range(len(values)), Answer(values))
            else:
                workers += [Worker(process, scoring) for process in self._processes[function.name]]
        self._pending = PendingRewards(scorings, workers, self.close, whole=whole)
        self._pending.start()
        return self._pending

    def close(self) -> None:
        """Kill every process, whatever it is doing. May be called twice."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        for process in self._all_processes():
            process.kill()
        for process in self._all_processes():
            process.close()

    def _check_idle(self) -> None:
        if self._pending is not None and not self._pending.taken:
            raise RuntimeError("rewards: the result of the batch before was not taken; expected one batch at a time")

    def _all_processes(self) -> list[RewardProcess]:
        return [process for processes in self._processes.values() for process in processes]

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
