"""Rewards that a server gives: any over HTTP, and a judge's by an OpenAI-compatible endpoint."""
