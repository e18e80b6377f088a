"""Programs that know nothing of jaxhet run over islands, with the results of one JAX world."""

import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest

from jaxhet.testing import free_port
from tests.support import published
from tests.support.commands import Word, launch, python
from tests.support.scripts import job, run

_FOLDER = pathlib.Path(__file__).parent
_DEVICES = 2  # devices of each process


def _over_islands(program: pathlib.Path) -> dict[str, Any]:
    """Output of each process of two islands, by `jaxhet launch`."""
    ended = python(*launch("--islands=2", f"--devices={_DEVICES}"), program)
    return _results(re.sub(r"^\[island\d/\d\] ", "", ended.stdout, flags=re.MULTILINE))


def _results(text: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {process: result for line in lines for process, result in line.items()}


def _assert_same(mine: dict[str, Any], world: dict[str, Any]) -> None:
    """Checks that every process has the losses of one world."""
    assert mine.keys() == {"0", "1"}
    for result in mine.values():
        assert result["losses"].keys() == world["losses"].keys()
        for name, losses in result["losses"].items():
            assert len(set(losses)) > 1  # it learns something
            np.testing.assert_allclose(losses, world["losses"][name], rtol=2e-6, err_msg=name)


def _probed(*prefix: Word) -> str:
    """Output of the program in one world, and which lowering and session it has."""
    probe = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__');"
        "from jax._src.interpreters import mlir;"
        "print('lowering of', mlir.jaxpr_subcomp.__module__);"
        "session = sys.modules.get('jaxhet._session');"
        "print('session', session and session.current())"
    )
    program = ("-c", probe, _FOLDER / "unmodified_program.py")
    (world,) = published.plain_world(1, 2 * _DEVICES)
    return python(*prefix, *program, env=world).stdout


@pytest.fixture(scope="module")
def plain() -> str:
    """Output of the program in plain JAX."""
    return _probed()


def test_program_of_jit_and_pmap_has_the_results_of_one_world(plain: str) -> None:
    mine = _over_islands(_FOLDER / "unmodified_program.py")
    _assert_same(mine, _results(plain)["0"])
    for result in mine.values():
        assert result["devices"] == 2 * _DEVICES
        assert result["gathered"] == [0, 1]


# Parts of Gloo's line about connected ranks: threads of several devices mix theirs.
_GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :"
)


def _without_gloo(text: str) -> list[str]:
    """The lines that Gloo did not print."""
    lines = (_GLOO.sub("", line).strip() for line in text.splitlines())
    return [line for line in lines if not re.fullmatch(r"(\[\w+/\d+\])?[\d\s]*", line)]


def test_program_without_a_job_is_left_to_jax(plain: str) -> None:
    """Below `jaxhet run`, in a world that JAX itself detects: no session, JAX's own lowering."""
    lines = _without_gloo(plain)
    below_run = _probed("-m", "jaxhet.cli", "run", "--", sys.executable)
    assert _without_gloo(below_run) == lines  # losses have the same bits
    assert lines[1:] == ["lowering of jax._src.interpreters.mlir", "session None"]


@pytest.mark.parametrize("processes", [1, 2])
def test_job_of_one_island_exchanges_nothing(processes: int) -> None:
    """The launcher starts one island: JAX's own collectives do everything."""
    program = (
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "jax.distributed.initialize()\n"
        "sharding = NamedSharding(Mesh(np.array(jax.devices()), 'x'), P('x'))\n"
        "rows = np.arange(8, dtype=np.float32)\n"
        "x = jax.make_array_from_callback((8,), sharding, rows.__getitem__)\n"
        "compiled = jax.jit(jnp.sum).lower(x).compile()\n"
        "import jaxhet\n"
        "from jax._src import distributed\n"
        "text = compiled.as_text()\n"
        "print('sum', float(compiled(x)), 'engine', jaxhet.stats(), 'calls of jaxhet',"
        " text.count('target=\"jaxhet'), 'all-reduces', 'all-reduce' in text,"
        " 'partition', distributed.global_state.partition_index)\n"
        "jax.distributed.shutdown()\n"
    )
    sizes = (f"--processes-per-island={processes}", f"--devices={4 // processes}")
    below_run = ("-m", "jaxhet.cli", "run", "--", sys.executable)
    ended = python(*launch("--islands=1", *sizes), *below_run, "-c", program)
    lines = [line.partition("] ")[2] for line in _without_gloo(ended.stdout)]
    expected = "sum 28.0 engine {} calls of jaxhet 0 all-reduces True partition None"
    assert lines == [expected] * processes


# One process joins by our function, the other by JAX's with all of its arguments; then both call
# JAX's again, as another part of the program may.
_JOINED_TWICE = """
import jax, jaxhet, os
from jax._src import distributed
from jaxhet import _session
me, address = int(os.environ["ID"]), os.environ["ADDRESS"]
if me:
    jaxhet.initialize(address, 2, me)
else:
    jax.distributed.initialize(
        address, num_processes=2, process_id=me, local_device_ids=0, initialization_timeout=20,
        heartbeat_timeout_seconds=5, shutdown_timeout_seconds=40, partition_index=3,
        coordinator_bind_address="0.0.0.0:" + address.split(":")[1],
        verify_secure_credentials=True)
    config = _session.required().config
    print("times", config.connect_timeout_s, config.peer_timeout_s, config.exit_timeout_s)
    print("partition", distributed.global_state.partition_index)
jax.distributed.initialize()
jax.distributed.initialize(address, 2, me)
for arguments in ({"num_processes": 3}, {"process_id": 1 - me}, {"coordinator_address": "nv0:1"}):
    try: jax.distributed.initialize(**arguments)
    except jaxhet.UsageError as error: print("refused:", error)
print("joined", jax.distributed.is_initialized(), len(jaxhet.islands()), jax.process_count())
jax.distributed.shutdown()
print("left", jax.distributed.is_initialized())
"""


