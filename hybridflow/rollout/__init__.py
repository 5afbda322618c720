"""Production of samples: the stream of groups, its engines and its checkpoints."""
