"""A reward that differs between the responses of a policy that knows nothing."""

from __future__ import annotations


def score(generated_texts: list[str]) -> list[float]:
    return [sum(map(ord, text)) % 11 / 4 for text in generated_texts]
