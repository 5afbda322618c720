"""The controller's side of a stream of rollouts: settings, plan, groups, engines, events and metrics."""
