"""What each side of a transfer holds: boxes of HuggingFace tensors in buffers."""
