"""Code that runs inside SGLang's scheduler processes."""
