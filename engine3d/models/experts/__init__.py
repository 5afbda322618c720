"""What a layer of experts does: its router, its losses, and its products in one step where they can be."""
