"""State of a run in its directory: who holds it, where it is, and why it failed."""
