"""Digests of tensors, and checksums of the chunks that hold them."""
