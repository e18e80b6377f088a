"""Parts that this machine can use, and why not more, for `jaxhet doctor`.

Each file examines one part. Readers of /sys, /proc and /dev get a root folder, which is `/` except
in tests.
"""
