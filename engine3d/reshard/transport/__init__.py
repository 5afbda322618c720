"""Transports that carry out a plan: copies into memory of other processes, and messages."""
