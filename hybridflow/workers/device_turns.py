"""Turns: groups that share devices compute on them one after another, in the order in which they were called.

Only methods that are registered as exclusive take turns. A rank waits for calls that were made before its own, so that
no two wait for one another; what is registered otherwise neither waits nor is waited for, as calls of two groups that
only end together must not. When the turn goes to another group, the one that had it gives device memory back: its
`give_back` is called, where its worker has one; and its `take_back` before its next turn.
"""

from __future__ import annotations

import threading
import weakref

from hybridflow.workers.call import Call
from hybridflow.workers.ranks import Ranks

GIVE_BACK = "give_back"
"""The method that is called of a group when its turn is over."""
TAKE_BACK = "take_back"
"""The method that is called of a group that gave memory back, when it has its turn again."""


class Turns:
    """Who computes on which devices. Threads may share it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """To be held from `earlier` to `add`, so that no other call comes between."""
        self._calls: list[Call] = []
        self._holding: weakref.WeakSet[Ranks] = weakref.WeakSet()
        self._gave_back: weakref.WeakSet[Ranks] = weakref.WeakSet()

    def leave(self, ranks: Ranks) -> None:
        """The ranks of a group are gone: its turns are over."""
        with self.lock:
            self._holding.discard(ranks)
            self._gave_back.discard(ranks)
            self._calls = [call for call in self._calls if call.ranks is not ranks]

    def holding(self, ranks: Ranks) -> list[Ranks]:
        """The other groups that have computed on a device of a group, and have not given memory back since."""
        with self.lock:
            return [other for other in self._holding if other is not ranks and _share(ranks, other)]

    def gave_back(self, ranks: Ranks) -> bool:
        """Whether a group has given memory back, and not computed since."""
        with self.lock:
            return ranks in self._gave_back

    def earlier(self, ranks: Ranks) -> list[Call]:
        """The calls after whose end a group's next call has its turn, in the order in which they were made.

        Calls that those wait for in turn are among them, so that what fails can be told whoever waits.
        """
        with self.lock:
            self._calls = [call for call in self._calls if not call.ended()]
            before = [call for call in self._calls if call.ranks is not ranks and _share(ranks, call.ranks)]
            needed = {id(each) for call in before for each in (call, *call.earlier)}
            return [call for call in self._calls if id(call) in needed]

    def add(self, call: Call) -> None:
        """A call was made."""
        with self.lock:
            self._calls.append(call)
            if call.method == GIVE_BACK:
                self._holding.discard(call.ranks)
                self._gave_back.add(call.ranks)
            else:
                self._holding.add(call.ranks)
                self._gave_back.discard(call.ranks)


def _share(one: Ranks, other: Ranks) -> bool:
    return not one.devices.isdisjoint(other.devices)


turns = Turns()
"""Those of this process."""
