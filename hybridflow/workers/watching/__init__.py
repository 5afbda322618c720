"""Progress of calls on ranks, and the wait for it."""
