"""How samples are produced."""
