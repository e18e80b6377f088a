"""One process of a test job; runs the programs that the test process sends."""

import traceback
from typing import Any

import jax
import planned
import programs

import jaxhet
from tests.support import jobs


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
        outputs = jax.tree.leaves(programs.run(program))
        jax.block_until_ready(outputs)
    except Exception:
        return {"error": traceback.format_exc(), "shards": [], "exchanges": 0}
    order = {device: i for i, device in enumerate(jaxhet.make_mesh({"all": -1}).devices.flat)}
    shards = [
        {order[s.device]: jax.device_get(s.data) for s in output.addressable_shards}
        for output in outputs
    ]
    return {"error": None, "shards": shards, "exchanges": _exchanges() - before}


if __name__ == "__main__":
    jobs.serve(_answer)
