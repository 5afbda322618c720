"""Tokenizers: a generated one of characters, and any HuggingFace tokenizer directory."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from engine3d.errors import UserError, shortened
from engine3d.input_files import read_json_object
from engine3d.startup.lazy_imports import functions_later
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer_files import check_tokenizer_files, check_vocabularies, one_reason

with functions_later("transformers.modeling_gguf_pytorch_utils", "load_gguf_checkpoint"):  # it imports torch
    from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, END_OF_MESSAGE = "<pad>", "<bos>", "<eos>", "<|end|>"
CHAT_CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))
"""Every character that the tokenizer of `make_chat_tokenizer` has."""
_CHAT_ROLES = ("system", "user", "assistant", "tool")
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


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


def make_chat_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Write a HuggingFace tokenizer of characters with a chat template into `directory`, and load it from there.

    Ids: 0 pad, 1 beginning of sequence, 2 end of a message and of a sequence, then one for the beginning of the
    messages of each role, the line feed, and the printable characters of ASCII in their order.
    """
    tokens = [PAD_TOKEN, BOS_TOKEN, END_OF_MESSAGE, *(f"<|{role}|>" for role in _CHAT_ROLES), *CHAT_CHARACTERS]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=END_OF_MESSAGE,
        additional_special_tokens=[f"<|{role}|>" for role in _CHAT_ROLES],
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    return load_tokenizer(directory)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Tokens that decoding leaves out of a text by default."""
    return tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)


def response_texts(
    tokenizer: PreTrainedTokenizerBase, responses: Sequence[list[int]], *, keep_special_tokens: bool
) -> list[str]:
    """The texts of responses.

    Args:
        responses: (B,) token ids.
        keep_special_tokens: keep special tokens but for the end-of-sequence and pad tokens at the end.
    """
    if keep_special_tokens:
        responses = [_without_end(tokenizer, tokens) for tokens in responses]
    return tokenizer.batch_decode(list(responses), skip_special_tokens=not keep_special_tokens)


def _without_end(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    count = len(tokens)
    while count and tokens[count - 1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        count -= 1
    return tokens[:count]


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a HuggingFace tokenizer from a directory, never from the network.

    Its pad token is the end-of-sequence token where it has none. Raises UserError if there is none to load, or if it
    has no end-of-sequence token.
    """
    if not os.path.lexists(directory / "tokenizer_config.json"):
        raise UserError(f"no tokenizer in {directory}: expected tokenizer_config.json and the files it names")
    config = check_tokenizer_files(directory)
    try:
        tokenizer = _tokenizer_class(config, directory).from_pretrained(str(directory), local_files_only=True)
        end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    except Exception as error:  # transformers and tokenizers raise whatever their parsing of these files comes upon
        check_vocabularies(directory)
        reason = shortened(one_reason(error), 300)
        raise UserError(f"cannot load the tokenizer in {directory}: transformers refuses its files: {reason}") from None
    if end is None:
        raise UserError(f"the tokenizer in {directory} has no eos_token, expected one in tokenizer_config.json")
    if padding is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_OTHER_CLASS = ("qwen2",)
"""Families whose models have another tokenizer class than their files name, in transformers' tokenization_auto."""


def _tokenizer_class(config: dict[str, Any], directory: Path) -> Any:
    """The class that transformers finds for a tokenizer, without a second of imports where its config names it."""
    named = config.get("tokenizer_class") if "auto_map" not in config else None
    if named == PreTrainedTokenizerFast.__name__:
        model = directory / "config.json"
        if not (model.is_file() and read_json_object(model).get("model_type") in _OTHER_CLASS):
            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, max_tokens: int
) -> list[list[int]]:
    """The token ids of each example's prompt, as `encode_prompt` makes them.

    Raises UserError naming the prompt that the tokenizer cannot encode, that has no token or more than `max_tokens`.
    """
    encoded = _encode_each(tokenizer, examples)
    for index, (example, tokens) in enumerate(zip(examples, encoded, strict=True)):
        if not 1 <= len(tokens) <= max_tokens:
            raise UserError(
                f"prompt {index} ({shortened(example.prompt, 40)!r}) has {len(tokens)} tokens, "
                f"expected 1 to {max_tokens}"
            )
    return encoded


