"""Attention around its core: fused norms and rotary embedding of queries and keys."""
