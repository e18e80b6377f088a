"""The command line: options and their help, nothing else."""

import pathlib
import sys
from typing import Annotated, Any

import typer

from jaxhet._errors import JaxhetError
from jaxhet._jax.jaxlib import Vendor
from jaxhet.cli import bench as _bench
from jaxhet.cli import coordinator as _coordinator
from jaxhet.cli import doctor as _doctor
from jaxhet.cli import env as _env
from jaxhet.cli import launch as _launch
from jaxhet.cli import plan as _plan
from jaxhet.cli import run as _run
from jaxhet.cli import trace as _trace

_app = typer.Typer(
    name="jaxhet", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
_DEFAULTS = _launch.Options()
_BENCH_DEFAULTS = _bench.Options()
_DOCTOR_DEFAULTS = _doctor.Options()
_PLAN_DEFAULTS = _plan.Options()


def _sizes(text: str) -> tuple[int, ...]:
    """One number, or one for each island."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise typer.BadParameter(f"{text!r} is not a number above 0, or a list like 1,3")
    return sizes


def _island_variable(text: str) -> tuple[str, str, str]:
    """Island, name and value."""
    island, colon, variable = text.partition(":")
    name, equals, value = variable.partition("=")
    if not (island and colon and name and equals):
        raise typer.BadParameter(
            f"{text!r} is not of the form ISLAND:NAME=VALUE", param_hint="--island-env"
        )
    return island.strip(), name, value


_Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="join the job at the program's first use of JAX, for programs that do not call"
        " jax.distributed.initialize",
    ),
]


@_app.callback()
def _commands() -> None:
    """One JAX program across islands of NVIDIA and AMD GPUs."""


@_app.command(context_settings={"allow_interspersed_args": False})
def launch(  # noqa: PLR0913 (one parameter an option: typer reads them)
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="command of every process")
    ],
    island_env: Annotated[
        list[str],
        typer.Option(
            metavar="ISLAND:NAME=VALUE",
            help="an environment variable of the processes of one island; may be given many times",
            default_factory=list,
            show_default=False,
        ),
    ],
    islands: Annotated[int, typer.Option(min=1, help="number of islands")] = _DEFAULTS.islands,
    processes_per_island: Annotated[
        Any,
        typer.Option(
            parser=_sizes,
            metavar="N,...",
            help="JAX processes of each island: one number, or one for each island",
        ),
    ] = "1",
    devices: Annotated[
        Any,
        typer.Option(
            parser=_sizes,
            metavar="N,...",
            help="devices of each process: one number, or one for each island; GPUs (default: an"
            " equal share of the visible GPUs), or virtual CPU devices if JAX has no GPU (default:"
            " what the program or XLA_FLAGS says, else 1)",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of the coordinator; 0: a free one")
    ] = _DEFAULTS.port,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="seconds after a failure or a signal until the other processes are stopped;"
            " default: 15, and no limit for a process that knows of the failure of its job",
            show_default=False,
        ),
    ] = None,
    island_names: Annotated[
        str, typer.Option(metavar="NAME,...", help="names of the islands; default island0,...")
    ] = "",
    join: _Join = False,
    hosts: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="YAML file of hosts to reach by ssh, with their islands, processes and devices;"
            " replaces --islands and the other options about islands",
        ),
    ] = None,
) -> None:
    """Run COMMAND as the processes of a job of several islands, here or by ssh on other machines.

    The YAML file of --hosts has the keys coordinator (an address of this machine that all hosts
    reach), hosts (a list), ssh (further arguments of ssh) and env (variables of all processes).
    Each host has the keys island, host (its name for ssh; default: this machine), processes,
    devices (of each process), directory, python (a Python with jaxhet) and env.

    A program that uses JAX without having joined the job fails, unless --join joins for it.

    Output is prefixed by island and process. When a process fails, the others are stopped, and
    the exit code is that of the first failure (128 + signal for a signal).
    """
    options = _launch.Options(
        islands=islands,
        processes_per_island=processes_per_island,
        devices=devices or (),
        port=port,
        grace_s=grace,
        island_names=tuple(name.strip() for name in island_names.split(",") if name.strip()),
        island_env=tuple(map(_island_variable, island_env)),
        join=join,
        hosts=hosts,
    )
    raise typer.Exit(_launch.launch(command, options))


@_app.command(context_settings={"allow_interspersed_args": False})
def run(  # noqa: PLR0913 (one parameter an option: typer reads them)
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND...", help="program to run, for example python -m ..."),
    ],
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="address of the job's coordinator")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="processes of the job")] = None,
    process_id: Annotated[int | None, typer.Option(help="this process of the job")] = None,
    island: Annotated[str | None, typer.Option(help="name of this process's island")] = None,
    secret_file: Annotated[
        pathlib.Path | None, typer.Option(help="file with the job secret")
    ] = None,
    join: _Join = False,
) -> None:
    """Run an unmodified JAX program as one process of a job.

    jax.distributed.initialize of the program joins the job, and jax.distributed.shutdown leaves it.
    A program that uses JAX without having joined fails, unless --join joins for it. Options are
    JAXHET_* variables of the same meaning, and win over the environment. The command can follow
    jaxhet launch, srun or mpirun, or be a pod's command. If the environment describes no job of
    jaxhet, JAX's own functions are called.
    """
    options = _run.Options(coordinator, num_processes, process_id, island, secret_file, join)
    _run.run(command, options)


@_app.command()
def coordinator(
    bind: Annotated[
        str,
        typer.Option(metavar="ADDRESS:PORT", help="address to listen on; 0.0.0.0 or [::]: all"),
    ],
    islands: Annotated[
        str,
        typer.Option(
            metavar="NAME=N,...",
            help="islands in the order of process ids, with their numbers of processes",
        ),
    ] = "",
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="processes of the job, if --islands is not given")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="name or address by which processes reach the coordinator; default: the address"
            " that each process connected to",
        ),
    ] = None,
) -> None:
    """Serve one job: collect its processes, check that they agree, report failures.

    Processes need its address in JAXHET_COORDINATOR_ADDRESS, JAXHET_LAUNCHED=1, and the same
    secret as the coordinator in JAXHET_JOB_SECRET or JAXHET_JOB_SECRET_FILE. With --islands the
    coordinator assigns process ids to processes that know their JAXHET_ISLAND and
    JAXHET_ISLAND_PROCESS_ID. It reads no stdin, is ready when its port answers, and ends with the
    job. The exit code is 0 if every process said goodbye, else 1.
    """
    names = tuple(part.strip() for part in islands.split(",") if part.strip())
    options = _coordinator.Options(bind, advertise, num_processes, names)
    raise typer.Exit(_coordinator.serve(options))


@_app.command()
def env(json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False) -> None:
    """Print this process's place in a job according to the environment, and the sources.

    Sources are JAXHET_*, JAX's own variables, and the variables of Slurm, Open MPI, MPICH, JobSet,
    Volcano and Indexed Jobs of Kubernetes. The exit code is 0 if jaxhet.initialize needs nothing
    more, else 1.
    """
    raise typer.Exit(_env.env(as_json=json))


@_app.command()
def plan(  # noqa: PLR0913 (one parameter an option: typer reads them)
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="function that returns the program, also as MODULE:FUNCTION",
        ),
    ],
    vendor: Annotated[
        Vendor, typer.Option(help="compiler: cuda for H100s, rocm for MI350Xs, or cpu")
    ] = _PLAN_DEFAULTS.vendor,
    islands: Annotated[int, typer.Option(min=1, help="number of islands")] = _PLAN_DEFAULTS.islands,
    devices: Annotated[
        int, typer.Option(min=1, help="devices of each island")
    ] = _PLAN_DEFAULTS.devices,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            help="bandwidth of a device's link to other islands, in 1e9 B/s; adds the time at it"
        ),
    ] = None,
    latency_us: Annotated[
        float, typer.Option(help="latency of an exchange, part of the time of --link-gb-per-s")
    ] = _PLAN_DEFAULTS.latency_us,
    tflop_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="rate of a device's matrix products, in 1e12 operations per second, to compare"
            " with --link-gb-per-s; assumed if it is not given: 400 (cuda), 900 (rocm), 0.1 (cpu)",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Print a program's exchanges over islands, without a job and without GPUs.

    FUNCTION is called without arguments and returns (jitted, args), or the result of
    jitted.lower(...). jaxhet.make_mesh returns the devices of a pretended job, on which nothing can
    run; arguments are jax.ShapeDtypeStructs with shardings. jaxhet.initialize does nothing there.
    Options of the compiler are read from JAXHET_*.
    """
    options = _plan.Options(
        vendor=vendor,
        islands=islands,
        devices=devices,
        link_gb_per_s=link_gb_per_s,
        latency_us=latency_us,
        tflop_per_s=tflop_per_s,
        json=json,
    )
    print(_plan.plan(target, options), end="")


@_app.command()
def doctor(  # noqa: PLR0913 (one parameter an option: typer reads them)
    peer: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="try to reach this address as well"),
    ] = None,
    qualify: Annotated[
        bool, typer.Option(help="prove the transports between the processes of a job, on CPU")
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="coordinator of the job of --qualify; process 0 listens there"
        ),
    ] = None,
    process_id: Annotated[
        int | None, typer.Option(help="this process of the job of --qualify")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(help="processes of the job of --qualify")
    ] = None,
    report: Annotated[
        pathlib.Path, typer.Option(help="file in which process 0 writes the proofs, as JSON")
    ] = _DOCTOR_DEFAULTS.report,
    json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """List the usable parts of this machine, and why other parts are not usable.

    The exit code is 0 if everything that a job needs works, 1 if a line says "error", and 2 if the
    answer could not be found. Start --qualify on every host at the same time, or by jaxhet launch;
    its exit code is 0 if every pair of processes has a proven transport and no transport failed.
    """
    options = _doctor.Options(
        peer=peer,
        qualify=qualify,
        coordinator=coordinator,
        process_id=process_id,
        num_processes=num_processes,
        report=report,
        json=json,
    )
    raise typer.Exit(_doctor.doctor(options))


