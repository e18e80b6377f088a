"""The islands that a job announces (option `islands`): names, and the number of processes in each.

With sizes, the process of index i in an island has the process id i plus the sizes of the islands
before it.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jaxhet._errors import UsageError

Sizes = Mapping[str, int]


def names(islands: Sequence[str]) -> tuple[str, ...]:
    """The names in `islands`, each a name or name=processes."""
    return tuple(text.partition("=")[0].strip() for text in islands)


def sizes(islands: Sequence[str]) -> dict[str, int]:
    """The sizes in `islands`, in order; empty if names have no sizes.

    Raises:
      UsageError: A size is not a positive number, only some islands have sizes, or a name
            occurs twice.
    """
    parts = {text: text.partition("=") for text in islands}
    sized = {text: part for text, part in parts.items() if part[1]}
    wrong = [t for t, (name, _, size) in sized.items() if not name.strip() or not _is_size(size)]
    if wrong or (sized and len(sized) != len(islands)):
        malformed = wrong[0] if wrong else next(text for text in islands if text not in sized)
        raise UsageError(
            f"islands {','.join(islands)}: {malformed!r} is not of the form NAME=PROCESSES, as in"
            " nvidia=4,amd=2; give each island its number of processes, or none of them"
        )
    if twice := [name for name, count in Counter(names(islands)).items() if count > 1]:
        raise UsageError(f"islands {','.join(islands)}: {twice[0]!r} is there twice")
    return {name.strip(): int(size) for name, _, size in sized.values()}


def process_id(expected: Sizes, island: str, index: int) -> int:
    """The process id of a process that knows its island and its index there.

    Raises:
      UsageError: There is no such island, or the index is not below its size.
    """
    if island not in expected:
        raise UsageError(
            f"island {island!r} is not one of those that were announced: {text(expected)}; set"
            " JAXHET_ISLAND to one of them"
        )
    if not 0 <= index < expected[island]:
        raise UsageError(
            f"process {index} of island {island!r} is one too many: {text(expected)} were"
            " announced, and an island's processes are numbered from 0; announce its true size"
        )
    before = itertools.takewhile(lambda name: name != island, expected)
    return sum(expected[name] for name in before) + index


def difference(expected: Sizes, islands: Iterable[str]) -> str | None:
    """Difference between the islands of all processes and the announced ones, or None. Pure."""
    found = Counter(islands)
    wrong = [name for name in {**expected, **found} if expected.get(name, 0) != found[name]]
    if not wrong:
        return None
    each = "; ".join(f"{name!r} has {found[name]}, not {expected.get(name, 0)}" for name in wrong)
    return (
        f"the islands are not those that were announced, {text(expected)}: {each} processes; start"
        " as many processes in each island, or announce its true size"
    )


def text(expected: Sizes) -> str:
    """The sizes as the option has them."""
    return ",".join(f"{name}={size}" for name, size in expected.items())


def _is_size(size: str) -> bool:
    # Python refuses to read thousands of digits.
    return size.strip().isdecimal() and len(size) < 10 and int(size) > 0
