"""Search over local documents."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from hybridflow.environments.tools.functions import Tool
from hybridflow.environments.tools.search_tool import SearchTool, write_index

DOCUMENTS = [
    {"title": "Rain", "text": "Clouds bring rain."},
    {"title": "Snow", "text": "Snow falls in winter."},
    {"text": "Winter rain falls on snowy hills."},
]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"title": None} | document) + "\n" for document in DOCUMENTS))
    return path


def test_passages_that_fit_best_come_first(documents: Path) -> None:
    search = SearchTool(str(documents), results=2)
    assert search("rain").startswith("[1] Rain: Clouds bring rain.\n[2] Winter rain")
    assert search('snow" OR (NEAR').startswith("[1] Snow")  # nothing of the query is syntax
    assert search("desert") == "nothing found"
    with pytest.raises(ValueError, match="the query has no words"):
        search("?!")
    assert Tool(search).schema["function"]["parameters"]["required"] == ["query"]


def test_an_index_in_a_file_answers_the_same(documents: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "index.sqlite") as connection:
        assert write_index(((row.get("title", ""), row["text"]) for row in DOCUMENTS), connection) == len(DOCUMENTS)
    assert SearchTool(str(tmp_path / "index.sqlite"))("winter") == SearchTool(str(documents))("winter")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("documents.txt", "x", r"expected a file that ends with .jsonl or .sqlite"),
        ("documents.jsonl", '{"title": "no text"}\n', "line 1: .*expected an object with a text"),
        ("documents.jsonl", "", "has no documents"),
        ("documents.sqlite", "no database at all, but long enough to be read as one" * 20, "no index of documents"),
    ],
)
def test_files_that_are_no_documents(tmp_path: Path, name: str, content: str, reason: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=reason):
        SearchTool(str(tmp_path / name))
    with pytest.raises(ValueError, match="there is no such file"):
        SearchTool(str(tmp_path / "none.jsonl"))
