"""The reward `code`: programs of a policy against tests, in a sandbox."""
