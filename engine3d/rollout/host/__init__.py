"""The process that owns an SGLang engine, and its client's side."""
