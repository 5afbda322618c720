"""Streams of rollouts: the controller's side, the driver's end, and their messages."""
