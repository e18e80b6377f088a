"""`benchmarks.thin_links` between two network namespaces with a thin line between them. Needs root.

    python -m tests.support.thin_link MBIT_S RTT_MS LOSS [arguments of benchmarks.thin_links]
    python -m tests.support.thin_link table [arguments of benchmarks.thin_links]
    python -m tests.support.thin_link sums
    python -m tests.support.thin_link encryption

The line is `tests/support/wire.cc`. `table` trains over a line without limits and over one of 1
Gbit/s with a round trip of 50 ms and 0.1 % lost, and moves arrays of 64 MiB over longer lines.
`sums` adds up gradients of 512 MiB, with and without a codec: a step that only the line limits.
`encryption` moves 64 MiB both ways over 1 Gbit/s without a delay, each process on one core.
With `JAX_PLATFORMS=cuda` each process has a GPU.
"""

import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.multiprocess.two_islands import SET_UP
from tests.support import hosts
from tests.support.hosts import Hosts
from tests.support.scripts import on

_TRAIN = """
import sys
sys.argv = {arguments!r}
import benchmarks.thin_links
benchmarks.thin_links.main()
"""
# Prints the seconds of some arrays of 64 MiB that each end sends the other at a time, by number.
_EXCHANGE = """
split = NamedSharding(mesh, P("x"))
own = np.random.default_rng(me).random((1, 1 << 24), np.float32)
arrays = [jax.make_array_from_callback((2, 1 << 24), split, lambda i: own + k)
          for k in range(16)]
swap = lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])
swap_all = lambda xs: [jax.shard_map(swap, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
                       for x in xs]
for number in (1, 4, 16):
    swapped = jaxhet.jit(swap_all)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        jax.block_until_ready(swapped(arrays[:number]))
        seconds.append(time.perf_counter() - began)
    if me == 0: print(number, sorted(seconds[1:])[2])
jaxhet.shutdown()
"""
# Prints the rate of eight busy sockets both ways, as a part of 1 Gbit/s: what TCP alone has.
_STREAMS = """
import os, socket, threading, time
is_first, count = os.environ["JAXHET_PROCESS_ID"] == "0", 8
host = os.environ["JAXHET_COORDINATOR_ADDRESS"].partition(":")[0]
if is_first:
    listener = socket.create_server((host, 7001), backlog=count)
    socks = [listener.accept()[0] for _ in range(count)]
else:
    while True:
        try:
            socks = [socket.create_connection((host, 7001)) for _ in range(count)]
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
received, stop, data = [0] * count, threading.Event(), memoryview(bytes(1 << 20))
def send(sock):
    while not stop.is_set(): sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
def receive(i):
    room = bytearray(1 << 20)
    while got := socks[i].recv_into(room): received[i] += got
threads = [threading.Thread(target=send, args=(s,)) for s in socks]
threads += [threading.Thread(target=receive, args=(i,)) for i in range(count)]
for thread in threads: thread.start()
time.sleep(4)  # windows are open
began, before = time.perf_counter(), sum(received)
time.sleep(8)
rate = (sum(received) - before) / (time.perf_counter() - began)
stop.set()
for thread in threads: thread.join()
if is_first: print(rate * 8 / 1e9)
"""
_SUMS = """
split = NamedSharding(mesh, P("x"))
own = np.random.default_rng(me).standard_normal((1, 1 << 21)).astype(np.float32)
gradients = [jax.make_array_from_callback((2, 1 << 21), split, lambda i: own) for _ in range(64)]
add = lambda xs: [jax.lax.psum(x, "x") for x in xs]
add = jax.shard_map(add, mesh=mesh, in_specs=P("x"), out_specs=P())
for wire in ("", "mxint8"):
    added = jaxhet.jit(add, bridge={"wire": wire})
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        jax.block_until_ready(added(gradients))
        seconds.append(time.perf_counter() - began)
    if me == 0: print(wire or "f32", sorted(seconds[1:])[3])
jaxhet.shutdown()
"""
_ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {int(os.environ["JAXHET_PROCESS_ID"])})
"""
_METHODS = ("f32", "mxint8", "mxint4 with error feedback", "DiLoCo mxint4, delay 5")
_THIN = (1000.0, 50.0, 0.001)
_ARRAY_BITS = 8 << 26


def job(program: str, mbit_s: float, rtt_ms: float, loss: float, **env: str) -> str:
    """Runs a job of two processes, one at each end of a line; returns the output of process 0.

    Raises:
      RuntimeError: The job failed.
    """
    with Hosts(2, 0) as net, net.wire(rtt_ms / 2, loss, mbit_s):
        envs = on(os.environ.get("JAX_PLATFORMS", "cpu"), net.job(**env))
        ended = hosts.wait(net.start(program, envs), 7200)
    if any(one.code for one in ended):
        raise RuntimeError("\n".join(one.text for one in ended))
    return ended[0].text


def train(mbit_s: float, rtt_ms: float, loss: float, arguments: Sequence[str]) -> str:
    """Output of `benchmarks.thin_links` over a line."""
    link = f"{mbit_s:g} Mbit/s, {rtt_ms:g} ms, {loss:.1%} lost" if mbit_s else "no limits"
    return job(
        _TRAIN.format(arguments=["thin_links", "--link", link, *arguments]), mbit_s, rtt_ms, loss
    )


def rows_of(link: tuple[float, float, float], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of `_METHODS` that `benchmarks.thin_links` writes."""
    chosen = [word for name in _METHODS for word in ("--only", name)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.json"
        train(*link, [*arguments, *chosen, "--json", str(path)])
        return json.loads(path.read_text())["rows"]


def table(arguments: Sequence[str]) -> None:
    """Prints all figures."""
    free, thin = rows_of((0, 0, 0), arguments), rows_of(_THIN, arguments)
    print("| method | tokens/s, no limits | 1 Gbit/s, 50 ms, 0.1 % lost | part | to f32 | loss |")
    print("|---|---|---|---|---|---|")
    for own, slow in zip(free, thin, strict=True):
        best, rate = own["tokens_per_s"], slow["tokens_per_s"]
        cells = f"{best:.0f}", f"{rate:.0f}", f"{rate / best:.3f}"
        against = f"{rate / thin[0]['tokens_per_s']:.2f}"
        print(f"| {slow['name']} | {' | '.join(cells)} | {against} | {slow['loss']:.5f} |")
    print("\n| parts of 1 Gbit/s | TCP | 64 MiB alone | 4 at a time | 16 at a time |")
    print("|---|---|---|---|---|", flush=True)
    for name, rtt_ms, loss, env in (
        ("80 ms, nothing lost", 80, 0.0, {}),
        ("80 ms, nothing lost, encrypted", 80, 0.0, {"JAXHET_ENCRYPTION": "full"}),
        ("80 ms, 0.1 % lost", 80, 0.001, {}),
        ("50 ms, 0.1 % lost", 50, 0.001, {}),
    ):
        streams = float(job(_STREAMS, 1000, rtt_ms, loss))
        text = job(SET_UP + _EXCHANGE, 1000, rtt_ms, loss, **env)
        found = dict(line.split() for line in text.splitlines()[-3:])
        parts = [int(number) * _ARRAY_BITS / float(s) / 1e9 for number, s in found.items()]
        print(f"| {name} | {' | '.join(f'{part:.3f}' for part in [streams, *parts])} |", flush=True)


def sums() -> None:
    """Prints the times of a sum of gradients, each a median of 7, and their ratio."""
    found = dict(line.split() for line in job(SET_UP + _SUMS, *_THIN).splitlines()[-2:])
    plain, coded = float(found["f32"]), float(found["mxint8"])
    print(f"f32 {plain:.3f} s, mxint8 {coded:.3f} s: {plain / coded:.2f}", flush=True)


def encryption() -> None:
    """Prints which part of the rate an exchange has without and with encryption."""
    for mode in ("off", "full"):
        text = job(_ON_ONE_CORE + SET_UP + _EXCHANGE, 1000, 0, 0, JAXHET_ENCRYPTION=mode)
        found = dict(line.split() for line in text.splitlines()[-3:])
        print(f"{mode}: {_ARRAY_BITS / float(found['1']) / 1e9:.3f}", flush=True)


def main() -> None:
    """The command line."""
    if why := hosts.unavailable_wire():
        sys.exit(why)
    if sys.argv[1] == "table":
        return table(sys.argv[2:])
    if sys.argv[1] == "sums":
        return sums()
    if sys.argv[1] == "encryption":
        return encryption()
    mbit_s, rtt_ms, loss = map(float, sys.argv[1:4])
    return print(train(mbit_s, rtt_ms, loss, sys.argv[4:]))


if __name__ == "__main__":
    main()
