"""Makes the Parquet files next to it, of chat.yaml, math.yaml, code.yaml, game.yaml and tools.yaml.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.own_tools import price

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
WRONG = 0.3
"""Share of the supervised answers that are wrong, by one or by ten."""
WITH_FULL_STOP = 0.2
"""Share of the supervised answers of chat.yaml that are no digits alone."""
LARGEST_OPERAND = 49
DENOMINATORS = range(2, 10)
LARGEST_NUMERATOR = 29
LARGEST_FACTOR, LARGEST_SUMMAND = 9, 199
TESTED, WRONG_PROGRAMS = (4, 9), 0.5
"""Arguments of the functions of code.yaml in test cases, and the share of its supervised expressions that are wrong."""
LETTERS, GUESSING = "abcdefghijklmnopqrstuvwxyz", 0.6
"""Letters of articles in tools.yaml, and the share of its supervised conversations that guess a price."""
NUMBERS, GUESSES, HEEDING = range(1, 8), 3, 0.5
"""Numbers to guess in game.yaml, guesses of a game, and the share of supervised guesses that heed all answers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files, and write none")
    parser.add_argument("--directory", type=Path, default=HERE, help="of the files; that of this script if not given")
    arguments = parser.parse_args()
    files = {**chat_files(), **math_files(), **code_files(), **game_files(), **tools_files()}
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
        supervised, train, test = _splits(draw, problems, 600, 384, 128)
        conversations += [
            {"messages": [*_user(a, b), {"role": "assistant", "content": _chat_answer(draw, a + b)}]}
            for a, b in supervised
        ]
        for split, some in (("train", train), ("test", test)):
            files[f"chat-{kind}-{split}.parquet"] = [
                {"id": f"{kind}-{split}-{number}", "messages": _user(a, b), "answer": str(a + b)}
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
    integers = [(a, b, 1) for a in numerators for b in numerators]
    splits = zip(_splits(draw, fractions, 2400, 1200, 192), _splits(draw, integers, 400, 300, 64), strict=True)
    files = {}
    for split, (some, others) in zip(("sft", "train", "test"), splits, strict=True):
        rows = [_math_row(draw, *problem, supervised=split == "sft") for problem in [*some, *others]]
        draw.shuffle(rows)
        files[f"math-{split}.parquet"] = [{"id": f"{split}-{number}", **row} for number, row in enumerate(rows)]
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


def code_files() -> dict[str, list[Row]]:
    """Linear functions by their value at 0 and their step, with expressions and test cases, by file."""
    draw = random.Random(0)
    functions = [(a, b) for a in range(1, LARGEST_FACTOR + 1) for b in range(LARGEST_SUMMAND + 1)]
    files = {}
    for split, some in zip(("sft", "train", "test"), _splits(draw, functions, 1200, 400, 64), strict=True):
        rows = [_code_row(draw, *function, supervised=split == "sft") for function in some]
        files[f"code-{split}.parquet"] = [{"id": f"{split}-{number}", **row} for number, row in enumerate(rows)]
    return files


def _code_row(draw: random.Random, a: int, b: int, *, supervised: bool) -> Row:
    row: Row = {"problem": f"f(0)={b}, step {a}"}
    if supervised:
        return row | {"solution": f"{_perhaps_wrong(draw, a, WRONG_PROGRAMS)}*x+{b}"}
    return row | {"tests": [f"assert f({x}) == {a * x + b}" for x in TESTED]}


def game_files() -> dict[str, list[Row]]:
    """Games of a player who heeds half of the answers, and one prompt for each number to guess."""
    draw = random.Random(0)
    prompt = {"role": "user", "content": f"{NUMBERS[0]}-{NUMBERS[-1]}"}
    games = [[prompt, *_careless_game(draw, draw.choice(NUMBERS))] for _ in range(3000)]
    return {
        "game-sft.parquet": [{"messages": messages} for messages in games],
        "game-train.parquet": [{"messages": [prompt], "answer": str(number)} for number in NUMBERS],
    }


def _careless_game(draw: random.Random, number: int) -> list[Row]:
    messages: list[Row] = []
    possible = list(NUMBERS)
    for turn in range(GUESSES):
        guess = draw.choice(possible if draw.random() < HEEDING else NUMBERS)
        possible = [other for other in possible if (other > guess) == (number > guess) and other != guess] or [number]
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn == GUESSES - 1:
            break
        messages.append({"role": "user", "content": "+" if guess < number else "-"})
    return messages


def tools_files() -> dict[str, list[Row]]:
    """Articles and their prices: supervised conversations, of which most guess, and training prompts."""
    draw = random.Random(0)
    articles = [a + b for a in LETTERS for b in LETTERS]
    supervised, train = _splits(draw, articles, len(articles) - 256, 256)
    conversations = [_tools_row(draw, draw.choice(supervised)) for _ in range(4000)]
    return {
        "tools-sft.parquet": [{"messages": messages} for messages in conversations],
        "tools-train.parquet": [{"messages": [_of_user(article)], "answer": price(article)} for article in train],
    }


def _of_user(content: str) -> Row:
    return {"role": "user", "content": content, "tool_calls": None}


def _tools_row(draw: random.Random, article: str) -> list[Row]:
    answer: Row = {"role": "assistant", "content": price(article), "tool_calls": None}
    if draw.random() < GUESSING:
        return [_of_user(article), answer | {"content": str(draw.randrange(10, 100))}]
    function = {"name": "price", "arguments": {"article": article}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [_of_user(article), call, {"role": "tool", "content": price(article), "tool_calls": None}, answer]


def _splits[T](draw: random.Random, problems: Sequence[T], *sizes: int) -> list[list[T]]:
    """Parts of these sizes, without a problem in two of them."""
    chosen = draw.sample(problems, sum(sizes))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [chosen[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _perhaps_wrong(draw: random.Random, answer: int, share: float = WRONG) -> int:
    """The answer, or one that is off by one or by ten, in this share of cases."""
    if draw.random() >= share:
        return answer
    return draw.choice([other for by in (1, 10) for other in (answer - by, answer + by) if other >= 0])


if __name__ == "__main__":
    sys.exit(main())
