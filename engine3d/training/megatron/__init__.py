"""Megatron-Core's part of a model: its settings, its process groups, its modules."""