@_app.command()
def bench(
    collectives: Annotated[
        str, typer.Option(metavar="NAME,...", help="collectives: all_reduce, all_gather, …; or all")
    ] = _BENCH_DEFAULTS.collectives,
    sizes: Annotated[
        str, typer.Option(metavar="BYTES,...", help="size of a device's larger buffer; K, M, G")
    ] = _BENCH_DEFAULTS.sizes,
    dtypes: Annotated[
        str, typer.Option(metavar="NAME,...", help="types: float32, bfloat16, …; or all")
    ] = _BENCH_DEFAULTS.dtypes,
    iterations: Annotated[
        int, typer.Option(min=1, help="timed calls of each collective")
    ] = _BENCH_DEFAULTS.iterations,
    warmup: Annotated[
        int, typer.Option(min=0, help="untimed calls before the timed ones")
    ] = _BENCH_DEFAULTS.warmup,
    json: Annotated[
        pathlib.Path | None, typer.Option(help="file in which process 0 writes the rows")
    ] = None,
) -> None:
    """Time and check the collectives of a job; every process of the job runs this command.

    Example: jaxhet launch --islands 2 -- jaxhet bench. algbw is bytes / time; busbw is algbw times
    2 (n - 1) / n for all_reduce, (n - 1) / n for all_gather, reduce_scatter and all_to_all, 1 for
    permute, with n devices. The exit code is 1 if an element was wrong or a case could not run.
    """
    options = _bench.Options(
        collectives=collectives,
        sizes=sizes,
        dtypes=dtypes,
        iterations=iterations,
        warmup=warmup,
        json=json,
    )
    raise typer.Exit(_bench.bench(options))


@_app.command()
def trace(
    folder: Annotated[
        pathlib.Path, typer.Argument(metavar="FOLDER", help="JAXHET_TRACE_FOLDER of the job")
    ],
    output: Annotated[
        pathlib.Path, typer.Option("--output", "-o", metavar="FILE", help="file to write")
    ] = pathlib.Path("trace.json"),
) -> None:
    """Merge the last exchanges of a job's processes into one trace for Perfetto or Chrome.

    With JAXHET_TRACE_FOLDER each process writes its last exchanges to that folder when it leaves
    or the job fails. Copy the files of all hosts into FOLDER. Rows are ranks and transports. Times
    are on the coordinator's clock, which each process has measured.
    """
    raise typer.Exit(_trace.trace(folder, output))


def main() -> None:
    """Runs the command `jaxhet`. Errors of jaxhet are one line and exit code 2."""
    try:
        _app()
    except JaxhetError as error:
        print(f"jaxhet.{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
