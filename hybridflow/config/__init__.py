"""The recipe: its settings, YAML and overrides, error messages."""
