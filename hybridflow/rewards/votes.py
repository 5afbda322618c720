"""Final answers of responses as votes, for the majority of several responses to a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.mathematics import final_answer

NO_VOTE = -1
"""Of a response without an answer."""


def votes(texts: Sequence[str], config: RewardConfig) -> list[int]:
    """For each text a number that stands for its final answer, from 0; equal answers have equal ones.

    Where one of the functions is `math`, the answer is what this extracts, and equal are answers that are written
    alike: 1/2 and 0.5 are two. Otherwise it is the whole text without white space around it.

    Args:
        texts: of responses.
        config: the functions that score them.
    """
    extract = next((each.arguments.get("extract", "boxed") for each in config.functions if each.path == "math"), None)
    answers = [text.strip() or None if extract is None else final_answer(text, extract) for text in texts]
    return [NO_VOTE if answer is None else _number(answer) for answer in answers]


def _number(answer: str) -> int:
    digest = hashlib.blake2b(answer.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # as a signed number of 64 bits, it is not negative
