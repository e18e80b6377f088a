"""Sockets between processes: addresses, authentication, encryption. Knows no job and no JAX."""
