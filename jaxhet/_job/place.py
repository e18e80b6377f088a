"""The options that tell which process of which job this is, before it asks the coordinator."""

from jaxhet._config import Config
from jaxhet._errors import UsageError
from jaxhet._job import announced

UNASSIGNED = -1  # a process id, or a number of processes, that the coordinator gives


def complete(config: Config) -> Config:
    """Derives the process id and the number of processes where islands and sizes are known.

    Args:
      config: The options, as given and detected.

    Returns:
      The options; `process_id` is None where the coordinator gives it out, and so may be
      `num_processes`.

    Raises:
      UsageError: Something is missing, or contradicts the islands that were announced.
    """
    _check_given(config)
    _check_island(config)
    config = config.filled(_derived(config))
    process, count = config.process_id, config.num_processes
    total = sum(announced.sizes(config.islands).values())
    if total and count != total:
        raise UsageError(
            f"num_processes={count}, and the islands {','.join(config.islands)} have {total}"
            " processes; leave num_processes out, or announce the islands' true sizes"
        )
    if process is not None and count is not None and process >= count:
        raise UsageError(
            f"process_id={process} is not one of the job's {count} processes; ids run from 0 to"
            f" {count - 1}"
        )
    return config


def name(config: Config) -> str:
    """Name of this process for errors."""
    if config.process_id is not None:
        return f"process {config.process_id}"
    return f"process {config.island_process_id} of island {config.island!r}"


def _check_given(config: Config) -> None:
    given = config.process_id is not None
    is_counted = config.num_processes is not None or bool(announced.sizes(config.islands))
    absent = {
        "coordinator_address": config.coordinator_address is None,
        "num_processes": given and not is_counted and not config.launched,
        "process_id": not given and config.island_process_id is None,
        "island": not given and bool(config.islands) and config.island is None,
    }
    if name := next((name for name, is_absent in absent.items() if is_absent), None):
        raise UsageError(
            f"no {name}: pass it to jaxhet.initialize, set JAXHET_{name.upper()}, or start the"
            " program with `jaxhet launch`"
        )


def _check_island(config: Config) -> None:
    declared = announced.names(config.islands)
    in_one = config.process_id is not None or config.island is not None
    if declared and in_one and config.island not in declared:
        raise UsageError(
            f"island {config.island!r} is not one of the declared islands {', '.join(declared)}"
        )


def _derived(config: Config) -> dict[str, int]:
    """Options that follow from the sizes of the islands, or from their absence."""
    sizes = announced.sizes(config.islands)
    derived: dict[str, int] = {}
    if sizes and config.num_processes is None:
        derived["num_processes"] = sum(sizes.values())
    if config.process_id is None and (index := config.island_process_id) is not None:
        if sizes and config.island is not None:
            derived["process_id"] = announced.process_id(sizes, config.island, index)
        elif config.island is None:  # one island, or one for each platform
            derived["process_id"] = index
    return derived
