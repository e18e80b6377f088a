"""One process of a test job; runs the programs that the test process sends."""

import traceback
from typing import Any

import jax
import matrix
import planned

import jaxhet
from jaxhet.testing import serve


def _exchanges() -> int:
    return (
        jaxhet.stats()["exchanges_completed"]
        if len(jax.devices()) != jax.local_device_count()
        else 0
    )


def _answer(program: dict[str, Any]) -> dict[str, Any]:
    if "planned" in program:
        return planned.answer(program["planned"])
    before = _exchanges()
    try:
        paths, outputs = zip(*jax.tree.leaves_with_path(matrix.run(program)), strict=True)
        jax.block_until_ready(outputs)
    except Exception:
        return {"error": traceback.format_exc(), "names": [], "shards": [], "exchanges": 0}
    names = [jax.tree_util.keystr(path, simple=True) for path in paths]
    order = {device: i for i, device in enumerate(jaxhet.make_mesh({"all": -1}).devices.flat)}
    shards = [
        {order[s.device]: jax.device_get(s.data) for s in output.addressable_shards}
        for output in outputs
    ]
    return {"error": None, "names": names, "shards": shards, "exchanges": _exchanges() - before}


if __name__ == "__main__":
    serve(_answer)
