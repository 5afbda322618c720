"""Search for layouts and placement of a run on a cluster."""
