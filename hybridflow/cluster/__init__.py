"""Ray, hosts, GPUs, and the watchdog of a run's processes."""
