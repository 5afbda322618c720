"""Plan of a transfer: which elements go from which rank to which, and over which transport."""
