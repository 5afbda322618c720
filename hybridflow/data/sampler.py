"""The order of prompts: random, without end, and resumable at any point."""

from __future__ import annotations

import base64
import json
import random
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine3d.errors import UserError
from engine3d.input_files import JsonError, parse_json
from hybridflow.data.files.config import DifficultyConfig, WeightFrom

RATES, RETURNED = "rates", "returned"
"""Texts in a sampler's state: pass rates, and returned draws. Its other values are whole numbers."""
_PARTS = 10**12
"""Units of the largest weight. Whole numbers make the same choices wherever a run is resumed. A source of one prompt
keeps its share next to one of billions."""


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
        return next(entry.weight for entry in reversed(self.weight) if entry.step <= step)


@dataclass(frozen=True)
class PromptOrder:
    """Order in which prompts are drawn.

    Args:
        count: of prompts.
        seed: of their order.
        sources: of the prompts. One source if empty.
        prompts_per_step: to find the step of a draw, for weights.
        difficulty: condition of prompts that are drawn again. All if None.
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

    A draw that crosses the end of an epoch continues in the next, so a batch may hold a prompt twice. A draw is
    identified by `position`, not by the index. Each of several sources has its own epochs, and its weight's share of
    the draws: after any number of draws it is off by less than one draw for each source.

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
        self._returned: list[tuple[int, int]] = []

    @property
    def position(self) -> int:
        """Prompts drawn so far, over all epochs: the identity of the next new draw."""
        return self._position

    @property
    def returned(self) -> list[tuple[int, int]]:
        """Identity and prompt index of the returned draws, which are the next ones."""
        return list(self._returned)

    @property
    def epoch(self) -> int:
        """Passes over all prompts, from 0."""
        return self._position // self._count

    def next(self, number: int) -> list[int]:
        """The indices of the next `number` prompts.

        Raises:
            UserError: no prompt of a source has a pass rate with which it is drawn again.
        """
        return [index for _, index in self.draw(number)]

    def draw(self, count: int) -> list[tuple[int, int]]:
        """Identity and prompt index of the next `count` draws: those that were returned, and then new ones.

        Raises:
            UserError: as `next`.
        """
        again, self._returned = self._returned[:count], self._returned[count:]
        return [*again, *((self._position, self._draw()) for _ in range(count - len(again)))]

    def forwarded(self, position: int) -> dict[str, Any]:
        """The state of a sampler of these prompts after `position` draws, whatever this one has drawn."""
        other = self._order.sampler()
        other.next(position)
        return other.state_dict()

    @staticmethod
    def with_returned(state: Mapping[str, Any], draws: Mapping[int, int]) -> dict[str, Any]:
        """A state whose next draws are `draws`, prompt indices by identity, and those that it has returned before."""
        returned = dict(unpacked_returned(state)) | dict(draws)
        return {**state, RETURNED: json.dumps(sorted(returned.items()))} if returned else dict(state)

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """True if a state belongs to as many prompts, in the order of the same seed."""
        return bool(state["count"] == self._count and state["seed"] == self._seed)

    def measured(self, rates: Mapping[int, float]) -> None:
        """Record the pass rates of prompts, by their indices, if difficulty decides which are drawn again."""
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
        """Most prompts of a source that are skipped in a row. With `keep` above 0 one is drawn sooner, but for one case
        in 10^21.
        """
        difficulty = self._order.difficulty
        by_chance = 50 / difficulty.keep if difficulty is not None and difficulty.keep else 0
        return 2 * len(source) + by_chance

    def _next_source(self) -> _Source:
        if len(self._sources) == 1:
            return self._sources[0]
        step = self._position // self._order.prompts_per_step + 1
        weights = [source.order.weight_at(step) if len(source) else 0.0 for source in self._sources]
        largest = max(weights)
        shares = [round(_PARTS * weight / largest) for weight in weights]
        for source, share in zip(self._sources, shares, strict=True):
            source.credit = source.credit + share if share else 0
        chosen = max(
            (source for source, share in zip(self._sources, shares, strict=True) if share),
            key=lambda source: source.credit,
        )
        chosen.credit -= sum(shares)
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
        """State for `load_state_dict` to continue exactly here: whole numbers and text."""
        state: dict[str, Any] = {"count": self._count, "seed": self._seed, "position": self._position}
        if self._order.sources or self._order.difficulty is not None:
            state |= {f"taken.{source.order.label}": source.taken for source in self._sources}
            state |= {f"credit.{source.order.label}": source.credit for source in self._sources}
        if self._order.difficulty is not None:
            state[RATES] = _packed_rates(self._rates)
        return self.with_returned(state, dict(self._returned))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Raises UserError if it was taken with other prompts or another seed."""
        for name, expected in (("count", self._count), ("seed", self._seed)):
            if state[name] != expected:
                raise UserError(
                    f"the checkpoint's prompt order has {name} {state[name]}, this run's data {expected}: "
                    "expected the same"
                )
        self._position = state["position"]
        for source in self._sources:
            # A checkpoint of one source, without difficulty, has the position alone.
            source.taken = state.get(f"taken.{source.order.label}", self._position if len(self._sources) == 1 else 0)
            source.credit = state.get(f"credit.{source.order.label}", 0)
        self._rates = _unpacked_rates(state[RATES]) if RATES in state else {}
        self._returned = unpacked_returned(state)


class _Source:
    """Draws of a source: its position in its epochs, and its lead or lag.

    Args:
        order: of the source.
        seed: of its permutations.
    """

    def __init__(self, order: SourceOrder, seed: str) -> None:
        self.order, self._seed = order, seed
        self.taken = 0
        """Prompts drawn or skipped, over all of its epochs."""
        self.credit = 0
        """Units by which it was drawn less often than its weight requires."""
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


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a state is not one of a sampler: a number is missing or out of range."""
    for name, least in (("count", 1), ("position", 0)):
        if not least <= state.get(name, -1) < 2**63:
            raise ValueError(f"sampler.{name}: {state.get(name, 'nothing')}, expected a whole number from {least}")
    if "seed" not in state:
        raise ValueError("sampler.seed: nothing, expected a whole number")
    for number, index in unpacked_returned(state):
        if number >= state["position"] or index >= state["count"]:
            raise ValueError(f"sampler.{RETURNED}: draw {number} of prompt {index}, expected one that was drawn")


def unpacked_returned(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Identity and prompt index of the draws that a sampler's state has returned. Raises ValueError for other text."""
    try:
        draws = parse_json(state.get(RETURNED, "[]"))
    except JsonError as error:
        raise ValueError(f"sampler.{RETURNED}: not valid JSON: {error}") from None
    if not isinstance(draws, list) or not all(_is_draw(draw) for draw in draws):
        raise ValueError(f"sampler.{RETURNED}: expected a list of [draw, prompt]")
    return [(number, index) for number, index in draws]


def _is_draw(draw: object) -> bool:
    return isinstance(draw, list) and len(draw) == 2 and all(type(number) is int and number >= 0 for number in draw)


def _packed_rates(rates: Mapping[int, float]) -> str:
    columns = np.array(sorted(rates), dtype=np.int64), np.array([rates[index] for index in sorted(rates)], np.float64)
    return base64.b64encode(zlib.compress(b"".join(column.tobytes() for column in columns))).decode()


def _unpacked_rates(text: str) -> dict[int, float]:
    data = zlib.decompress(base64.b64decode(text))
    indices, rates = np.frombuffer(data[: len(data) // 2], np.int64), np.frombuffer(data[len(data) // 2 :], np.float64)
    return dict(zip(indices.tolist(), rates.tolist(), strict=True))
