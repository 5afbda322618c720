"""Facts of hosts, and refusals of a set of them before a run."""
