"""Attention of SGLang's schedulers: shared pages, groups of ranks."""
