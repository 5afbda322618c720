"""Names of the files in a run's directory that more than its writer reads."""

from __future__ import annotations

RECIPE = "recipe.yaml"
"""The recipe with every default written out."""
METRICS = "metrics.jsonl"
"""One JSON object a record: phase, step, figures."""
TIMELINE = "timeline.json"
"""What each rank computed when, for Perfetto or chrome://tracing."""
DEVICES = "devices.jsonl"
"""What each GPU did over time: one JSON object a sample."""
REPORT = "report.html"
"""What `hybridflow report` has drawn of the others."""
