"""What hosts are, and what is wrong with a set of them before a run."""
