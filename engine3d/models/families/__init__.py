"""One file a family: its sizes and its weight rules."""
