"""A step of a run once more, from its checkpoint and its stored samples, without engines."""
