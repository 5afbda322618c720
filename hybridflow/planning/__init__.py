"""What is known of a run before anything starts: checks of a recipe, and what its memory will hold."""
