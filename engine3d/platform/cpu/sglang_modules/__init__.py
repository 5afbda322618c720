"""Parts of SGLang that have no implementation for a CPU, or another one."""
