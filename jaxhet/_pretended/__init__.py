"""Compilation for GPUs that are not there."""
