"""A run as one HTML page: its files, plots and tables as data, and the templates that show them."""
