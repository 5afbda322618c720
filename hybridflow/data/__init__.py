"""Data: prompts and their answers, the order in which they are drawn, tokenizers."""
