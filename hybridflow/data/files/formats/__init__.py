"""Rows of data files, by format, and their columns."""
