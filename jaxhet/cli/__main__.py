"""`python -m jaxhet.cli`: the command `jaxhet` where its script is not on the path."""

from jaxhet.cli import main

main()
