"""Processes of a run: how they end, and what ends them."""
