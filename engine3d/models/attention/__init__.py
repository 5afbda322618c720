"""What attention does around its core in one step: norms and rotary embedding of queries and keys."""
