"""Names of metrics, sinks, the timeline and samples of devices."""
