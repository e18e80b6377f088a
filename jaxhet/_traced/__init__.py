"""Programs as JAX traced them: numbers of equations, and descriptions of functions."""
