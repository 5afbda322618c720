"""Samples in a run's directory: trained ones, and texts of evaluations."""
