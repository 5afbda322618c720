"""Answers to questions of mathematics: their kinds, how they are read, and when two of them are equal."""
