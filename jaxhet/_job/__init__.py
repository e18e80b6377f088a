"""Members of a job: the coordinator, what the processes say about themselves, their connections."""
