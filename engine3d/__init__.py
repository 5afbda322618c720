"""3D engine."""
