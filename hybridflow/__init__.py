"""HybridFlow: reinforcement learning of language models as a dataflow of roles, each with its own parallel layout."""

__version__ = "0.1.0"
