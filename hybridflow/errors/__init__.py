"""Errors, log lines, and redaction of secrets."""
