"""The tool `search`: ranked passages of local documents, by the full-text index of SQLite."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

_SUFFIXES = (".jsonl", ".sqlite")
_WORD = re.compile(r"\w+")
_MOST_WORDS = 64


def write_index(documents: Iterable[tuple[str, str]], connection: sqlite3.Connection) -> int:
    """Write documents into an index. Returns their number.

    Args:
        documents: title and text of each.
        connection: to the database of the index, such as sqlite3.connect("documents.sqlite").
    """
    connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
    cursor = connection.executemany("INSERT INTO documents VALUES (?, ?)", documents)
    connection.commit()
    return cursor.rowcount


def _read(path: Path) -> Iterable[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                title, text = row.get("title") or "", row["text"]
                if not isinstance(title, str) or not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:60]!r}, expected an object with a text, and maybe a title"
                ) from None
            yield title, text


class SearchTool:
    """Searches documents by words, ranked by BM25.

    Args:
        path: of the documents: lines of JSON with `text` and `title` (.jsonl), of which each process has an index in
            memory, or an index that `write_index` has written (.sqlite), which is read from its file.
        results: most passages of an answer.
        most_characters: of each passage.

    Raises:
        ValueError: there are no such documents.
    """

    name = "search"

    def __init__(self, path: str, results: int = 3, most_characters: int = 1000) -> None:
        if results < 1 or most_characters < 1:
            raise ValueError(f"results={results}, most_characters={most_characters}, expected at least 1 of each")
        self._results, self._most_characters = results, most_characters
        file = Path(path)
        if file.suffix not in _SUFFIXES:
            raise ValueError(f"path is {path!r}, expected a file that ends with {' or '.join(_SUFFIXES)}")
        if not file.is_file():
            raise ValueError(f"path is {path!r}, and there is no such file")
        self._lock = threading.Lock()
        try:
            if file.suffix == ".jsonl":
                self._index = sqlite3.connect(":memory:", check_same_thread=False)
                write_index(_read(file), self._index)
            else:
                self._index = sqlite3.connect(f"file:{file.absolute()}?mode=ro", uri=True, check_same_thread=False)
            (count,) = self._index.execute("SELECT count(*) FROM documents").fetchone()
        except sqlite3.Error as error:
            raise ValueError(f"path is {path!r}, and no index of documents: {error}") from None
        if not count:
            raise ValueError(f"path is {path!r}, and has no documents")

    def __call__(self, query: str) -> str:
        """Search the documents, and return the passages that fit best.

        Args:
            query: Words to search for.
        """
        words = " OR ".join(f'"{word}"' for word in _WORD.findall(query)[:_MOST_WORDS])
        if not words:
            raise ValueError("the query has no words")
        with self._lock:
            rows = self._index.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?",
                (words, self._results),
            ).fetchall()
        if not rows:
            return "nothing found"
        return "\n".join(
            f"[{number}] {title}: {text[: self._most_characters]}"
            if title
            else f"[{number}] {text[: self._most_characters]}"
            for number, (title, text) in enumerate(rows, start=1)
        )
