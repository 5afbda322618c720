"""The 3D-parallel engine: Megatron-Core models that train and SGLang engines that generate. Knows nothing of Ray."""
