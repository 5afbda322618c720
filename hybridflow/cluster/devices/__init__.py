"""Device maps, GPUs, who uses them and what they do."""
