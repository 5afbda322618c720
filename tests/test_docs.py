"""What the pages in docs/ quote is what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = re.compile(r"`(hybridflow/[a-z_/]+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["adding_an_algorithm.md"])
def test_quoted_code_is_in_the_file_that_is_named(page: str) -> None:
    quoted = SOURCE.findall((ROOT / "docs" / page).read_text())
    assert len(quoted) == 2
    for path, code in quoted:
        assert code in (ROOT / path).read_text()
