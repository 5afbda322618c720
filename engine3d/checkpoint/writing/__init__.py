"""Checkpoints on their way to the disk."""
