"""Ray actors as one group: calls and futures, transfer protocols, turns on shared devices, diagnosis of failures."""
