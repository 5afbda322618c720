"""Tools: an environment in which a policy calls Python functions before it answers."""
