"""Measurement of the rates of this machine for a hardware profile."""
