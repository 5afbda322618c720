"""Stored samples as texts: their tokens, decoded with the run's tokenizer where it has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, check_regular, read_json_object
from hybridflow.rundir.file_names import EXPORT, INITIAL
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe
from hybridflow.rundir.samples.store import SampleFilter, SampleLocation, StoredSample, newest_first, store_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_MOST_BYTES = 512 << 20
_STEPS = 3
_OF_A_STEP = 16
_PLAIN = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend")
"""Classes of transformers that decode by tokenizer.json alone."""


@dataclass(frozen=True)
class StoredText:
    """A sample of a run's store as texts."""

    sample: StoredSample
    prompt: str
    response: str


@dataclass(frozen=True)
class TextOf:
    """Decoder of a run's tokens.

    Args:
        tokenizer: of the run; None if there is none, and texts are the ids of tokens.
        reason: why there is none.
    """

    tokenizer: PreTrainedTokenizerBase | Tokenizer | None
    reason: str = ""

    @classmethod
    def of_run(cls, run: Path) -> TextOf:
        """Take the tokenizer of the model that the run began with, or has exported.

        Raises:
            UserError: the recipe of the run cannot be read.
        """
        path = kept_setting(read_kept_recipe(run), "model.path")
        models = [run / INITIAL, *([Path(path)] if isinstance(path, str) else []), run / EXPORT]
        model = next((model for model in models if (model / "tokenizer_config.json").exists()), None)
        if model is None:
            return cls(None, f"no tokenizer in {' or '.join(map(str, models))}")
        try:
            return cls(_backend(model) or _complete_tokenizer(model))
        except UserError as error:
            return cls(None, str(error))

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _backend(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of tokenizer.json; None if transformers decodes by more than that file."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        described = read_json_object(directory / "tokenizer_config.json", MOST_LIST_BYTES)
        check_regular(path, _MOST_BYTES)
        backend = Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises whatever its parser comes upon; transformers gives the reason
        return None
    added = described.get("added_tokens_decoder")
    is_complete = not isinstance(added, dict) or all(
        index.isascii() and index.isdigit() and backend.id_to_token(int(index)) is not None for index in added
    )
    is_plain = described.get("tokenizer_class") in _PLAIN and "auto_map" not in described
    return backend if is_plain and is_complete and not described.get("clean_up_tokenization_spaces") else None


def _complete_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    from hybridflow.data.tokenizer import load_tokenizer  # takes seconds

    return load_tokenizer(directory)


def read_stored(run: Path) -> list[StoredText]:
    """Read samples of the last steps of a run's store: of the highest and of the lowest rewards, the highest first.

    A prompt has one among the highest and one among the lowest, where there are enough prompts.

    Raises:
        UserError: something in the store cannot be read.
    """
    files = store_of(run)
    newest = {step: files[step] for step in list(files)[-_STEPS:]}
    text_of = TextOf.of_run(run)
    return [
        StoredText(sample, text_of(sample.prompt_tokens), _response(sample, text_of))
        for _, file in newest_first(newest)
        for sample in file.with_tokens(_extremes(file.find(SampleFilter())))
    ]


def _response(sample: StoredSample, text_of: TextOf) -> str:
    """Text of a response. Of an episode one line for each turn, and for what it was answered; a branch is indented."""
    if all(sample.response_mask):
        return text_of(sample.response_tokens)
    lines = []
    for sequence in sample.sequences:
        indent = "    " * sequence.depth
        lines += [f"{indent}{sequence.title}"] if sequence.parent is not None else []
        lines += [f"{indent}{'policy' if drawn else 'observed'}: {text_of(tokens)}" for drawn, tokens in sequence.spans]
    return "\n".join(lines)


def _extremes(samples: Sequence[tuple[SampleLocation, StoredSample]]) -> list[SampleLocation]:
    """Return the positions of the samples of the highest and of the lowest rewards."""

    def reward(entry: tuple[SampleLocation, StoredSample]) -> float:
        value = entry[1].reward
        return -math.inf if value is None or math.isnan(value) else value

    ordered = sorted(samples, key=reward, reverse=True)
    if len(ordered) <= _OF_A_STEP:
        return [location for location, _ in ordered]
    highest = _of_distinct_prompts(ordered, _OF_A_STEP // 2)
    rest = [entry for entry in ordered if entry[0] not in set(highest)]
    return [*highest, *reversed(_of_distinct_prompts(rest[::-1], _OF_A_STEP // 2))]


def _of_distinct_prompts(ordered: Sequence[tuple[SampleLocation, StoredSample]], count: int) -> list[SampleLocation]:
    """Return the first samples in an order, one for a prompt; more for a prompt only if there are too few prompts."""
    first = {sample.prompt: location for location, sample in reversed(ordered)}
    chosen = [location for location, sample in ordered if first[sample.prompt] == location][:count]
    more = [location for location, _ in ordered if location not in set(chosen)]
    chosen = [*chosen, *more[: count - len(chosen)]]
    return [location for location, _ in ordered if location in set(chosen)]
