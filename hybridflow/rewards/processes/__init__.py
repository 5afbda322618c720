"""Processes of reward functions: their start, their calls, their limits."""
