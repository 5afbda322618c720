"""Memory estimate of a run."""
