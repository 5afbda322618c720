"""Turns: groups that share devices compute on them one after another, in the order in which they were called.

Only methods that are registered as exclusive take turns. A rank waits for calls that were made before its own, so that
no two wait for one another; what is registered otherwise neither waits nor is waited for, as calls of two groups that
only end together must not. When the turn goes to another group, the one that had it gives device memory back: its
`give_back` is called, where its worker has one; and its `take_back` before its next turn.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from hybridflow.cluster.device_map import Device

if TYPE_CHECKING:
    from hybridflow.workers.future import Call
    from hybridflow.workers.worker_group import WorkerGroup


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
        self._holding: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
        self._gave_back: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()

    def leave(self, group: WorkerGroup) -> None:
        """A group is gone: its turns are over."""
        with self.lock:
            self._holding.discard(group)
            self._gave_back.discard(group)
            self._calls = [call for call in self._calls if call.group is not group]

    def holding(self, group: WorkerGroup) -> list[WorkerGroup]:
        """The other groups that have computed on a device of a group, and have not given memory back since."""
        with self.lock:
            return [other for other in self._holding if other is not group and _share(group, other)]

    def gave_back(self, group: WorkerGroup) -> bool:
        """Whether a group has given memory back, and not computed since."""
        with self.lock:
            return group in self._gave_back

    def earlier(self, group: WorkerGroup) -> list[Call]:
        """The calls after whose end a group's next call has its turn, in the order in which they were made.

        Calls that those wait for in turn are among them, so that what fails can be told whoever waits.
        """
        with self.lock:
            self._calls = [call for call in self._calls if not call.ended()]
            before = [call for call in self._calls if call.group is not group and _share(group, call.group)]
            needed = {id(each) for call in before for each in (call, *call.earlier)}
            return [call for call in self._calls if id(call) in needed]

    def add(self, call: Call) -> None:
        """A call was made."""
        with self.lock:
            self._calls.append(call)
            if call.method == GIVE_BACK:
                self._holding.discard(call.group)
                self._gave_back.add(call.group)
            else:
                self._holding.add(call.group)
                self._gave_back.discard(call.group)


def _devices(group: WorkerGroup) -> set[Device]:
    return {bundle.device for bundle in group.pool.bundles}


def _share(one: WorkerGroup, other: WorkerGroup) -> bool:
    return not _devices(one).isdisjoint(_devices(other))


turns = Turns()
"""Those of this process."""
