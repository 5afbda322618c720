"""Final answers of responses as votes, for the majority of several responses to a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.mathematics import final_answer

NO_VOTE = -1
"""Vote of a response without an answer."""


def votes(texts: Sequence[str], config: RewardConfig) -> list[int]:
    """Number each text by its final answer, from 0. Equal answers have equal numbers.

    If one of the functions is `math`, the answer is the one that it extracts. Answers are equal if they are written
    alike: 1/2 and 0.5 are two. Else the answer is the complete text without white space around it.

    Args:
        texts: of responses.
        config: the functions that score them.
    """
    extract = next(
        (function.arguments.get("extract", "boxed") for function in config.functions if function.path == "math"), None
    )
    answers = [text.strip() or None if extract is None else final_answer(text, extract) for text in texts]
    return [NO_VOTE if answer is None else _number(answer) for answer in answers]


def _number(answer: str) -> int:
    digest = hashlib.blake2b(answer.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # as a signed number of 64 bits, it is not negative
