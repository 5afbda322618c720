"""The end of a command before its work is done: SIGINT, SIGTERM, or a cause that a thread has found.

The main thread is interrupted by what Ctrl-C raises, so that every block that is entered is left: libraries let it
pass, Ray's C++ code serves it while it waits, and no handler of ordinary errors catches it. What does not serve it, or
swallows it, is ended by force: a thread learns of each signal from the operating system, whatever the main thread is
at, and ends the process when the orderly end takes too long.

A run that saves before it ends has time for that: in a block of `saves`, the first signal interrupts no more than a
wait for something that need not be finished, and a second one, or the end of that time, ends it as above.

Standard library only, so that it is there before anything that takes time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

STOPPED_AFTER_SAVING = 75
"""Exit code after SIGTERM where all that was done is in a checkpoint: EX_TEMPFAIL of sysexits.h, "try again"."""
SAVE = signal.SIGUSR1
"""Asks a run for a checkpoint; it goes on."""
LEAVE = signal.SIGRTMIN
"""Asks for the same end as SIGTERM, by any number of those who need not know of each other: it is never impatience."""

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# A terminal and a parent may both pass on the same Ctrl-C: so soon after the first, it is not impatience.
_SAME_S = 1.0
_DEFAULT_GRACE_S = 10.0
# Where a part that the main thread waits for is gone, it is not to be expected that it comes back.
_CAUSE_GRACE_S = 5.0


class Terminated(KeyboardInterrupt):
    """Unwinds the main thread's stack."""


class Abandoned(BaseException):
    """Unwinds it up to where the run saves: what it was at need not be finished."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the command ends.

    Args:
        line: for stderr.
        code: the process's exit code.
        printed: True if the line is on stderr already.
    """

    line: str
    code: int
    printed: bool = False


