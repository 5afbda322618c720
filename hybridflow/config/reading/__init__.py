"""Settings read from YAML and overrides, and messages about what cannot be read."""
