"""Logs of ranks on hosts that share no disk with host 0."""
