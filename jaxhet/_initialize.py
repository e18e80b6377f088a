"""`jaxhet.initialize` and `jaxhet.shutdown`."""

import atexit
import os
import pathlib
import subprocess
import weakref

import jax

from jaxhet import _clusters, _config, _distributed, _log, _memory, _session
from jaxhet._config import Config
from jaxhet._errors import JaxhetError, PeerError, UsageError
from jaxhet._jax import compat, platforms
from jaxhet._job import coordinator
from jaxhet._job import membership as _membership
from jaxhet._job import place as _place
from jaxhet._job.membership import Membership
from jaxhet._net.secret import read_secret
from jaxhet._options import Options
from jaxhet._set_up import set_up
from jaxhet._telemetry import metrics as _metrics
from jaxhet._telemetry import trace as _trace


@_config.takes_options(Options)
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    island: str | None = None,
    **options: object,
) -> None:
    """Joins this process to the job, in place of `jax.distributed.initialize()`.

    Call it before any JAX computation. Arguments that are not given are read from environment
    variables: `JAXHET_*`, which `jaxhet launch` sets, then JAX's own, then the variables of the
    scheduler that started this process.

    Args:
      coordinator_address: host:port. Without `jaxhet launch`, process 0 starts the coordinator
        there.
      num_processes: number of processes of the job.
      process_id: this process, 0 … num_processes - 1.
      island: name of this process's island; default: its platform. All processes declare one, or
        none.
      **options: any other option (docs/reference/options.md).

    Raises:
      UsageError: the job, an option or the installation is not right; the text says what to
        change.
      PeerError: a process died while the job was set up.
      TransportError: a process could not be reached.

    Examples:
      In a program that `jaxhet launch` starts:

      >>> import jax, jaxhet
      >>> jaxhet.initialize()
      >>> print(jax.process_index(), jaxhet.islands())
    """
    session = _session.current()
    if session is not None and session.is_pretended:
        return
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
        "island": island,
        **options,
    }
    launched = _config.resolve()
    if launched.launched:
        arguments = _distributed.without_address(launched, arguments)
    config = _clusters.resolve(arguments)
    _log.apply(config)
    if not config.process_id and not config.island_process_id:
        for line in config.of_nccl:
            _log.LOGGER.info("%s", line)
    _check_first_call(config)
    compat.require_supported_jax()
    _distributed.warn_of_certificates(os.environ, _distributed.MTLS_VARIABLES)
    config = _place.complete(config)
    secret = read_secret(config)
    os.environ.pop("JAXHET_JOB_SECRET", None)  # programs that this process starts do not need it
    _session.used.set()
    _open_standard_files()
    log_line = _prepare_platform(config)
    session = _join(config, secret)
    _session.install(session)
    _config.pass_on("parent_job", config.coordinator_address)
    _distributed.take_over(jax.distributed, initialize, shutdown)
    this = weakref.ref(session)
    os.register_at_fork(after_in_child=lambda: _abandon_in_child(this()))
    atexit.register(_shutdown_at_exit)
    if log_line and session.config.process_id == 0:
        _log.LOGGER.info("%s", log_line)


def _abandon_in_child(session: _session.Session | None) -> None:
    compat.let_sigterm_end_the_process()  # multiprocessing ends its workers so
    if session is not None:
        session.abandon_in_child()


def _open_standard_files() -> None:
    """Opens /dev/null for each closed standard file: libraries would log into a socket there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _prepare_platform(config: Config) -> str:
    """Sets what JAX's platform needs before it starts; returns a line for the log, or none."""
    platform = platforms.expected_platform()
    if platform != "cpu":
        if config.local_device_ids:
            platforms.use_gpus(platform, config.local_device_ids)
        return ""
    _memory.keep_freed_memory()
    return platforms.configure_cpu(config.cpu_devices)


