"""Advantages: pure functions of tensors."""
