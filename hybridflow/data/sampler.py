"""The order of prompts: random, without end, and resumable at any point."""

from __future__ import annotations

import base64
import random
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine3d.errors import UserError
from hybridflow.data.files.config import DifficultyConfig, WeightFrom

_PARTS = 10**12
"""Weights are counted in so many parts of the largest: whole numbers make the same choices wherever a run goes on. A
source of one prompt has its share beside one of billions."""


@dataclass(frozen=True)
class SourceOrder:
    """The prompts of one source.

    Args:
        label: name of the source.
        begin, end: the range of their indices.
        weight: share of the draws from a step on; without any it is the number of prompts.
    """

    label: str
    begin: int
    end: int
    weight: tuple[WeightFrom, ...] = ()

    def weight_at(self, step: int) -> float:
        """The weight in a step, from 1."""
        if not self.weight:
            return self.end - self.begin
        return next(each.weight for each in reversed(self.weight) if each.step <= step)


@dataclass(frozen=True)
class PromptOrder:
    """How prompts are drawn.

    Args:
        count: of prompts.
        seed: of their order.
        sources: that they are of; all are of one if empty.
        prompts_per_step: by which weights know the step of a draw.
        difficulty: which prompts are drawn again; all if None.
    """

    count: int
    seed: int
    sources: tuple[SourceOrder, ...] = ()
    prompts_per_step: int = 1
    difficulty: DifficultyConfig | None = None

    def sampler(self) -> PromptSampler:
        """A sampler at the beginning."""
        return PromptSampler(self.count, self.seed, self)


