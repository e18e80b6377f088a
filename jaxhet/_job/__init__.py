"""A job: the coordinator, descriptions of the processes, and their connections."""
