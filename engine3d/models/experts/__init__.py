"""A layer of experts: router, load balancing, fused computation."""
