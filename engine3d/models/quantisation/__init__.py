"""Quantised tensors: as they are stored, and as they are computed with."""
