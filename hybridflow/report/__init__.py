"""A run's metrics as one HTML page: what was written, the plots as data, their drawings, the page."""
