"""Samples of a run: its store, their texts, and responses that the data have."""