class PromptSampler:
    """Draws indices of `count` prompts; every epoch is a permutation of all of them, made from (seed, epoch) alone.

    A draw that crosses the end of an epoch goes on in the next, so a batch may hold a prompt twice; what identifies a
    draw is `position`, not the index. Of several sources each has epochs of its own, and the share of the draws that
    its weight says: after any number of draws it is off by less than one draw for each source.

    Args:
        count: of prompts.
        seed: of their order.
        order: of several sources, or by difficulty.
    """

    def __init__(self, count: int, seed: int, order: PromptOrder | None = None) -> None:
        if count < 1:
            raise ValueError(f"PromptSampler: {count} prompts, expected at least 1")
        self._order = order or PromptOrder(count, seed)
        several = self._order.sources
        self._sources = [
            _Source(source, f"{seed}:{source.label}" if len(several) > 1 else str(seed))
            for source in several or (SourceOrder("", 0, count),)
        ]
        self._count, self._seed, self._position = count, seed, 0
        self._rates: dict[int, float] = {}

    @property
    def position(self) -> int:
        """Prompts drawn so far, over all epochs: the identity of the next draw."""
        return self._position

    @property
    def epoch(self) -> int:
        """Passes over as many prompts as there are, from 0."""
        return self._position // self._count

    def next(self, number: int) -> list[int]:
        """The indices of the next `number` prompts.

        Raises:
            UserError: no prompt of a source has a pass rate with which it is drawn again.
        """
        return [self._draw() for _ in range(number)]

    def forwarded(self, position: int, rates: Mapping[int, float] | None = None) -> dict[str, Any]:
        """The state of a sampler of these prompts that has drawn so many, whatever this one has drawn.

        Args:
            position: how many.
            rates: pass rates that it has from the beginning; none if None.
        """
        other = self._order.sampler()
        other.measured(rates or {})
        other.next(position)
        return other.state_dict()

    def taken_back(self, state: Mapping[str, Any], position: int) -> dict[str, Any]:
        """A state of these prompts, at an earlier position if not all that was drawn is to count.

        By difficulty it is drawn again with the pass rates that are known now, not with those of then.

        Args:
            state: `state_dict` of a sampler of the same prompts in the same order.
            position: at most that of the state.
        """
        if position == state["position"]:
            return dict(state)
        return self.forwarded(position, _unpacked_rates(state["rates"]) if "rates" in state else None)

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of as many prompts, in the order of the same seed."""
        return bool(state["count"] == self._count and state["seed"] == self._seed)

    def measured(self, rates: Mapping[int, float]) -> None:
        """Remember the pass rates of prompts, by their indices, where difficulty decides what is drawn again."""
        if self._order.difficulty is not None:
            self._rates.update(rates)

    def _draw(self) -> int:
        source = self._next_source()
        self._position += 1
        skipped = 0
        while True:
            epoch, index = source.next()
            if epoch == 0 or self._draws_again(epoch, index):
                return index
            skipped += 1
            if skipped > self._most_skipped(source):
                raise UserError(f"data.files.difficulty: {self._nothing_left(source)}")

    def _most_skipped(self, source: _Source) -> float:
        """Of prompts in a row; with `keep` above 0 one is drawn sooner, but for one case in 10^21."""
        difficulty = self._order.difficulty
        by_chance = 50 / difficulty.keep if difficulty is not None and difficulty.keep else 0
        return 2 * len(source) + by_chance

    def _next_source(self) -> _Source:
        if len(self._sources) == 1:
            return self._sources[0]
        step = self._position // self._order.prompts_per_step + 1
        weights = [source.order.weight_at(step) if len(source) else 0.0 for source in self._sources]
        largest = max(weights)
        parts = [round(_PARTS * weight / largest) for weight in weights]
        for source, part in zip(self._sources, parts, strict=True):
            source.credit = source.credit + part if part else 0
        chosen = max(
            (source for source, part in zip(self._sources, parts, strict=True) if part), key=lambda each: each.credit
        )
        chosen.credit -= sum(parts)
        return chosen

    def _draws_again(self, epoch: int, index: int) -> bool:
        difficulty = self._order.difficulty
        if difficulty is None or (rate := self._rates.get(index)) is None or difficulty.low <= rate <= difficulty.high:
            return True
        return random.Random(f"{self._seed}:{epoch}:{index}").random() < difficulty.keep

    def _nothing_left(self, source: _Source) -> str:
        rates = [self._rates.get(index, 1.0) for index in range(source.order.begin, source.order.end)]
        difficulty = self._order.difficulty
        assert difficulty is not None
        named = f" of {source.order.label}" if source.order.label else ""
        return (
            f"no prompt{named} has a pass rate from {difficulty.low:g} to {difficulty.high:g}, they are {min(rates):g} "
            f"to {max(rates):g}; expected other limits, or keep above 0"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a later `load_state_dict` needs to go on exactly here: whole numbers and text."""
        state: dict[str, Any] = {"count": self._count, "seed": self._seed, "position": self._position}
        if self._order.sources or self._order.difficulty is not None:
            state |= {f"taken.{source.order.label}": source.taken for source in self._sources}
            state |= {f"credit.{source.order.label}": source.credit for source in self._sources}
        if self._order.difficulty is not None:
            state["rates"] = _packed_rates(self._rates)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises UserError if it was taken with other prompts or another seed."""
        for name, own in (("count", self._count), ("seed", self._seed)):
            if state[name] != own:
                raise UserError(
                    f"the checkpoint's prompt order has {name} {state[name]}, this run's data {own}: expected the same"
                )
        self._position = state["position"]
        for source in self._sources:
            # A checkpoint of one source, without difficulty, says no more than the position.
            source.taken = state.get(f"taken.{source.order.label}", self._position if len(self._sources) == 1 else 0)
            source.credit = state.get(f"credit.{source.order.label}", 0)
        self._rates = _unpacked_rates(state["rates"]) if "rates" in state else {}


class _Source:
    """Where the draws of a source are.

    Args:
        order: of the source.
        seed: of its permutations.
    """

    def __init__(self, order: SourceOrder, seed: str) -> None:
        self.order, self._seed = order, seed
        self.taken = 0
        """Prompts that were drawn or passed over, over all of its epochs."""
        self.credit = 0
        """By how many parts it has been drawn less often than its weight says."""
        self._permutation_of: tuple[int, array[int]] | None = None

    def __len__(self) -> int:
        return self.order.end - self.order.begin

    def next(self) -> tuple[int, int]:
        """The epoch and the index of the next prompt."""
        epoch, offset = divmod(self.taken, len(self))
        self.taken += 1
        if self._permutation_of is None or self._permutation_of[0] != epoch:
            permutation = array("I", range(self.order.begin, self.order.end))  # a list of ten million takes 400 MB
            random.Random(f"{self._seed}:{epoch}").shuffle(permutation)
            self._permutation_of = (epoch, permutation)
        return epoch, self._permutation_of[1][offset]


def _packed_rates(rates: Mapping[int, float]) -> str:
    columns = np.array(sorted(rates), dtype=np.int64), np.array([rates[each] for each in sorted(rates)], np.float64)
    return base64.b64encode(zlib.compress(b"".join(column.tobytes() for column in columns))).decode()


def _unpacked_rates(text: str) -> dict[int, float]:
    data = zlib.decompress(base64.b64decode(text))
    indices, rates = np.frombuffer(data[: len(data) // 2], np.int64), np.frombuffer(data[len(data) // 2 :], np.float64)
    return dict(zip(indices.tolist(), rates.tolist(), strict=True))
