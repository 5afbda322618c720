"""Algorithms: pure functions of tensors, one file a family."""
