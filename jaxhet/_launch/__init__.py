"""The start of processes: their environment, their GPUs, and processes on other hosts."""
