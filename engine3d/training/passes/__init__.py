"""Passes of sequences through a model: micro-batches, routes, log-probs."""
