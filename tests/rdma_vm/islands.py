"""One process of two islands, in a guest: programs with every kind of exchange, checked by numpy.

Prints a line "ok NAME" or "FAIL NAME: REASON" for each.
"""

import itertools

import jaxhet
from tests.support.collectives import Case, factor, found

# Bytes of one rank's operand: up to eager_bytes, around chunk_bytes, and around the largest message
# of soft-RoCE.
_CHUNK = 512 << 10
_MESSAGE = 8 << 20
_SIZES = (4, 28, _CHUNK - 4, _CHUNK, _CHUNK + 4, _MESSAGE - 4, _MESSAGE, _MESSAGE + 4)


def main() -> None:
    jaxhet.initialize()
    for name, size in itertools.product(("sum", "gather", "permute", "all_to_all"), _SIZES):
        case = Case(name, "int32", (factor(name, 2) * size // 4,))
        for of_devices in found("all", (1, 1), [case]).values():
            for difference, _ in of_devices.values():
                assert not difference, f"FAIL {name}-{size}: {difference}"
        print(f"ok {name}-{size}", flush=True)
    stats = jaxhet.stats()
    moved = {name for name, n in stats.items() if name.startswith("bytes_") and n}
    assert {name.rpartition("_")[2] for name in moved} == {"local", "verbs"}, stats
    jaxhet.shutdown()


if __name__ == "__main__":
    main()
