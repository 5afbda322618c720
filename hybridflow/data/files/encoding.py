"""Rows of files as prompts with token ids, which are kept on disk."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import FilesConfig, FileSource
from hybridflow.data.prompts import Prompts


def encode_files(
    sources: Sequence[FileSource],
    config: FilesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    policy: OverlongPolicy,
) -> Prompts:
    """The prompts of some sources, one source after the other.

    Args:
        sources: with their files.
        config: how messages become prompts, and which lengths are let through.
        tokenizer: of the model.
        max_tokens: of a prompt.
        policy: for prompts that have more.

    Raises:
        UserError: naming file and row of what cannot serve.
    """
    raise NotImplementedError
