"""Losses, what they are made of, and their statistics: pure functions of tensors."""