def _encode_each(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> list[list[int]]:
    """The token ids of each example's prompt. Raises UserError naming the one that cannot be encoded."""
    if not examples:
        return []
    try:
        return encode_prompts_together(tokenizer, [example.prompt for example in examples])
    except Exception:  # one of them fails: find it
        return [encode_prompt(tokenizer, example.prompt, f"prompt {index}") for index, example in enumerate(examples)]


def fit_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, max_tokens: int, policy: OverlongPolicy
) -> tuple[list[Example], list[list[int]], int]:
    """The examples that are kept, the token ids of their prompts, and how many prompts were too long.

    Args:
        tokenizer: special tokens that it puts before a prompt are kept where the prompt is cut.
        examples: with the prompts.
        max_tokens: of a prompt.
        policy: for those that have more.

    Raises:
        UserError: as `encode_prompts`, but for prompts that the policy has an answer to.
    """
    if policy == "refuse":
        return list(examples), encode_prompts(tokenizer, examples, max_tokens=max_tokens), 0
    kept, encoded, overlong = [], [], 0
    for index, (example, tokens) in enumerate(zip(examples, _encode_each(tokenizer, examples), strict=True)):
        if not tokens:
            raise UserError(f"prompt {index} ({shortened(example.prompt, 40)!r}) has no tokens, expected at least one")
        if len(tokens) > max_tokens:
            overlong += 1
            if policy == "drop":
                continue
            encoded.append(cut(tokenizer, example.prompt, tokens, max_tokens, policy))
        else:
            encoded.append(tokens)
        kept.append(example)
    return kept, encoded, overlong


def cut(
    tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[int], max_tokens: int, policy: OverlongPolicy
) -> list[int]:
    """Cut the token ids of a prompt's text to `max_tokens`. Special tokens before it are kept."""
    if policy == "cut_middle":
        return middle_cut(tokens, max_tokens)
    if policy == "cut_right":
        return tokens[:max_tokens]
    encoded = tokenizer([text], return_special_tokens_mask=not tokenizer.is_fast)
    before = min((_special_around(tokenizer, encoded, 0) or (0, 0))[0], max_tokens - 1)
    return [*tokens[:before], *tokens[len(tokens) - (max_tokens - before) :]]


def middle_cut(items: Sequence[int], most: int) -> list[int]:
    """First and last items, `most` together; of an odd number one more at the beginning."""
    last = most // 2
    return [*items[: most - last], *(items[-last:] if last else [])]


def encode_answers(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, max_tokens: int
) -> list[list[int]]:
    """The token ids of each example's answer with the end-of-sequence token: the responses of supervised training.

    Raises UserError as `encode_prompts` does; `max_tokens` counts the end-of-sequence token.
    """
    if not examples:
        return []
    try:
        texts = tokenizer([example.answer for example in examples], add_special_tokens=False)["input_ids"]
    except Exception:  # one of them fails: find it
        texts = None
    if texts is None or _puts_blank_before(tokenizer):
        texts = [
            encode_continuation(tokenizer, example.answer, f"answer {index}") for index, example in enumerate(examples)
        ]
    encoded = [ended(tokenizer, list(tokens)) for tokens in texts]
    for index, (example, tokens) in enumerate(zip(examples, encoded, strict=True)):
        if len(tokens) > max_tokens:
            raise UserError(
                f"answer {index} ({shortened(example.answer, 40)!r}) has {len(tokens)} tokens, "
                f"expected at most {max_tokens}"
            )
    return encoded


