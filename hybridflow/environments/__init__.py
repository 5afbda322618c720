"""Environments: what a policy interacts with in episodes of several turns."""
