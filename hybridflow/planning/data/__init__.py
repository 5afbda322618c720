"""Prompts and held-out sets of a recipe, read before a run starts."""
