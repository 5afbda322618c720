"""`hybridflow init`: a recipe of one's own."""
