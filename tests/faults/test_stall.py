"""A peer that does not answer, because the path to it swallows all packets."""

import pathlib
import re
import threading
import time

import pytest

from tests.multiprocess.two_islands import SET_UP
from tests.support.relay import in_between
from tests.support.scripts import job, run
from tests.support.waiting import wait_until

REPORT_WITHIN_S = 10.0
_SUMS = (
    SET_UP
    + """
import pathlib
sum_ = over_islands(lambda a, i: psum(a * i), in_specs=(P("x"), P()))
for i in range(100000):
    total = np.asarray(sum_(x, float(i)).addressable_shards[0].data)
    if not (total == 2 * i).all():
        print("WRONG", total, flush=True)
    if i == 3:
        pathlib.Path(os.environ["FOLDER"], str(me)).touch()
    time.sleep(0.01)
"""
)


@pytest.mark.parametrize(
    "transport",
    ["socket", pytest.param("process_vm", marks=pytest.mark.slow)],
)
def test_half_open_connection_is_reported(transport: str, tmp_path: pathlib.Path) -> None:
    envs = job(FOLDER=str(tmp_path), JAXHET_TRANSPORTS=transport, JAXHET_PEER_TIMEOUT_S="3")
    frozen: list[float] = []
    with in_between(envs[0]) as relay:

        def freeze() -> None:
            wait_until(lambda: len([*tmp_path.iterdir()]) == 2, 90)
            relay.freeze()
            frozen.append(time.monotonic())

        threading.Thread(target=freeze).start()
        ended = run(_SUMS, *envs, timeout_s=120)
    assert time.monotonic() - frozen[0] < REPORT_WITHIN_S
    for process, one in enumerate(ended):
        assert re.search(rf"PeerError.*process {1 - process}\b", one.text), one.text
        assert "WRONG" not in one.text
