"""From Megatron-Core's shards straight into SGLang's: the plan, what carries it, and the proof that it is right."""
