"""A launch on several hosts: one agent a host, their supervisor on host 0, and the command that it runs."""
