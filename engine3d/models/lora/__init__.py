"""Low-rank adapters of a model's linear layers (LoRA)."""
