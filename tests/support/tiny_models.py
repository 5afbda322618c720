"""Tiny models with random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 128
EOS_TOKEN_ID = 1
MAX_POSITIONS = 256


def make_qwen3_moe(directory: Path, seed: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 2 layers and 4 experts in fp32, saved as a HuggingFace model directory without a tokenizer.

    Its weights are large enough that its distributions are far from uniform, and differ clearly from seed to seed.
    """
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # type: ignore[call-arg]  # an attribute that the generated signature lacks
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=2,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model
