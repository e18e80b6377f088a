"""GPUs of a job: settings of XLA and JAX, tuned kernels, one set of devices for several vendors."""
