"""Wrong settings and wrong calls are errors that say what to do."""

import pathlib

import pytest

from tests.support.scripts import job, run

pytestmark = pytest.mark.early

JOIN = "import jaxhet; jaxhet.initialize(); print('joined')"


def test_no_coordinator_is_said_within_the_time() -> None:
    (ended,) = run(JOIN, {**job()[1], "JAXHET_CONNECT_TIMEOUT_S": "1"})
    assert "no coordinator answers on 127.0.0.1:" in ended.text
    assert "start process 0, or set JAXHET_COORDINATOR_ADDRESS" in ended.text


def test_processes_that_come_after_all_are_told_why(tmp_path: pathlib.Path) -> None:
    """The coordinator of a complete job does not listen."""
    words = (
        "(perhaps by the coordinator of a job that runs or has just ended); choose another",
        "If the job is complete already, this process is one too many, or it started too late",
    )
    envs = job(FOLDER=str(tmp_path))
    late = [{**env, "IS_LATE": "1", "JAXHET_CONNECT_TIMEOUT_S": "1"} for env in envs]
    script = """
import os, pathlib, time, jaxhet
folder = pathlib.Path(os.environ["FOLDER"])
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.1)
me = os.environ["JAXHET_PROCESS_ID"]
if "IS_LATE" in os.environ:
    wait_for("joined")
    try:
        jaxhet.initialize()
    finally:
        (folder / f"ended{me}").touch()
else:
    jaxhet.initialize()
    (folder / "joined").touch()
    wait_for("ended0", "ended1")
"""
    first, second, *refused = run(script, *envs, *late)
    assert (first.code, second.code) == (0, 0)
    for ended, told in zip(refused, words, strict=True):
        assert ended.code != 0
        assert told in ended.text, ended.text


def test_secret_file_of_an_earlier_job_is_refused(tmp_path: pathlib.Path) -> None:
    envs = []
    for env, content in zip(job(JAXHET_CONNECT_TIMEOUT_S="4"), ("now", "before"), strict=True):
        file = tmp_path / content
        file.touch(mode=0o600)
        file.write_text(f"the secret of the job {content}")
        envs.append({**env, "JAXHET_JOB_SECRET": "", "JAXHET_JOB_SECRET_FILE": str(file)})
    good, stale = run(JOIN, *envs)
    assert "is not this job's coordinator" in stale.text
    assert "the same JAXHET_JOB_SECRET" in stale.text
    assert "JAXHET_JOB_SECRET_FILE with the same content (not one of an earlier job)" in stale.text
    assert "process 1 of 2 has not joined" in good.text
    assert "because a connection with another job secret was refused" in good.text


def test_no_connection_gets_the_number_of_a_closed_standard_file() -> None:
    """Libraries log to these numbers, and would write into the connection."""
    script = f"""
import os
told = os.fdopen(os.dup(1), "w")
for number in range(3): os.close(number)
{JOIN}
print([os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)], file=told, flush=True)
"""
    for ended in run(script, *job()):
        assert str(["/dev/null"] * 3) in ended.text, ended.text


@pytest.mark.slow
def test_declared_island_that_nobody_is_in_is_said() -> None:
    for ended in run(JOIN, *job(JAXHET_ISLANDS="island0,island1,island2")):
        assert "the islands should be ['island0', 'island1', 'island2']" in ended.text


def test_process_that_can_not_join_any_more_is_told_why() -> None:
    script = """
import jax, jax.extend.xla as xla, jaxhet
def join():
    try: jaxhet.initialize()
    except jaxhet.UsageError as error: print("refused:", error)
register = xla.register_hlo_module_transformation
del xla.register_hlo_module_transformation
join()
xla.register_hlo_module_transformation = register
jax.devices()
join()
"""
    (ended,) = run(script, job()[0])
    assert "has no hook for HLO passes; install a version that" in ended.text
    assert (
        "a JAX backend exists already; call jaxhet.initialize before any JAX computation"
        in ended.text
    )


# Listening sockets that this process has open.
_LISTENING = """
def listening():
    lines = [line.split() for line in open('/proc/self/net/tcp')]
    inodes = {f'socket:[{line[9]}]' for line in lines if line[3] == '0A'}
    links = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]
    return sum(os.readlink(link) in inodes for link in links if os.path.exists(link))
"""


