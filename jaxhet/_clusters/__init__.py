"""Which scheduler started this process, and what its variables say about the job.

A module for each scheduler exports a `SCHEDULER`; their order is JAX's (`jax._src.clusters`).
"""

from jaxhet._clusters.detect import METHODS as METHODS
from jaxhet._clusters.detect import SCHEDULERS as SCHEDULERS
from jaxhet._clusters.detect import detect as detect
from jaxhet._clusters.detect import resolve as resolve
