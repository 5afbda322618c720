"""What runs inside SGLang's scheduler processes."""
