"""Rewards: functions of the generated texts."""
