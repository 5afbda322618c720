"""Start of a run: its roles, their workers, and the supervised warm-up."""
