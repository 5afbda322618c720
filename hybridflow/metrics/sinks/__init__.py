"""Destinations of a run's metrics and samples."""
