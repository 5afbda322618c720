"""Makes the Parquet files beside it, which chat.yaml and math.yaml learn from and are measured on.

python launch/recipes/data/make_data.py              writes them again
python launch/recipes/data/make_data.py --check      says whether the rows of the files are those that it makes

No problem is in two files of a recipe. Of the supervised answers some are wrong, as in data that nobody has checked.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
WRONG = 0.3
"""Share of the supervised answers that are wrong, by one or by ten."""
WITH_FULL_STOP = 0.2
"""Share of the supervised answers of chat.yaml that are no digits alone."""
LARGEST_OPERAND = 49
DENOMINATORS = range(2, 10)
LARGEST_NUMERATOR = 29


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files, and write none")
    parser.add_argument("--directory", type=Path, default=HERE, help="of the files; that of this script if not given")
    arguments = parser.parse_args()
    files = {**chat_files(), **math_files()}
    if not arguments.check:
        for name, rows in files.items():
            pq.write_table(pa.Table.from_pylist(rows), arguments.directory / name, compression="zstd")
        return 0
    wrong = [name for name, rows in files.items() if pq.read_table(arguments.directory / name).to_pylist() != rows]
    for name in wrong:
        print(f"{name} holds other rows than make_data.py makes; write it again, without --check", file=sys.stderr)
    return int(bool(wrong))


def chat_files() -> dict[str, list[Row]]:
    """Sums as chats, without and with a carry: supervised conversations, two training files and two test files."""
    draw = random.Random(0)
    operands = range(LARGEST_OPERAND + 1)
    pairs = [(a, b) for a in operands for b in operands]
    kinds = {
        "plain": [(a, b) for a, b in pairs if a % 10 + b % 10 < 10],
        "carry": [(a, b) for a, b in pairs if a % 10 + b % 10 >= 10],
    }
    files, conversations = {}, []
    for kind, problems in kinds.items():
        supervised, train, test = _parts(draw, problems, 600, 384, 128)
        conversations += [
            {"messages": [*_user(a, b), {"role": "assistant", "content": _chat_answer(draw, a + b)}]}
            for a, b in supervised
        ]
        for part, some in (("train", train), ("test", test)):
            files[f"chat-{kind}-{part}.parquet"] = [
                {"id": f"{kind}-{part}-{number}", "messages": _user(a, b), "answer": str(a + b)}
                for number, (a, b) in enumerate(some)
            ]
    draw.shuffle(conversations)
    return {"chat-sft.parquet": conversations, **files}


def _user(a: int, b: int) -> list[Row]:
    return [{"role": "user", "content": f"{a}+{b}"}]


def _chat_answer(draw: random.Random, answer: int) -> str:
    text = str(_perhaps_wrong(draw, answer))
    return f"{text}." if draw.random() < WITH_FULL_STOP else text


def math_files() -> dict[str, list[Row]]:
    """Sums of fractions and of whole numbers, with solutions in LaTeX: supervised, training and test rows, by file."""
    draw = random.Random(0)
    numerators = range(1, LARGEST_NUMERATOR + 1)
    fractions = [(a, b, d) for d in DENOMINATORS for a in numerators for b in numerators]
    whole = [(a, b, 1) for a in numerators for b in numerators]
    parts = zip(_parts(draw, fractions, 2400, 1200, 192), _parts(draw, whole, 400, 300, 64), strict=True)
    files = {}
    for part, (some, others) in zip(("sft", "train", "test"), parts, strict=True):
        rows = [_math_row(draw, *problem, supervised=part == "sft") for problem in [*some, *others]]
        draw.shuffle(rows)
        files[f"math-{part}.parquet"] = [{"id": f"{part}-{number}", **row} for number, row in enumerate(rows)]
    return files


def _math_row(draw: random.Random, a: int, b: int, denominator: int, *, supervised: bool) -> Row:
    """Solutions are not reduced to lowest terms, and answers are: equal by mathematics, not as texts."""
    if denominator == 1:
        row: Row = {"problem": f"{a}+{b}", "level": 1}
        written: Callable[[int], str] = str
    else:
        row = {"problem": f"({a}+{b})/{denominator}", "level": 2}
        written = lambda numerator: f"\\frac{{{numerator}}}{{{denominator}}}"  # noqa: E731
    if supervised:
        return row | {"solution": f"\\boxed{{{written(_perhaps_wrong(draw, a + b))}}}"}
    common = math.gcd(a + b, denominator)
    numerator, denominator = (a + b) // common, denominator // common
    return row | {"answer": str(numerator) if denominator == 1 else f"\\frac{{{numerator}}}{{{denominator}}}"}


def _parts[T](draw: random.Random, problems: Sequence[T], *sizes: int) -> list[list[T]]:
    """Parts of these sizes, without a problem in two of them."""
    chosen = draw.sample(problems, sum(sizes))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [chosen[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _perhaps_wrong(draw: random.Random, answer: int) -> int:
    """The answer, or one that is off by one or by ten."""
    if draw.random() >= WRONG:
        return answer
    return draw.choice([other for by in (1, 10) for other in (answer - by, answer + by) if other >= 0])


if __name__ == "__main__":
    sys.exit(main())
