"""Conversations in data files, as tokens."""
