"""Tokenizers: a character-level one made on the spot, and any HuggingFace tokenizer directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine3d.errors import UserError
from hybridflow.data.tasks import Example

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<bos>", "<eos>"


def make_character_tokenizer(characters: str, directory: Path) -> PreTrainedTokenizerBase:
    """Write a HuggingFace tokenizer with one token a character into `directory`, and load it from there.

    Ids: 0 pad, 1 beginning of sequence, 2 end of sequence, then the characters in the order given. Encoding adds no
    special tokens; a character that is not in the vocabulary is an error, not an unknown token. Raises ValueError for a
    character given twice.
    """
    if len(set(characters)) != len(characters):
        twice = next(character for character in characters if characters.count(character) > 1)
        raise ValueError(f"make_character_tokenizer: character {twice!r} is given more than once")
    tokens = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, *characters]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD_TOKEN, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN
    )
    tokenizer.save_pretrained(directory)
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a HuggingFace tokenizer from a directory, never from the network.

    Its pad token is the end-of-sequence token where it has none. Raises UserError if there is none to load, or if it
    has no end-of-sequence token.
    """
    if not (directory / "tokenizer_config.json").is_file():
        raise UserError(f"no tokenizer in {directory}: expected tokenizer_config.json and the files it names")
    try:
        tokenizer = _tokenizer_class(directory).from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"cannot load the tokenizer in {directory}: {' '.join(str(error).split())[:300]}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {directory} has no eos_token, expected one in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_class(directory: Path) -> Any:
    """What transformers finds for a directory, without a second of imports where the directory names it."""
    facts = json.loads((directory / "tokenizer_config.json").read_text())
    named = facts.get("tokenizer_class") if isinstance(facts, dict) and "auto_map" not in facts else None
    if named == PreTrainedTokenizerFast.__name__:
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, max_tokens: int
) -> list[list[int]]:
    """The token ids of each example's prompt, with the special tokens that the tokenizer itself puts before a prompt.

    Raises UserError naming the prompt that the tokenizer cannot encode, that has no token or more than `max_tokens`.
    """
    encoded = []
    for index, example in enumerate(examples):
        tokens = _encode(tokenizer, example.prompt, f"prompt {index}", special_tokens=True)
        if not 1 <= len(tokens) <= max_tokens:
            raise UserError(
                f"prompt {index} ({_shortened(example.prompt)}) has {len(tokens)} tokens, expected 1 to {max_tokens}"
            )
        encoded.append(tokens)
    return encoded


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, max_tokens: int
) -> list[list[int]]:
    """The token ids of each example's answer with the end-of-sequence token: the responses of supervised training.

    Raises UserError as `encode_prompts` does; `max_tokens` counts the end-of-sequence token.
    """
    encoded = []
    for index, example in enumerate(examples):
        tokens = _encode(tokenizer, example.answer, f"answer {index}", special_tokens=False)
        tokens = [*tokens, tokenizer.eos_token_id]
        if len(tokens) > max_tokens:
            raise UserError(
                f"answer {index} ({_shortened(example.answer)}) has {len(tokens)} tokens, expected at most {max_tokens}"
            )
        encoded.append(tokens)
    return encoded


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, name: str, *, special_tokens: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=special_tokens))
    except Exception as error:  # the tokenizers library raises no narrower class
        raise UserError(f"{name} ({_shortened(text)}) cannot be encoded: {error}") from None


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