def ended(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """The token ids of a response with the end-of-sequence token, unless its text already ends with one.

    White space and other such tokens after it are dropped: a response ends where the model is to stop.
    """
    end = tokenizer.eos_token_id
    left = len(tokens)
    while left and (tokens[left - 1] == end or _is_blank(tokenizer, tokens[left - 1])):
        left -= 1
    return [*tokens[: left + tokens[left:].index(end)], end] if end in tokens[left:] else [*tokens, end]


@functools.lru_cache(maxsize=4096)
def _is_blank(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """True if the token is white space, or special and without a text."""
    return not str(tokenizer.decode([token])).strip()


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> list[int]:
    """The token ids of a text as a prompt. Errors as of `encode_text`."""
    try:
        return encode_prompts_together(tokenizer, [text])[0]
    except Exception as error:  # the tokenizers library raises no narrower class
        raise _not_encoded(text, name, error) from None


def encode_prompts_together(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of texts as prompts.

    They begin with the special tokens that the tokenizer puts before a text, and end with the text: a model that reads
    an end-of-sequence token or a separator after its prompt does not continue it. A text without tokens of its own has
    none. Raises what the tokenizer raises.
    """
    encoded = tokenizer(list(texts), return_special_tokens_mask=not tokenizer.is_fast)
    counts = (_special_around(tokenizer, encoded, index) for index in range(len(texts)))
    around = (count for count in counts if count is not None)
    # One that is not fast counts special tokens of the text itself among those around it.
    of_texts = list(itertools.islice(around, 1) if tokenizer.is_fast else around)
    if not of_texts:  # no text has a token
        return [[] for _ in texts]
    before, after = map(min, zip(*of_texts, strict=True))
    ends = [len(tokens) - after for tokens in encoded["input_ids"]]
    return [list(tokens[:end]) if end > before else [] for tokens, end in zip(encoded["input_ids"], ends, strict=True)]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> list[int]:
    """The token ids of a text, without special tokens that it does not hold itself.

    Raises:
        UserError: the text cannot be encoded. Names it.
    """
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # the tokenizers library raises no narrower class
        raise _not_encoded(text, name, error) from None


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> list[int]:
    """The token ids of a text that follows another one.

    As of `encode_text`, but without the blank that some tokenizers (SentencePiece's, such as Llama 2's and Mistral's)
    put before each text: in the middle of a sequence no model writes it.

    Raises:
        UserError: the text cannot be encoded. Names it.
    """
    tokens = encode_text(tokenizer, text, name)
    if not tokens or not _puts_blank_before(tokenizer):
        return tokens
    # A line's end joins no token of what follows, where a tokenizer has it as a byte.
    before, both = (encode_text(tokenizer, given, name) for given in ("\n", "\n" + text))
    return both[len(before) :] if both[: len(before)] == before else tokens


def without_end_of(turn: Sequence[int], following: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that follow a turn, without the end of its message if the policy has written that itself.

    A chat template may put blanks before that end, as Llama 2's does.
    """
    if not turn or turn[-1] not in following:
        return following
    index = following.index(turn[-1])
    is_end = turn[-1] == tokenizer.eos_token_id and all(_is_blank(tokenizer, token) for token in following[:index])
    return following[index + 1 :] if index == 0 or is_end else following


@functools.lru_cache(maxsize=16)
def _puts_blank_before(tokenizer: PreTrainedTokenizerBase) -> bool:
    if not tokenizer.is_fast:
        return bool(getattr(tokenizer, "add_prefix_space", False))
    backend = tokenizer.backend_tokenizer
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    return any(_has_blank(json.loads(step.__getstate__())) for step in steps)


def _has_blank(step: Any) -> bool:
    """True if a normalizer or pre-tokenizer, or one of its steps, puts a blank before a text."""
    if isinstance(step, list):
        return any(map(_has_blank, step))
    if not isinstance(step, dict):
        return False
    match step.get("type"):
        case "Prepend":
            return True
        case "Metaspace":
            return bool(step.get("prepend_scheme") != "never")
        case "ByteLevel":
            return bool(step.get("add_prefix_space"))
    return any(map(_has_blank, step.values()))


def _not_encoded(text: str, name: str, error: Exception) -> UserError:
    return UserError(f"{name} ({shortened(text, 40)!r}) cannot be encoded: {error}")


def _special_around(tokenizer: PreTrainedTokenizerBase, encoded: BatchEncoding, index: int) -> tuple[int, int] | None:
    """Number of special tokens that a tokenizer puts before and after a text; None for a text without tokens.

    Args:
        tokenizer: of the texts.
        encoded: texts, with these tokens.
        index: of one of them.
    """
    if tokenizer.is_fast:
        added = [sequence is None for sequence in encoded.sequence_ids(index)]
    else:
        added = [bool(special) for special in encoded["special_tokens_mask"][index]]
    return (added.index(False), added[::-1].index(False)) if False in added else None
