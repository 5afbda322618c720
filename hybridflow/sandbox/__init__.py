"""Untrusted programs: run alone, within limits, with an exact verdict."""
