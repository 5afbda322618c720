"""Which groups a stream of rollouts has under way, and which of them a step learns from.

A group is the samples of one drawn prompt. It is admitted, sent to an engine, becomes whole, and is taken by a step.
One that cannot be learned from any more goes back, and its prompt is the first to be admitted again: none is lost, and
none is learned from twice. Versions are those of the weights that engines serve; a step that begins from version v
makes v + 1.

This is bookkeeping alone: it knows neither engines nor clocks, and the same calls in the same order give the same
answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Late = Literal["wait", "evict"]
Queue = Literal["oldest_first", "freshest_first"]
Excess = Literal["carry", "drop"]


@dataclass(frozen=True)
class StreamLimits:
    """How far a stream runs ahead, and what becomes of groups that are late.

    Args:
        groups_per_step: that each step learns from.
        max_staleness: by how many versions the oldest token of a sample may be older than the weights that learn.
        extra: further groups under way, of which a step takes the first that are whole.
        late: whether a step waits for groups that no later step could learn from, or does without them; it always does
            without as many as it drops of its `extra` ones.
        queue: which of the whole groups a step takes.
        excess: whether the groups that a step did not take of its `extra` ones go on, or go back.
    """

    groups_per_step: int
    max_staleness: int
    extra: int = 0
    late: Late = "wait"
    queue: Queue = "oldest_first"
    excess: Excess = "drop"

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or self.extra < 0:
            raise ValueError(f"{self}: expected groups_per_step from 1, max_staleness and extra from 0")
        if self.excess == "carry" and self.extra and not self.max_staleness:
            raise ValueError("excess='carry' with max_staleness=0: what a step leaves would be too old for the next")


@dataclass(frozen=True, slots=True)
class Group:
    """A drawn prompt under way.

    Args:
        number: identity of the draw, which counts the prompts drawn; seeds of samples are made from it.
        prompt: index of the prompt.
        attempt: how often it was begun before.
    """

    number: int
    prompt: int
    attempt: int = 0


@dataclass(slots=True)
class _Entry:
    group: Group
    oldest: int | None = None
    """Version of the oldest weights that may have drawn a token of it; None before it is sent to an engine."""
    place: int | None = None
    """How many became whole before it; None of one that is not whole."""

    @property
    def kind(self) -> tuple[int | None, bool]:
        """Version of its oldest token, and whether it is whole."""
        return self.oldest, self.place is not None


@dataclass(frozen=True)
class Taken:
    """What a step learns from, and what is left behind.

    Args:
        groups: to learn from, by number.
        evicted: gone back, as they are or would become too old.
        dropped: gone back, as more were under way than a step needs.
        carried: how many more than those go on.
        staleness: of each group in `groups`: by how many versions its oldest token is older than the learning weights.
    """

    groups: tuple[Group, ...]
    evicted: tuple[Group, ...]
    dropped: tuple[Group, ...]
    carried: int
    staleness: tuple[int, ...]


class Ledger:
    """The groups of a stream.

    Args:
        limits: of it.
        draw: gives so many further prompts: the number of each draw, and the index of its prompt.
    """

    def __init__(self, limits: StreamLimits, draw: Callable[[int], Iterable[tuple[int, int]]]) -> None:
        self._limits, self._draw = limits, draw
        self._entries: dict[int, _Entry] = {}
        # A step asks again at every response that ends: it counts kinds, of which there are few, and not groups.
        self._kinds: Counter[tuple[int | None, bool]] = Counter()
        self._returned: list[Group] = []
        self._learning: tuple[_Entry, ...] = ()
        self._whole = 0
        self.draws_left: int | None = None
        """How many further prompts may be drawn; without a limit if None."""

    # How many

    @property
    def under_way(self) -> int:
        """Groups that were admitted and are not whole."""
        return len(self._entries) - self.ready

    @property
    def ready(self) -> int:
        """Whole groups that no step has taken."""
        return sum(number for (_, whole), number in self._kinds.items() if whole)

    @property
    def held(self) -> int:
        """Groups that were drawn and that no step has learned from, those included that went back."""
        return len(self._entries) + len(self._returned)

    @property
    def learning(self) -> tuple[Group, ...]:
        """What the step that is under way learns from."""
        return tuple(entry.group for entry in self._learning)

    @property
    def returned(self) -> tuple[Group, ...]:
        """What has gone back and was not admitted again, in the order in which it will be."""
        return tuple(self._returned)

    @property
    def room(self) -> int:
        """How many more groups may be under way.

        While a step learns, what is begun is of weights one version older than those that the next step learns with: so
        without staleness nothing is.
        """
        limits = self._limits
        steps = limits.max_staleness + (not self._learning)
        if not steps:
            return 0
        extra = 0 if self._learning and limits.excess == "drop" else limits.extra
        return max(0, steps * limits.groups_per_step + extra - len(self._entries))

    # What happens

    def admit(self) -> tuple[Group, ...]:
        """Groups to begin: those that have gone back, by number, and then newly drawn ones."""
        room = self.room
        again, self._returned = self._returned[:room], self._returned[room:]
        count = room - len(again)
        if self.draws_left is not None:
            count = min(count, self.draws_left)
            self.draws_left -= count
        drawn = [Group(number, prompt) for number, prompt in self._draw(count)] if count else []
        for group in (*again, *drawn):
            self._add(group)
        return (*again, *drawn)

    def sent(self, number: int, version: int) -> None:
        """The first of a group's requests is with an engine that serves this version."""
        entry = self._entries[number]
        if entry.oldest is None or version < entry.oldest:
            self._uncount(entry)
            entry.oldest = version
            self._kinds[entry.kind] += 1

    def became_whole(self, number: int, oldest: int) -> None:
        """All samples of a group are there. `oldest`: version of the oldest weights that drew a token of it.

        Raises:
            ValueError: it was whole already, or is not under way.
        """
        entry = self._entries.get(number)
        if entry is None or entry.place is not None:
            raise ValueError(
                f"group {number} became whole, and is {'no group under way' if entry is None else 'whole'}"
            )
        self._uncount(entry)
        entry.oldest, entry.place = oldest, self._whole
        self._kinds[entry.kind] += 1
        self._whole += 1

    def lost(self, number: int) -> None:
        """A group cannot become whole; its prompt goes back."""
        self._give_back([self._entries[number]])

    def evict(self, version: int) -> tuple[Group, ...]:
        """Give back what no step from `version` on can learn from. Returns what went back, as it was."""
        limit = self._limits.max_staleness
        if self._oldest_age(version) <= limit:  # as at nearly every response that ends
            return ()
        stale = [each for each in self._entries.values() if self._age(each.oldest, version) > limit]
        self._give_back(stale)
        return tuple(each.group for each in stale)

    def take(self, version: int) -> Taken | None:
        """What the step from `version` learns from; None where too few are whole yet, or late ones are waited for.

        Raises:
            ValueError: a step learns already, or something is too old, for which `evict` comes before.
        """
        limits, count = self._limits, self._limits.groups_per_step
        oldest = self._oldest_age(version)
        if self._learning or oldest > limits.max_staleness:
            raise ValueError(f"take: {len(self._learning)} groups are being learned from, the oldest is {oldest}")
        if self.ready < count or (limits.late == "wait" and self._waits(version)):
            return None
        ages = {number: self._age(entry.oldest, version) for number, entry in self._entries.items()}
        whole = [entry for entry in self._entries.values() if entry.place is not None]
        last = [entry for entry in whole if ages[entry.group.number] == limits.max_staleness]
        others = [entry for entry in whole if ages[entry.group.number] < limits.max_staleness]
        # What no later step could learn from comes first, whatever the order.
        taken = (sorted(last, key=self._preference) + sorted(others, key=self._preference))[:count]
        taken.sort(key=lambda entry: entry.group.number)
        for entry in taken:
            self._remove(entry)
        left = sorted(self._entries.values(), key=lambda each: (-ages[each.group.number], *self._slowness(each)))
        excess = len(left) - limits.max_staleness * count
        dropped = left[: max(0, excess)] if limits.excess == "drop" else []
        too_late = [entry for entry in left[len(dropped) :] if ages[entry.group.number] == limits.max_staleness]
        self._give_back([*dropped, *too_late])
        self._learning = tuple(taken)
        return Taken(
            self.learning,
            evicted=tuple(entry.group for entry in too_late),
            dropped=tuple(entry.group for entry in dropped),
            carried=max(0, len(self._entries) - limits.max_staleness * count),
            staleness=tuple(ages[entry.group.number] for entry in taken),
        )

    def learned(self) -> None:
        """The step is over, and the engines serve its weights."""
        self._learning = ()

    def give_back(self) -> None:
        """The step will not learn: what it took is whole, as it was."""
        for entry in self._learning:
            self._entries[entry.group.number] = entry
            self._kinds[entry.kind] += 1
        self._learning = ()

    # Over a restart

    def state(self) -> dict[str, Any]:
        """State of the groups in flight, complete and returned, as plain values.

        Whole groups have `oldest`, and as `place` how many of them became whole before.
        """
        whole = sorted((each for each in self._entries.values() if each.place is not None), key=_place_of)
        places = {entry.group.number: place for place, entry in enumerate(whole)}
        entries = [
            asdict(entry.group)
            | {"oldest": entry.oldest if entry.place is not None else None, "place": places.get(entry.group.number)}
            for entry in sorted(self._entries.values(), key=lambda each: each.group.number)
        ]
        return {"groups": entries, "returned": [asdict(group) for group in self._returned]}

    def restore(self, state: Mapping[str, Any]) -> tuple[Group, ...]:
        """Go on where `state` was taken, outside a step. Returns the groups that are to be begun or gone on with."""
        again, whole = [], []
        for each in state["groups"]:
            group = Group(each["number"], each["prompt"], each["attempt"])
            self._add(group)
            if each["oldest"] is None:
                again.append(group)
            else:
                whole.append(each)
        # Checkpoints of before do not say in which order groups became whole: that of their draws stands for it.
        for each in sorted(whole, key=lambda each: each.get("place", each["number"])):
            self.became_whole(each["number"], each["oldest"])
        self._returned = [Group(**each) for each in state["returned"]]
        return tuple(again)

    # In detail

    def _add(self, group: Group) -> None:
        if group.number in self._entries:
            raise ValueError(f"group {group.number} was admitted, and is under way already")
        entry = self._entries[group.number] = _Entry(group)
        self._kinds[entry.kind] += 1

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.group.number]
        self._uncount(entry)

    def _uncount(self, entry: _Entry) -> None:
        self._kinds[entry.kind] -= 1
        if not self._kinds[entry.kind]:
            del self._kinds[entry.kind]

    def _age(self, oldest: int | None, version: int) -> int:
        """By how many versions a group's oldest token may be older; 0 of what was not sent yet."""
        return version - oldest if oldest is not None else 0

    def _oldest_age(self, version: int) -> int:
        """Of the group that is oldest; 0 without any."""
        return max((self._age(oldest, version) for oldest, _ in self._kinds), default=0)

    def _waits(self, version: int) -> bool:
        """Whether the step from `version` is to learn from groups that are not whole, as no later one may.

        It does without as many as it drops anyway: those are the slowest of its over-sampling.
        """
        limits, last, late = self._limits, 0, 0
        for (oldest, whole), number in self._kinds.items():
            if oldest is not None and self._age(oldest, version) >= limits.max_staleness:
                last += number if whole else 0
                late += 0 if whole else number
        spare = len(self._entries) - (limits.max_staleness + 1) * limits.groups_per_step
        return late > (max(0, spare) if limits.excess == "drop" else 0) and last < limits.groups_per_step

    def _preference(self, entry: _Entry) -> tuple[int, int]:
        assert entry.oldest is not None
        first = 1 if self._limits.queue == "oldest_first" else -1
        return first * entry.oldest, first * entry.group.number

    def _slowness(self, entry: _Entry) -> tuple[bool, int]:
        """The slowest first: those under way by number, and then whole ones, the last that became whole first."""
        return entry.place is not None, entry.group.number if entry.place is None else -entry.place

    def _give_back(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self._remove(entry)
            self._returned.append(replace(entry.group, attempt=entry.group.attempt + 1))
        self._returned.sort(key=lambda group: group.number)


def _place_of(entry: _Entry) -> int:
    assert entry.place is not None
    return entry.place
