"""Cache of verdicts: a judge answers the same question once."""

from __future__ import annotations

import sqlite3
import sys
from collections import OrderedDict
from pathlib import Path

_FILE = "verdicts.sqlite"
_LOCKED_S = 10.0


class VerdictCache:
    """Newest verdicts by the key of their question, in memory, and in a directory if there is one.

    Several processes of a machine may share a directory. Where its file fails while running, that is printed once, and
    the verdicts are kept in memory alone: it costs requests, and no reward.

    Args:
        most: verdicts that are kept, in memory and in the directory.
        directory: made if it is not there; None for none.
    """

    def __init__(self, most: int, directory: Path | None = None) -> None:
        self._most, self._directory = most, directory
        self._memory: OrderedDict[str, float] = OrderedDict()
        self._file: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file of the directory. Raises ValueError where that cannot be."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(self._directory / _FILE, timeout=_LOCKED_S, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (asked TEXT PRIMARY KEY, score REAL NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"cache_dir: {self._directory}: {error}") from None

    def get(self, key: str) -> float | None:
        """The verdict on a question, by its key; None where none is kept."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        if self._file is not None:
            try:
                row = self._file.execute("SELECT score FROM verdicts WHERE asked = ?", (key,)).fetchone()
            except sqlite3.Error as error:
                self._give_up(error)
            else:
                if row is not None:
                    self._remember(key, row[0])
                    return float(row[0])
        return None

    def put(self, key: str, score: float) -> None:
        """Keep a verdict."""
        self._remember(key, score)
        if self._file is None:
            return
        try:
            self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, score))
            self._file.execute(
                "DELETE FROM verdicts WHERE rowid <= (SELECT max(rowid) FROM verdicts) - ?", (self._most,)
            )
        except sqlite3.Error as error:
            self._give_up(error)

    def _remember(self, key: str, score: float) -> None:
        if self._most:
            self._memory[key] = score
            while len(self._memory) > self._most:
                self._memory.popitem(last=False)

    def _give_up(self, error: sqlite3.Error) -> None:
        print(f"cache_dir: {self._directory}: {error}; verdicts are kept in memory alone from here on", file=sys.stderr)
        self._file = None
