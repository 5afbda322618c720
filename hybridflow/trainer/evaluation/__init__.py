"""Evaluations: in a run and without training."""
