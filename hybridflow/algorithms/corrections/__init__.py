"""Corrections of the difference between the policy that sampled and the one that learns."""
