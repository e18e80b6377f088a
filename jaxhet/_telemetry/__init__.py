"""Reports of a running job: metrics and traces."""
