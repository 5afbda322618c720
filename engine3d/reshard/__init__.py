"""Weight transfer from Megatron-Core's shards straight into SGLang's: plan, transport, and bitwise verification."""
