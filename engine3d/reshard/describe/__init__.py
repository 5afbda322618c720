"""Shards of each side of a transfer: boxes of HuggingFace tensors in buffers."""
