"""Combinations of settings that are refused."""
