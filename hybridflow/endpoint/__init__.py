"""Endpoint of the run, through which agents play: sessions of requests as trees of tokens."""
