"""Tokenizers of the tests, each made once."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from hybridflow.data.tokenizer import make_chat_tokenizer

from .tokenizers import bpe_tokenizer


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return bpe_tokenizer(tmp_path_factory.mktemp("bpe"))
