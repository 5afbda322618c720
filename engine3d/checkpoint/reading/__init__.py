"""Checkpoints read, verified and compared."""
