"""Agents: programs that talk to the policy as to a server of completions."""
