"""Which elements go from which rank to which, and what carries them."""
