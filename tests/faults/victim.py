"""A process of a job that a fault ends: it joins, compiles, saves, runs steps, and tells its phase.

    victim.py STEPS [--rails] [--fault MOMENT KIND PROCESS --folder FOLDER --elements N]

The devices are CPUs or GPUs, as JAX chooses. With `--rails`, a rank exchanges only with the ranks
in its place on the other islands. With `--fault`, process PROCESS fails by itself, at a moment of
`MOMENTS` and in a way of `KINDS`.

Lines on stdout: `@ PHASE pid` before each phase, `@ fault MOMENT pid` before the fault. Each step
checks its own result, so that a wrong number is never silent: `WRONG …`. The error that ends the
process is told by `caught <class>: <text>`. After a failure of the job follow `poisoned <dtype>`
for each result that has NaN, and `device works` if the device still computes.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

_SAVE_S = 1.5
_FAULT_AT_STEP = 3
# Types of the step that faults. Their NaNs differ.
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
EXIT_CODE = 7  # argument of os._exit


def say(phase: str) -> None:
    """Tells the test where this process is."""
    print(f"@ {phase} {os.getpid()}", flush=True)


def _raise() -> NoReturn:
    raise RuntimeError("the fault that was asked for")


# How a process faults. The first two can only be done by the main thread.
KINDS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(0),
    "_exit": lambda: os._exit(EXIT_CODE),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
MOMENTS = ("setup", "compile", "tune", "between", "exchange", "save")


class Fault:
    """The fault of one process.

    Attributes:
      moment: Present phase of the process.
      is_here: Whether this process faults.
    """

    def __init__(self, moment: str, kind: str) -> None:
        self.moment = "start"
        self.is_here = bool(moment)
        self._wanted, self._kind = moment, kind
        signal.signal(signal.SIGUSR1, self._handle)

    def now(self, moment: str) -> None:
        """Faults at once, if this is the moment."""
        self.moment = moment
        if moment == self._wanted:
            self._fault()

    def soon(self, moment: str, delay_s: float) -> None:
        """Faults during the main thread's next action, if this is the moment."""
        self.moment = moment
        if moment == self._wanted:
            threading.Timer(delay_s, self._fault_from_a_thread).start()

    def _handle(self, _: int, frame: types.FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "_xla_gc_callback":  # drops exceptions
            threading.Timer(0.01, self._fault_from_a_thread).start()
        else:
            self._fault()

    def _fault(self) -> None:
        if self._wanted:
            self._wanted = ""
            say(f"fault {self.moment}")
            KINDS[self._kind]()

    def _fault_from_a_thread(self) -> None:
        if self._kind in ("raise", "exit"):  # when the main thread is back from C++
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        else:
            self._fault()


class Programs:
    """The programs, on one mesh."""

    def __init__(self, rails: bool) -> None:
        import jax
        from jax.sharding import PartitionSpec as P

        import jaxhet

        size = jax.device_count() // len(jaxhet.islands()) if rails else 1
        devices = np.array(jax.devices()).reshape(-1, size)
        self.mesh = jax.sharding.Mesh(devices, ("x", "rail"))
        self._rows = P(("x", "rail"))
        self._last: tuple[Any, float] = None, 0.0  # last results, and their right value

    def ones(self, columns: int, dtype: str = "float32") -> Any:
        """A row of ones on each device."""
        import jax

        shape = (self.mesh.size, columns)
        sharding = jax.sharding.NamedSharding(self.mesh, self._rows)
        return jax.jit(lambda: jax.numpy.ones(shape, dtype), out_shardings=sharding)()

    def over(self, f: Callable[..., Any], *more: Any) -> Any:
        """`f` of rows, and of numbers that all ranks have, as a program over the mesh."""
        import jax

        import jaxhet

        specs = {"in_specs": (self._rows, *more), "out_specs": self._rows, "check_vma": False}
        return jaxhet.jit(jax.shard_map(f, mesh=self.mesh, **specs))

    def check(self, results: Any, right: float) -> None:
        """Waits for results, and says whether they are wrong."""
        import jaxhet

        self._last = results, right
        jaxhet.block_until_ready(results)
        if self._look():
            print("WRONG: NaN without an error", flush=True)

    def look_after_failure(self) -> None:
        """Says what became of the last results, and whether a device still computes."""
        import jax

        with contextlib.suppress(RuntimeError, ValueError):  # CPUs have no result after a failure
            self._look()
        numbers = jax.device_put(np.arange(8, dtype=np.float32), jax.local_devices()[0])
        if float(numbers.sum()) == 28:
            print("device works", flush=True)

    def _look(self) -> bool:
        """Says which of the last results are wrong or NaN; returns whether one is NaN."""
        import jax

        results, right = self._last
        is_poisoned = False
        for result in jax.tree.leaves(results):
            values = np.asarray(result.addressable_shards[0].data)
            is_nan = np.isnan(values)
            if is_nan.any():
                print(f"poisoned {result.dtype}", flush=True)
                is_poisoned = True
            if not (is_nan | (values == right)).all():
                print(f"WRONG number: {values}, not {right}", flush=True)
        return is_poisoned


def _sum(fault: Fault) -> Callable[..., Any]:
    def body(x: Any, i: Any) -> Any:
        import jax
        import jax.numpy as jnp

        fault.soon("compile", 0.3)
        for k in range(40):  # enough to compile for about a second
            x = x + jnp.sin(x * k) * 0
        return jax.lax.psum(x * i, "x")

    return body


def _tuned(fault: Fault) -> Callable[..., Any]:
    """Products for which GPUs choose kernels by trying them, then a sum over the ranks."""

    def body(x: Any) -> Any:
        import jax
        import jax.numpy as jnp

        fault.soon("tune", 1.0)
        for rows in range(1024, 4096, 256):
            wide = jnp.ones((rows, 512), jnp.bfloat16) * x[0, 0].astype(jnp.bfloat16)
            x = x + 0 * jax.nn.silu(wide @ wide.T).astype(x.dtype).mean()
        return jax.lax.psum(x, "x")

    return body


def _around(n: int) -> Callable[..., Any]:
    """Rows of each type move around the ring of n ranks, eight times."""

    def body(rows: tuple[Any, ...]) -> Any:
        import jax

        ring = [(i, (i + 1) % n) for i in range(n)]
        for _ in range(8):
            moved = [jax.lax.ppermute(x, "x", ring) for x in rows]
            rows = jax.lax.optimization_barrier(tuple(moved))
        return rows

    return body


def _save(folder: pathlib.Path, fault: Fault) -> None:
    """Writes a file slowly."""
    import jax

    import jaxhet

    say("save")
    fault.soon("save", _SAVE_S / 3)
    file = folder / f"part{jax.process_index()}"
    with jaxhet.saving(folder), file.open("wb", buffering=0) as out:
        for _ in range(30):
            out.write(bytes(1000))
            time.sleep(_SAVE_S / 30)
    say("saved")


def _prepare(
    programs: Programs, fault: Fault, folder: pathlib.Path, elements: int
) -> Callable[[], None]:
    """Does the work before the steps of a job with a fault; returns the step that has the fault."""
    import jax

    n = programs.mesh.shape["x"]
    if jax.default_backend() != "cpu":
        programs.check(programs.over(_tuned(fault))(programs.ones(4)), n)
    _save(folder, fault)
    fault.moment = "steps"
    rows = tuple(programs.ones(elements, dtype) for dtype in DTYPES)
    move = programs.over(_around(n))
    say("call")
    programs.check(move(rows), 1)

    def step() -> None:
        fault.now("between")
        moved = move(rows)
        fault.now("exchange")
        programs.check(moved, 1)

    return step


def run(programs: Programs, options: argparse.Namespace, fault: Fault) -> None:
    """Runs the steps."""
    from jax.sharding import PartitionSpec as P

    n = programs.mesh.shape["x"]
    x = programs.ones(1 << 20)
    step = programs.over(_sum(fault), P())
    say("compile")
    programs.check(step(x, 0.0), 0)
    faulty = None
    if options.fault:
        faulty = _prepare(programs, fault, options.folder, options.elements)
    for i in range(options.steps):
        if faulty and i == _FAULT_AT_STEP:
            time.sleep(0.5 * fault.is_here)  # the others wait in their exchanges
            faulty()
        say("call")
        programs.check(step(x, float(i)), n * i)
        say("run")
        time.sleep(0.01)
    print("finished", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--rails", action="store_true")
    parser.add_argument("--fault", nargs=3, metavar=("MOMENT", "KIND", "PROCESS"))
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument(
        "--elements", type=int, help="elements of each rank in the step that faults"
    )
    options = parser.parse_args()
    moment, kind, process = options.fault or ("", "", "")
    fault = Fault(moment if process == os.environ.get("JAXHET_PROCESS_ID") else "", kind)
    say("connect")
    import jaxhet
    from jaxhet import _set_up

    start_jax = _set_up._start_jax

    def start_jax_after_fault(job: Any) -> Any:
        if options.folder:  # a process waits 60 s for one whose first heartbeat has not come
            (options.folder / f"connected-{os.getpid()}").touch()
            while moment == "setup" and len([*options.folder.glob("connected-*")]) < 2:
                time.sleep(0.01)
            time.sleep(3.0 if kind == "stop" and moment == "setup" else 0.0)
        fault.now("setup")
        return start_jax(job)

    _set_up._start_jax = start_jax_after_fault
    programs = None
    try:
        jaxhet.initialize()
        programs = Programs(options.rails)
        run(programs, options, fault)
    except Exception as error:
        print(f"caught {type(error).__name__}: {error}", flush=True)
        if programs is not None and isinstance(error, jaxhet.JaxhetError):
            programs.look_after_failure()
        raise


if __name__ == "__main__":
    main()
