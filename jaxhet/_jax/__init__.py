"""JAX's internals and jaxlib: the only files that use what JAX does not document."""
