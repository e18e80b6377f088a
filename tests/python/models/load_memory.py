"""How much memory loading takes beside the parameters: `python -m … FOLDER`.

Prints two numbers of bytes: size of the parameters, and the largest growth of the process's own
memory (`RssAnon`) during a load. Pages of a mapped file are no part of it: the system takes them
back when it needs memory. On CPU devices the parameters are in this memory, too.
"""

import gc
import re
import sys
import threading
from pathlib import Path

import jax
import numpy as np

from models import huggingface

STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found
    return int(found[1]) * 1024


class Peak(threading.Thread):
    """The largest `anonymous_bytes` between `start` and `stop`, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.largest = 0

    def run(self) -> None:
        while not self._ended.wait(1e-3):
            self.largest = max(self.largest, anonymous_bytes())

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.largest


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "model"))
    huggingface.load(Path(folder), mesh)  # creates everything that programs create once
    gc.collect()
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    _, params = huggingface.load(Path(folder), mesh)
    largest = peak.stop()
    pieces = (piece for leaf in jax.tree.leaves(params) for piece in leaf.addressable_shards)
    print(sum(piece.data.nbytes for piece in pieces), largest - before)


if __name__ == "__main__":
    main(sys.argv[1])