def _join(config: Config, secret: bytes) -> _session.Session:
    """Joins the job and sets it up. An error is reported to the other processes."""
    trace_folder = _trace.folder(config)
    membership = _join_coordinator(config, secret)
    session = None
    try:
        session = set_up(config, secret, membership)
        if trace_folder is not None:
            session.observe(_trace.Trace(trace_folder, session, membership))
        if config.metrics_address:
            session.observe(_metrics.Metrics(config.metrics_address, session))
    except BaseException as error:
        if membership.failure is None:
            membership.report(_for_others(error, _place.name(config)))
        if session is not None:
            session.close(0)
        else:  # JAX's client, if there is one, lives as long as the process
            compat.cancel_barriers()
            membership.leave(close=False)
        raise
    return session


def _for_others(error: BaseException, name: str) -> JaxhetError:
    """The error that the other processes raise when process `name` could not join."""
    if isinstance(error, JaxhetError):
        return type(error)(f"{name}: {error}")
    return PeerError(f"{name} could not join the job: {type(error).__name__}: {error}; see there")


def shutdown() -> None:
    """Leaves the job.

    Waits until every process has called it or failed, then closes all connections. Idempotent.
    Runs at interpreter exit too. After a failure of the job it does not wait.
    """
    session = _session.remove()
    if session is not None:
        _config.pass_on("parent_job", None)
        session.close(session.config.exit_timeout_s)


def _shutdown_at_exit() -> None:
    session = _session.remove()
    if session is not None:
        session.close_at_exit(session.config.exit_timeout_s)


def _check_first_call(config: Config) -> None:
    if _session.current() is not None:
        raise UsageError("jaxhet.initialize was called before in this process; call it once")
    if _session.used.is_set():
        raise UsageError(
            "this process has joined or tried to join a job already; start a new process for the"
            " next one"
        )
    if config.parent_job not in (None, "") and config.parent_job == config.coordinator_address:
        raise UsageError(
            "this process can't join the job: the process that started it has joined already, for"
            " both. A child of a member may use JAX for itself; leave the call of initialize out"
            " there, or put it under `if __name__ == '__main__':` if multiprocessing started the"
            " child, which imports the main program again"
        )
    if compat.coordination_client() is not None:
        raise UsageError(
            "jax.distributed.initialize was called; call jaxhet.initialize in its place"
        )
    if compat.backend_exists():
        raise UsageError(
            "a JAX backend exists already; call jaxhet.initialize before any JAX computation"
        )


def _join_coordinator(config: Config, secret: bytes) -> Membership:
    address = config.coordinator_address
    assert address is not None  # `place.complete`
    if config.process_id == 0 and not config.launched:
        _start_sidecar(config, secret)
    try:
        return _membership.connect(address, secret, config.connect_timeout_s)
    except ConnectionRefusedError as error:
        raise UsageError(
            f"no coordinator answers on {address} within {config.connect_timeout_s:g} s"
            f" ({error}); start process 0, or set JAXHET_COORDINATOR_ADDRESS to where it runs. If"
            " the job is complete already, this process is one too many, or it started too late: a"
            " coordinator listens until all processes have joined"
        ) from error


def _start_sidecar(config: Config, secret: bytes) -> None:
    """Starts the coordinator in a process of its own, which outlives this one."""
    address = config.coordinator_bind_address or config.coordinator_address
    assert address is not None  # `place.complete`
    assert config.num_processes is not None
    root = str(pathlib.Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        coordinator.command(address, config.num_processes, config.connect_timeout_s),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            **coordinator.QUIET,
            "PYTHONPATH": path,
            "JAXHET_JOB_SECRET": secret.decode(),
        },
    )
    assert process.stdout is not None
    answer = process.stdout.readline().strip()
    if answer != "ready":
        code = process.wait()
        raise UsageError(
            answer.removeprefix("error ")
            or f"the coordinator of the job ended with exit code {code} before it listened; its"
            " output on stderr says why"
        )
    _sidecars.append(process)


# Kept so that its pipe stays open as long as this process lives.
_sidecars: list[subprocess.Popen[str]] = []
