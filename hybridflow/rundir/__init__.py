"""The files of a run's directory, its lock, and atomic writes."""
