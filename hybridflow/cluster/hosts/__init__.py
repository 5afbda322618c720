"""The hosts of a run."""
