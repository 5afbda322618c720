"""Tokenizers with chat templates of several kinds, and prompts from files of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import FilesConfig
from hybridflow.data.files.encoding import encode_files
from hybridflow.data.files.prompts import FilePrompts
from hybridflow.data.tokenizer import load_tokenizer

QWEN_LIKE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' and not loop.last and '</think>' in message.content %}"
    "{{- message.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{- message.content }}{%- endif %}"
    "{%- if message.tool_calls %}{{- message.tool_calls | tojson }}{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Takes enable_thinking, and leaves earlier thinking out."""
WITHOUT_SYSTEM = (
    "{% for message in messages if message.role != 'system' %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{{ raise_exception('System role not supported') }}"


def bpe_tokenizer(directory: Path, chat_template: str | None = QWEN_LIKE) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer, trained on a line of text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["system user assistant What is the sum of one and two? think the answer"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )
    tokenizer.save_pretrained(directory)
    return load_tokenizer(directory)


def read_prompts(
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    *train: dict[str, Any],
    max_tokens: int = 1000,
    policy: OverlongPolicy = "refuse",
    **settings: Any,
) -> FilePrompts:
    """The prompts of some sources, with a cache in a directory of the test."""
    config = FilesConfig.model_validate({"train": list(train), "cache": str(cache), **settings})
    return encode_files(config.train, config, tokenizer, max_tokens=max_tokens, policy=policy)


def texts(tokenizer: PreTrainedTokenizerBase, prompts: FilePrompts) -> list[str]:
    """All prompts, decoded."""
    return [str(tokenizer.decode(tokens)) for tokens in prompts.tokens]
