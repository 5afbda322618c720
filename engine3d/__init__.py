"""The 3D-parallel engine: Megatron-Core models that train and SGLang engines that generate. Knows nothing of Ray.

A package imports those to the right of it, never one to the left or beside it, nor in a function:

    checkpoint | memory > training | rollout > reshard > models > platform > startup | stores > errors, layout, ...
"""
