"""The rewards of a batch from all configured functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from engine3d.errors import UserError
from hybridflow.rewards.builtin import BUILTIN_REWARDS
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.process import RewardProcess


@dataclass(frozen=True)
class RewardResult:
    """The rewards of B samples."""

    total: Tensor
    """(B,) float32: the weighted sum over the functions."""
    by_name: Mapping[str, Tensor]
    """(B,) float32 a function, unweighted."""


class RewardFunctions:
    """Evaluates all functions of a `RewardConfig` at the same time, a user's function in a process of its own.

    After an error every process is gone, and the next call starts anew. Use as a context manager, or `close`.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._functions = config.functions
        self._processes = {f.name: RewardProcess(f) for f in config.functions if not f.builtin}

    def load(self) -> None:
        """Import every function. Raises UserError for one that cannot be loaded or whose arguments do not fit."""
        try:
            for process in self._processes.values():
                process.start()
            for process in self._processes.values():
                process.load()
        except BaseException:
            self.close()
            raise

    def evaluate(self, texts: Sequence[str], prompts: Sequence[str], answers: Sequence[str]) -> RewardResult:
        """The rewards of B generated texts, given the B prompts and answers that belong to them.

        Raises UserError, in one line that names the reward and where known the sample, for a function that raises,
        hangs or does not return one finite number a text.
        """
        if not len(texts) == len(prompts) == len(answers):
            raise ValueError(f"rewards: {len(texts)} texts, {len(prompts)} prompts, {len(answers)} answers")
        self.load()
        try:
            for process in self._processes.values():
                process.submit(texts, prompts, answers)
            by_name = {function.name: self._collect(function, texts, answers) for function in self._functions}
        except BaseException:
            self.close()
            raise
        total = torch.zeros(len(texts))
        for function in self._functions:
            total += function.weight * by_name[function.name]
        return RewardResult(total, by_name)

    def _collect(self, function: RewardFunctionConfig, texts: Sequence[str], answers: Sequence[str]) -> Tensor:
        if function.builtin:
            values = BUILTIN_REWARDS[function.path](texts, answers=answers)
        else:
            values = self._processes[function.name].collect()
        rewards = torch.tensor(values, dtype=torch.float32)
        bad = (~rewards.isfinite()).nonzero()
        if len(bad):
            sample = int(bad[0])
            raise UserError(
                f"reward {function.name!r} ({function.path}) returned {values[sample]} for sample {sample}, "
                "expected a number within the range of float32"
            )
        return rewards

    def close(self) -> None:
        """Kill every process. May be called twice."""
        for process in self._processes.values():
            process.close()

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