@pytest.mark.parametrize(("connect", "processes", "closed"), [("all", 2, 0), ("needed", 4, 1)])
def test_process_forks_and_leaves_nothing_behind(connect: str, processes: int, closed: int) -> None:
    """A child has no part in the job, and nothing of the job is left after its end."""
    script = f"""
import warnings; warnings.simplefilter('ignore')
{JOIN}
import os, sys, threading, time{_LISTENING}
print('secret', 'JAXHET_JOB_SECRET' in os.environ)
try: jaxhet.initialize()
except jaxhet.UsageError as e: print('refused:', e)
f = jaxhet.jit(lambda x: x + 1)
f(1)
sys.stdout.flush()
before = listening()
pid = os.fork()
if pid == 0:
    try: f(1)
    except jaxhet.UsageError as e: print('child:', e, flush=True)
    print('child closed', before - listening(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
pid = os.fork()
if pid == 0: sys.exit(7)
print('child ended with', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
def end_worker():  # by the signal of multiprocessing
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b'1')
        time.sleep(10)
        os._exit(0)
    os.read(ready, 1)
    os.kill(pid, 15)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print('worker ended with', end_worker())
print('parent', f(1), jaxhet.last_error(), before - listening())
jaxhet.shutdown()
def left():
    tasks = [f'/proc/self/task/{{t}}/comm' for t in os.listdir('/proc/self/task')]
    names = [open(task).read().strip() for task in tasks if os.path.exists(task)]
    names += [t.name for t in threading.enumerate()]
    return [name for name in names if name.startswith('jaxhet')]
end = time.monotonic() + 10
while left() and time.monotonic() < end: time.sleep(0.05)
print('left:', left(), flush=True)
print('late worker ended with', end_worker(), flush=True)
pid = os.fork()
if pid == 0:
    print('late child lives', flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    for ended in run(script, *job(processes, JAXHET__CONNECT=connect)):
        assert "secret False\n" in ended.text, ended.text
        assert "refused: jaxhet.initialize was called before in this process" in ended.text
        assert f"child closed {closed}\n" in ended.text, ended.text
        assert "child: this process was forked from one that joined the job" in ended.text
        assert "child ended with 7\n" in ended.text, ended.text
        assert ended.text.count("worker ended with -15\n") == 2, ended.text
        assert "TSI_DATA_CORRUPTED" not in ended.text, ended.text  # JAX's service, encrypted
        assert "parent 2 None 0\n" in ended.text, ended.text
        assert "left: []\n" in ended.text, ended.text
        assert "late child lives\n" in ended.text
        assert "Exception ignored" not in ended.text, ended.text


def test_fork_while_a_connection_is_opened() -> None:
    """Children keep copies of sockets that are being opened. No process waits for them."""
    script = f"""import warnings; warnings.simplefilter('ignore')
{JOIN}
import os, signal, sys, threading, time, jax, numpy
children, is_over = [], threading.Event()
sys.stdout.flush()
def fork():
    while not is_over.is_set() and len(children) < 200:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        time.sleep(0.005)
forking = threading.Thread(target=fork)
forking.start()
mesh = jaxhet.make_mesh({{'i': 4}})
spec = jax.sharding.PartitionSpec('i')
x = jax.make_array_from_callback(
    (4,), jax.sharding.NamedSharding(mesh, spec), lambda i: numpy.arange(4.0)[i])
total = jax.shard_map(lambda a: jax.lax.psum(a, 'i'), mesh=mesh, in_specs=spec, out_specs=spec)
y = jax.jit(total)(x)
found = float(y.addressable_data(0)[0])
is_over.set()
forking.join()
begin = time.monotonic()
jaxhet.shutdown()
print('sum', found, 'forked', len(children) > 0, 'left', time.monotonic() - begin < 10, flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
    for ended in run(script, *job(4, JAXHET__CONNECT="needed")):
        assert "sum 6.0 forked True left True" in ended.text, ended.text
        assert ended.code == 0, ended.text
