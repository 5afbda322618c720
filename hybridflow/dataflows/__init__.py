"""One step of each algorithm, in a file of its own; `algorithms/registry.py` names them."""
