"""Reports of a running job: metrics, traces, events for listeners."""
