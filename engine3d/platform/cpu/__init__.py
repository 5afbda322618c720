"""The CPU, where the same Megatron-Core and the same SGLang run over gloo."""
