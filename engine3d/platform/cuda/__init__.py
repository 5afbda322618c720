"""CUDA devices."""
