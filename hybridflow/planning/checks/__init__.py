"""Checks of a recipe before anything starts."""
