"""Bookkeeping of the groups in flight in a stream of rollouts, and of those that a step trains on.

A group is the samples of one drawn prompt. It is admitted, sent to an engine, completed, and taken by a step. A group
that cannot be trained on any more is returned to the queue, and its prompt is the first to be admitted again: none is
lost, and none is trained on twice. Versions are those of the weights that engines serve. A step that begins from
version v makes v + 1.

The ledger knows neither engines nor clocks: the same calls in the same order give the same results.
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
    """Limits of a stream: how far it runs ahead, and the fate of late groups.

    Args:
        groups_per_step: that each step trains on.
        max_staleness: by how many versions the oldest token of a sample may be older than the weights in training.
        extra: further groups in flight, of which a step takes the first that are complete.
        late: whether a step waits for groups that no later step could train on, or continues without them. It always
            continues without as many as it drops of its `extra` ones.
        queue: which of the complete groups a step takes.
        excess: whether the `extra` groups that a step did not take continue, or are returned to the queue.
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
        if self.excess == "carry" and self.extra and not self.off_policy:
            raise ValueError("excess='carry' with max_staleness=0: what a step leaves would be too old for the next")

    @property
    def off_policy(self) -> bool:
        """True if a step may train on samples of older weights than those in training."""
        return self.max_staleness > 0


@dataclass(frozen=True, slots=True)
class Group:
    """A drawn prompt.

    Args:
        number: identity of the draw, which counts the prompts drawn; seeds of samples are made from it.
        prompt: index of the prompt.
        attempt: count of earlier attempts.
    """

    number: int
    prompt: int
    attempt: int = 0


@dataclass(slots=True)
class _Entry:
    group: Group
    oldest: int | None = None
    """Version of the oldest weights that may have drawn a token of it; None before it is sent to an engine."""
    order: int | None = None
    """Count of groups that were complete before it; None of an incomplete one."""

    @property
    def kind(self) -> tuple[int | None, bool]:
        """Version of its oldest token, and True if it is complete."""
        return self.oldest, self.order is not None


