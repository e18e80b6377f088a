"""The start of processes: their environment and their GPUs."""
