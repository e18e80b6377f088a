"""Parts that this machine can use, and why not more, for `jaxhet doctor`.

Each file finds out about one thing. What comes from /sys, /proc and /dev is a function of a root
folder, `/` but for tests.
"""
