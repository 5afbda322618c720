"""Kernels of the CUDA platform in Triton."""