class Termination:
    """The one of this process."""

    def __init__(self) -> None:
        self.grace_s = _DEFAULT_GRACE_S
        """How long an orderly end may take before processes are ended by force."""
        self.before_force: Callable[[], None] | None = None
        """Is called right before an end by force, in another thread; must not wait."""
        self.last_words: Callable[[], None] | None = None
        """Is called then as well, after the cause is told; must not wait."""
        self._cause: Cause | None = None
        self._resorts: list[Callable[[], None]] = []
        self._wake: int | None = None
        self._raised = False
        self._first_s = self._deadline_s = self._pressed_s = float("inf")
        self._limit_s: float | None = None
        self._out_of_time = False
        self._abandonable = self._waiting = False
        self._saves = self._save_asked = False

    @property
    def cause(self) -> Cause | None:
        """Why the command ends; None while it goes on."""
        return self._cause

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and LEAVE in the block; they interrupt it from its call of `begin` on.

        Nothing changes in a thread that is not the main one.

        A signal that the parent had this process ignore, as shells do for what runs in the background, stays ignored.
        """
        if threading.current_thread() is not threading.main_thread() or self._wake is not None:
            yield
            return
        self.__init__()  # type: ignore[misc]
        self._raised = True  # until `begin`: nobody would catch it here
        reading, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        handlers: dict[int, Any] = {
            number: signal.signal(number, self._interrupt)
            for number in _WORDS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        handlers[SAVE] = signal.signal(SAVE, self._ask_to_save)
        handlers[LEAVE] = signal.signal(LEAVE, self._interrupt)
        threading.Thread(target=self._guard, args=(reading,), name="termination", daemon=True).start()
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) != signal.SIG_IGN:  # as a command does whose exit code is decided
                    signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            wake, self._wake = self._wake, None
            os.close(wake)  # the thread ends, and closes the other end

    def begin(self) -> None:
        """Raise what unwinds the stack at a signal from here on; for one that has come already, now."""
        if self._wake is None:
            return
        self._raised = False
        if self._cause is not None:
            self._raised = True
            raise Terminated

    def unless_ending(self, words: str) -> str:
        """Words for a message, such as "; training continues"; none once a signal or a cause ends the command."""
        return words if self._cause is None else ""

    @property
    def stop_requested(self) -> bool:
        """True if the run is to save and to end, and there is still time."""
        return self._cause is not None and self._limit_s is not None and not self._out_of_time

    @contextlib.contextmanager
    def saves(self, limit_s: float | None) -> Iterator[None]:
        """The block looks at `stop_requested` and `take_save_request`.

        Args:
            limit_s: that it may take to save after SIGINT or SIGTERM, until it calls `end_asked`; None if a signal
                interrupts it at once.
        """
        if self._wake is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._limit_s, self._saves = limit_s, True
        try:
            yield
        finally:
            self._limit_s, self._saves = None, False

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Make waits of the block raise Abandoned when the run is to save: its work need not be finished before."""
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Keep waits of the block from raising Abandoned, in an abandonable block too: its work cannot be repeated.

        The next wait after the block raises it.
        """
        before, self._abandonable = self._abandonable, False
        try:
            yield
        finally:
            self._abandonable = before

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block changes nothing that its interruption could leave half changed. Raises Abandoned."""
        if not self._abandonable or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waiting = True
        try:
            if self.stop_requested:
                raise Abandoned
            yield
        except (KeyboardInterrupt, SystemError) as error:
            # What Ray's C++ code makes of anything that a handler raises in it: either, by how far it was.
            is_ours = not isinstance(error, Terminated | SystemError) or isinstance(error.__cause__, Abandoned)
            if self.stop_requested and is_ours:
                raise Abandoned from None
            raise
        finally:
            self._waiting = False

    def take_save_request(self) -> bool:
        """True if SIGUSR1 came since the last call."""
        stop_requested, self._save_asked = self._save_asked, False
        return stop_requested

    def end_asked(self, saved: str | None) -> NoReturn:
        """End the command now, as a signal has asked for.

        Args:
            saved: what was, for stderr; None if nothing could be.

        Raises:
            Terminated: always.
        """
        assert self._cause is not None
        line, code = self._cause.line, self._cause.code
        if saved is None:
            self._cause = Cause(f"{line}; no checkpoint could be saved", code)
        else:
            resumes = code == 128 + signal.SIGTERM
            self._cause = Cause(f"{line}; {saved}", STOPPED_AFTER_SAVING if resumes else code)
        self._raised = self._out_of_time = True
        self._first_s = time.monotonic()
        self._deadline_s = self._first_s + self.grace_s
        if self._wake is not None:
            os.write(self._wake, b"\0")  # no signal: the guard looks at its deadline
        raise Terminated

    def end(self, line: str, before_told: Callable[[], None] | None = None) -> bool:
        """End the command with exit code 1 for a cause that a thread has found; the line is told at once.

        Args:
            line: for stderr.
            before_told: is called first, where it is possible: who reads the line may rely on what this has done.

        Returns:
            Whether that is possible: not in a program of the user's, which has its own ways, nor twice.
        """
        if self._wake is None or self._cause is not None:
            return False
        self._cause = Cause(line, 1, printed=True)
        self._out_of_time = True
        self.grace_s = min(self.grace_s, _CAUSE_GRACE_S)
        if before_told is not None:
            with contextlib.suppress(Exception):  # the cause is what counts
                before_told()
        _print(line)
        # A real signal, which also wakes a main thread that waits for a lock.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        return True

    def add_resort(self, resort: Callable[[], None]) -> None:
        """Register `resort` for `finish` to call, which ends what is left of what the command has started.

        What is started must end by itself where this process ends by force.
        """
        self._resorts.append(resort)

    def remove_resort(self, resort: Callable[[], None]) -> None:
        """Forget it. A command that ran in this program meanwhile has forgotten all."""
        with contextlib.suppress(ValueError):
            self._resorts.remove(resort)

    def settle(self) -> None:
        """The stack is unwound: a signal that still comes is the cause all the same, and interrupts nothing."""
        self._raised = True

    def finish(self) -> int:
        """The exit code of a command that a cause ended, once its stack is unwound: says the cause, leaves nothing."""
        assert self._cause is not None
        cause, self._cause = self._cause, Cause(self._cause.line, self._cause.code, printed=True)
        if not cause.printed:
            _print(cause.line)
        for resort in list(self._resorts):
            with contextlib.suppress(Exception):  # the others are to be used too, and the cause is what is told
                resort()
        return cause.code

    def leave(self, code: int) -> None:
        """Allow a signal to end the process at once, and so the end of the grace: the rest of it has nothing to lose.

        The interpreter waits for threads, one of which may hang in a library, and calls what libraries have left.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if self._cause is not None:
            os._exit(code)

        def exit_at_once(number: int, _frame: FrameType | None) -> None:
            _print(_word(number))
            os._exit(128 + number)

        for number in _WORDS:
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, exit_at_once)
        timer = threading.Timer(self.grace_s, os._exit, (code,))
        timer.daemon = True
        timer.start()

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._note(number)
        if self.stop_requested:
            if self._waiting:
                self._waiting = False
                raise Abandoned
            return
        if not self._raised:  # once: what puts things away must not be interrupted itself
            self._raised = True
            raise Terminated

    def _ask_to_save(self, _number: int, _frame: FrameType | None) -> None:
        self._save_asked = True
        if self._saves:
            _print(
                "hybridflow: SIGUSR1: the run saves a checkpoint after this step"
                + self.unless_ending(", and continues")
            )

    def _note(self, number: int) -> None:
        # Of signals alone: no lock, which the main thread could hold when its handler runs.
        number = signal.SIGTERM if number == LEAVE else number
        if self._cause is None:
            self._cause = Cause(_word(number), 128 + number)

    def _guard(self, reading: int) -> None:
        """Bound the time of an orderly end."""
        while True:
            left_s = self._deadline_s - time.monotonic()
            ready, _, _ = select.select([reading], [], [], None if left_s == float("inf") else max(0.0, left_s))
            numbers = os.read(reading, 64) if ready else b""
            if ready and not numbers:
                os.close(reading)
                return
            for number in numbers:
                if number in _WORDS or number == LEAVE:
                    self._note(number)
                    now = time.monotonic()
                    if self._first_s == float("inf"):
                        self._first_s, self._deadline_s = now, now + self._time_s()
                    if number == LEAVE:
                        continue
                    if self._pressed_s == float("inf"):
                        self._pressed_s = now
                    elif now > max(self._first_s, self._pressed_s) + _SAME_S:
                        self._deadline_s = now  # asked for twice
            if time.monotonic() >= self._deadline_s:
                if self.stop_requested:
                    self._interrupt_now()
                else:
                    self._force()

    def _time_s(self) -> float:
        """Start the grace at the first signal; say so where it is for a checkpoint."""
        limit_s = self._limit_s
        if limit_s is None or self._out_of_time:
            return self.grace_s
        line = self._cause.line if self._cause is not None else ""
        _print(f"{line}: the run saves a checkpoint, within {limit_s:g} s, and ends; a second signal ends it at once")
        return limit_s

    def _interrupt_now(self) -> None:
        """The time for a checkpoint is over."""
        assert self._cause is not None
        self._cause = Cause(f"{self._cause.line}; there was no time for a checkpoint", self._cause.code)
        self._out_of_time = True
        self._first_s = time.monotonic()
        self._deadline_s = self._first_s + self.grace_s
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _force(self) -> None:
        # At once: what was started ends when this process does. Were it ended first, a main thread that waits for it
        # in C++ would come back, and Ray end this process with an exit code of its own.
        assert self._cause is not None
        waited_s = time.monotonic() - self._first_s
        forced = f"what had not ended within {waited_s:.0f} s was ended by force"
        if not self._cause.printed:
            _print(f"{self._cause.line}; {forced}")
        if self.before_force is not None:
            with contextlib.suppress(Exception):  # the cause is what counts
                self.before_force()
        if self.last_words is not None:
            with contextlib.suppress(Exception):
                self.last_words()
        os._exit(self._cause.code)


def _word(number: int) -> str:
    return f"hybridflow: {_WORDS[signal.Signals(number)]}"


def _print(line: str) -> None:
    # Not by sys.stderr, whose lock the main thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


termination = Termination()
"""The one of this process."""
