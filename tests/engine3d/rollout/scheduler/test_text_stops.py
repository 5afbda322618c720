"""A response ends with the first token by which its text contains a stop, however the text is cut into tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine3d.rollout.scheduler.text_stops import TextStops

MERGES = ["ab", "abc", "</", "answer", ">\n", "\n\n", " a", "é", "</a"]


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, and so are some longer texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longer = [level.pre_tokenize_str(text)[0][0] for text in MERGES]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *longer])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def decode(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.get_vocab()


def tokens_of(text: str, rng: random.Random) -> list[int]:
    """A text, cut into tokens at random."""
    raw = "".join(
        text_bytes for text_bytes, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
    )
    tokens = []
    while raw:
        fitting = [token for token in IDS if raw.startswith(token)]
        chosen = rng.choice(fitting)
        tokens.append(IDS[chosen])
        raw = raw[len(chosen) :]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("stops", [("</answer>",), ("\n\n",), ("é",), (" a", "abc"), ("日本",), ("b ",)])
def test_the_first_token_that_completes_a_stop_is_found(stops: tuple[str, ...]) -> None:
    rng = random.Random(0)
    text_stops = TextStops(decode)
    ended = 0
    for _ in range(60):
        texts = rng.choices(
            ["</answer>", "\n", "\n\n", "é", " a", "ab", "c", "日本", "日", "</", "answer", ">", "b "], k=12
        )
        tokens = tokens_of("".join(texts), rng)
        expected = next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)), None)
        counts = (n for n in range(1, len(tokens) + 1) if text_stops.completed_stop(tokens[:n], stops) is not None)
        assert next(counts, None) == expected
        ended += expected is not None
    assert ended > 0


def test_texts_are_made_only_where_a_stop_may_end() -> None:
    calls: list[list[int]] = []

    def counted(tokens: list[int]) -> str:
        calls.append(tokens)
        return decode(tokens)

    stops = TextStops(counted)
    tokens = [IDS["a"], IDS["b"]] * 50
    for count in range(1, len(tokens) + 1):
        assert stops.completed_stop(tokens[:count], ("xyz",)) is None
    assert calls == [[IDS["a"]], [IDS["b"]]]
