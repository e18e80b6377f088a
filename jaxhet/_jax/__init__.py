"""JAX's internals and jaxlib: no other file uses undocumented parts of JAX."""
