"""GPUs of a job: settings of XLA and JAX, shared executables, one set of devices for vendors."""
