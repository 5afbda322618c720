"""The public Python API, as docs/api.md shows it. Users import its names from `hybridflow`."""