@dataclass(frozen=True)
class Taken:
    """Groups that a step trains on, and those left behind.

    Args:
        groups: to train on, by number.
        evicted: returned to the queue, as they are or would become too old.
        dropped: returned to the queue, as more were in flight than a step needs.
        carried: count of further groups that continue.
        staleness: of each group in `groups`: versions by which its oldest token is older than the weights in training.
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
        draw: draws a count of further prompts: the number of each draw, and the index of its prompt.
    """

    def __init__(self, limits: StreamLimits, draw: Callable[[int], Iterable[tuple[int, int]]]) -> None:
        self._limits, self._draw = limits, draw
        self._entries: dict[int, _Entry] = {}
        # A step asks again at every response that ends: it counts kinds, of which there are few, and not groups.
        self._kinds: Counter[tuple[int | None, bool]] = Counter()
        self._returned: list[Group] = []
        self._training: tuple[_Entry, ...] = ()
        self._completions = 0
        self.draws_left: int | None = None
        """Count of further prompts that may be drawn ahead of a step that asks for them; without a limit if None."""

    # How many

    @property
    def in_flight(self) -> int:
        """Groups that were admitted and are incomplete."""
        return len(self._entries) - self.ready

    @property
    def ready(self) -> int:
        """Complete groups that no step has taken."""
        return sum(number for (_, complete), number in self._kinds.items() if complete)

    @property
    def buffered(self) -> int:
        """Groups that were drawn and not trained on, those returned to the queue included."""
        return len(self._entries) + len(self._returned)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups that were admitted and that no step has taken, by number."""
        return tuple(self._entries[number].group for number in sorted(self._entries))

    @property
    def training(self) -> tuple[Group, ...]:
        """Groups that the current step trains on."""
        return tuple(entry.group for entry in self._training)

    @property
    def returned(self) -> tuple[Group, ...]:
        """Groups returned to the queue, in the order in which they will be admitted again."""
        return tuple(self._returned)

    @property
    def capacity(self) -> int:
        """Groups that may still be admitted.

        Groups begun while a step trains are of weights one version older than those that the next step trains: without
        staleness none is begun.
        """
        limits = self._limits
        steps = limits.max_staleness + (not self._training)
        if not steps:
            return 0
        extra = 0 if self._training and limits.excess == "drop" else limits.extra
        return max(0, steps * limits.groups_per_step + extra - len(self._entries))

    # What happens

    def allow_step(self) -> bool:
        """Allow the draws that a step needs, also beyond `draws_left`. True if there are such."""
        missing = self._limits.groups_per_step - self.buffered
        if self.draws_left is None or self.draws_left >= missing:
            return False
        self.draws_left = missing
        return True

    def admit(self, most: int | None = None) -> tuple[Group, ...]:
        """Admit groups, at most `most`: those returned to the queue, by number, and then newly drawn ones."""
        capacity = self.capacity if most is None else min(most, self.capacity)
        again, self._returned = self._returned[:capacity], self._returned[capacity:]
        count = capacity - len(again)
        if self.draws_left is not None:
            count = min(count, self.draws_left)
            self.draws_left -= count
        drawn = [Group(number, prompt) for number, prompt in self._draw(count)] if count else []
        for group in (*again, *drawn):
            self._add(group)
        return (*again, *drawn)

    def sent(self, number: int, version: int) -> None:
        """Record that a request of a group was sent to an engine that serves this version."""
        entry = self._entries[number]
        if entry.oldest is None or version < entry.oldest:
            self._uncount(entry)
            entry.oldest = version
            self._kinds[entry.kind] += 1

    def completed(self, number: int, oldest: int) -> None:
        """Record that a group has all samples. `oldest`: version of the oldest weights that drew a token of it.

        Raises:
            ValueError: it was complete already, or is not in flight.
        """
        entry = self._entries.get(number)
        if entry is None or entry.order is not None:
            raise ValueError(
                f"group {number} completed, and is {'not in flight' if entry is None else 'complete already'}"
            )
        self._uncount(entry)
        entry.oldest, entry.order = oldest, self._completions
        self._kinds[entry.kind] += 1
        self._completions += 1

    def lost(self, number: int) -> None:
        """Return a group that cannot be completed to the queue."""
        self._return_groups([self._entries[number]])

    def remove(self, numbers: Iterable[int]) -> tuple[Group, ...]:
        """Remove groups, whose draws are undone. Returns them."""
        entries = [self._entries[number] for number in numbers]
        for entry in entries:
            self._remove(entry)
        return tuple(entry.group for entry in entries)

    def evict(self, version: int) -> tuple[Group, ...]:
        """Return groups to the queue that no step from `version` on can train on. Returns them, as they were."""
        limit = self._limits.max_staleness
        if self._oldest_age(version) <= limit:  # as at nearly every response that ends
            return ()
        stale = [entry for entry in self._entries.values() if self._age(entry.oldest, version) > limit]
        self._return_groups(stale)
        return tuple(entry.group for entry in stale)

    def take(self, version: int) -> Taken | None:
        """Take the groups of the step from `version`. None where too few are complete yet, or late ones are waited for.

        Raises:
            ValueError: a step trains already, or a group is too old: call `evict` before.
        """
        limits, count = self._limits, self._limits.groups_per_step
        oldest = self._oldest_age(version)
        if self._training or oldest > limits.max_staleness:
            raise ValueError(f"take: {len(self._training)} groups are being trained on, the oldest is {oldest}")
        if self.ready < count or (limits.late == "wait" and self._waits(version)):
            return None
        ages = {number: self._age(entry.oldest, version) for number, entry in self._entries.items()}
        complete = [entry for entry in self._entries.values() if entry.order is not None]
        last = [entry for entry in complete if ages[entry.group.number] == limits.max_staleness]
        others = [entry for entry in complete if ages[entry.group.number] < limits.max_staleness]
        # Groups that no later step could train on come first, whatever the order.
        taken = (sorted(last, key=self._preference) + sorted(others, key=self._preference))[:count]
        taken.sort(key=lambda entry: entry.group.number)
        for entry in taken:
            self._remove(entry)
        left = sorted(self._entries.values(), key=lambda entry: (-ages[entry.group.number], *self._slowness(entry)))
        excess = len(left) - limits.max_staleness * count
        dropped = left[: max(0, excess)] if limits.excess == "drop" else []
        too_late = [entry for entry in left[len(dropped) :] if ages[entry.group.number] == limits.max_staleness]
        self._return_groups([*dropped, *too_late])
        self._training = tuple(taken)
        return Taken(
            self.training,
            evicted=tuple(entry.group for entry in too_late),
            dropped=tuple(entry.group for entry in dropped),
            carried=max(0, len(self._entries) - limits.max_staleness * count),
            staleness=tuple(ages[entry.group.number] for entry in taken),
        )

    def trained(self) -> None:
        """End the step: the engines serve its weights."""
        self._training = ()

    def return_taken(self) -> None:
        """Return the groups of the step, which will not train: they are complete, as before."""
        for entry in self._training:
            self._entries[entry.group.number] = entry
            self._kinds[entry.kind] += 1
        self._training = ()

    # Over a restart

    def state(self) -> dict[str, Any]:
        """State of the groups in flight, complete and returned, as plain values.

        Complete groups have `oldest`, and as `place` the count of those completed before.
        """
        complete = sorted((entry for entry in self._entries.values() if entry.order is not None), key=_order_of)
        orders = {entry.group.number: index for index, entry in enumerate(complete)}
        entries = [
            asdict(entry.group)
            | {
                "oldest": entry.oldest if entry.order is not None else None,
                "place": orders.get(entry.group.number),
            }
            for entry in sorted(self._entries.values(), key=lambda entry: entry.group.number)
        ]
        return {"groups": entries, "returned": [asdict(group) for group in self._returned]}

    def restore(self, state: Mapping[str, Any]) -> tuple[Group, ...]:
        """Continue from `state`, outside a step. Returns the groups that are to be begun or continued."""
        again, complete = [], []
        for saved in state["groups"]:
            group = Group(saved["number"], saved["prompt"], saved["attempt"])
            self._add(group)
            if saved["oldest"] is None:
                again.append(group)
            else:
                complete.append(saved)
        # Older checkpoints lack the order in which groups were completed: the order of their draws stands for it.
        for saved in sorted(complete, key=lambda group: group.get("place", group["number"])):
            self.completed(saved["number"], saved["oldest"])
        self._returned = [Group(**saved) for saved in state["returned"]]
        return tuple(again)

    # In detail

    def _add(self, group: Group) -> None:
        if group.number in self._entries:
            raise ValueError(f"group {group.number} was admitted, and is in flight already")
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
        """Age of a group's oldest token, in versions; 0 of a group that was not sent yet."""
        return version - oldest if oldest is not None else 0

    def _oldest_age(self, version: int) -> int:
        """Age of the oldest group, in versions; 0 without any."""
        return max((self._age(oldest, version) for oldest, _ in self._kinds), default=0)

    def _waits(self, version: int) -> bool:
        """True if the step from `version` needs groups that are incomplete and that no later step may train on.

        It continues without as many as it drops anyway: those are the slowest of its over-sampling.
        """
        limits, last, late = self._limits, 0, 0
        for (oldest, complete), number in self._kinds.items():
            if oldest is not None and self._age(oldest, version) >= limits.max_staleness:
                last += number if complete else 0
                late += 0 if complete else number
        spare = len(self._entries) - (limits.max_staleness + 1) * limits.groups_per_step
        return late > (max(0, spare) if limits.excess == "drop" else 0) and last < limits.groups_per_step

    def _preference(self, entry: _Entry) -> tuple[int, int]:
        assert entry.oldest is not None
        first = 1 if self._limits.queue == "oldest_first" else -1
        return first * entry.oldest, first * entry.group.number

    def _slowness(self, entry: _Entry) -> tuple[bool, int]:
        """Sort key, the slowest first: groups in flight by number, then complete ones, the last completed first."""
        return (
            entry.order is not None,
            entry.group.number if entry.order is None else -entry.order,
        )

    def _return_groups(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self._remove(entry)
            self._returned.append(replace(entry.group, attempt=entry.group.attempt + 1))
        self._returned.sort(key=lambda group: group.number)


def _order_of(entry: _Entry) -> int:
    assert entry.order is not None
    return entry.order