def test_arguments_are_honoured_and_a_second_call_means_the_same_job() -> None:
    common = {"JAXHET_JOB_SECRET": "a secret of tests", "ADDRESS": f"127.0.0.1:{free_port()}"}
    envs = [{**common, "ID": str(i), "JAXHET_ISLAND": f"island{i}"} for i in range(2)]
    ended = run(_JOINED_TWICE, {**envs[0], "JAXHET_AUTO": "1"}, envs[1])
    for process, text in enumerate(e.text for e in ended):
        assert ended[process].code == 0, text
        assert "joined True 2 2\n" in text
        assert "left False\n" in text
        assert text.count("refused: jax.distributed.initialize was called with") == 3
        assert "num_processes=3, and this process is in a job with num_processes=2 already" in text
        assert f"process_id={1 - process}, and this process is" in text
        assert "leave the argument out, or give it this value" in text
    assert "times 20.0 5.0 40.0\npartition 3\n" in ended[0].text


# A program, and programs that it starts; the wrapper and the tools import JAX, too.
_WRAPPER = """
import jax, subprocess, sys
sys.exit(subprocess.call([sys.executable, sys.argv[1]]))
"""
_STARTER = """
import os, subprocess, sys
from multiprocessing import get_context
import jax, jax.numpy as jnp

def load(k):
    return float(jnp.arange(3.0).sum() + k)

def tool(script):
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    print("tool", ended.returncode, ended.stdout.strip(), ended.stderr.strip().splitlines()[-1:])

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    with get_context("spawn").Pool(1) as pool:
        print("loaded", pool.map(load, [1]))
    tool("import jax.numpy as jnp; print(jnp.ones(2).sum())")
    me = int(os.environ["JAXHET_PROCESS_ID"])
    jax.distributed.initialize("127.0.0.1:1", 2, me)
    with get_context("spawn").Pool(1) as pool:
        print("loaded", pool.map(load, [2]))
    tool("import jax; print(jax.numpy.ones(3).sum()); jax.distributed.initialize()")
    tool("import jaxhet; jaxhet.initialize()")
    print("joined", jax.process_count(), jax.local_device_count(), flush=True)
"""


def test_programs_that_a_program_starts_may_use_jax_for_themselves(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrapper.py").write_text(_WRAPPER)
    (tmp_path / "starter.py").write_text(_STARTER)
    programs = (tmp_path / "wrapper.py", tmp_path / "starter.py")
    ended = python(*launch("--islands=2"), *programs)
    for process in range(2):
        prefix = f"[island{process}/{process}] "
        lines = [x.removeprefix(prefix) for x in ended.stdout.splitlines() if x.startswith(prefix)]
        assert lines[:3] == ["loaded [4.0]", "tool 0 2.0 []", "loaded [5.0]"]
        for line, said in zip(lines[3:5], ("3.0", ""), strict=True):
            assert line.startswith(f"tool 1 {said} [")
            assert "this process can't join the job: the process that started it has joined" in line
        assert lines[5:] == ["joined 2 2"]  # devices of the program's own number
    assert ended.stderr.count("127.0.0.1:1, which the program gives, is not used") == 1


_ASKS_FIRST = """
import sys, jax, jax.numpy as jnp, numpy as np
if sys.argv[1] == "asks":
    assert jax.distributed.is_initialized()
    jax.distributed.initialize("127.0.0.1:1", 2)
else:
    jnp.ones(3)
mesh = jax.make_mesh((2,), ("x",))
rows = np.arange(8, dtype=np.float32)
x = jax.make_array_from_callback((8,), jax.NamedSharding(mesh, jax.P("x")), rows.__getitem__)
print("sum", float(jax.jit(jnp.sum)(x)), jax.process_count())
"""


@pytest.mark.parametrize("first", ["asks", "computes"])
def test_program_that_calls_nothing_joins_with_the_option(
    first: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "program.py").write_text(_ASKS_FIRST)
    ended = python(*launch("--islands=2", "--join"), tmp_path / "program.py", first)
    assert sorted(ended.stdout.splitlines()) == [f"[island{i}/{i}] sum 28.0 2" for i in range(2)]


def test_program_that_does_not_join_fails_before_it_computes() -> None:
    first, second = ({**env, "JAXHET_AUTO": "1"} for env in job())
    alone = {**job(1)[0], "JAXHET_AUTO": "1"}
    outside = {**second, "JAXHET_AUTO": "0"}
    script = "import jax, jax.numpy as jnp; print('sum', jnp.ones(3).sum())"
    zero, one, *others = run(script, first, second, alone, outside)
    for process, ended in enumerate((zero, one)):
        assert ended.code == 1
        assert f"UsageError: process {process} uses JAX and has not joined the job" in ended.text
        assert "add --join to `jaxhet launch` or `jaxhet run`" in ended.text
    for ended in others:
        assert (ended.code, ended.text) == (0, "sum 3.0\n")


def test_devices_of_the_launcher_win_over_the_programs_with_a_line() -> None:
    script = (
        "import jax; jax.config.update('jax_num_cpu_devices', 3); jax.distributed.initialize();"
        " print('devices', jax.local_device_count())"
    )
    (ended,) = run(script, {**job(1)[0], "JAXHET_AUTO": "1", "JAXHET_CPU_DEVICES": "1"})
    assert "jaxhet: this process has 1 CPU devices, by JAXHET_CPU_DEVICES" in ended.text
    assert "and not 3, by jax_num_cpu_devices or XLA_FLAGS" in ended.text
    assert "devices 1\n" in ended.text
