"""Models that train over islands: plain JAX and Flax, with `jaxhet` only where a job begins."""
