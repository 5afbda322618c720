"""What messages may show."""
