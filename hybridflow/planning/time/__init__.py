"""Seconds of each phase of a step, from sizes and from rates of hardware."""
