"""Quantised tensors: as they are stored, and the kernel that quantises them."""
