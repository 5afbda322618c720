"""Clients of JSON over HTTP."""
