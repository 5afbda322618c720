"""Containers of samples, in one process and where they were made."""
