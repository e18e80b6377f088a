"""Reports of a running job: metrics and traces."""

TRACE_FILE = "jaxhet-{}.trace.json"  # name for one process, or a pattern with `*`
