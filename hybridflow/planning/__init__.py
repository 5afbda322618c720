"""Checks and estimates of a run before anything starts: its recipe, data and memory."""
