"""Files of a HuggingFace directory: configurations, tensors, and what is made of them."""
