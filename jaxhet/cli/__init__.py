"""The command `jaxhet`: thin; each command is a function of a module beside this file."""

from jaxhet.cli._main import main as main
