"""`jaxhet trace`: the last exchanges of all processes on one clock, for a browser."""

import json
import pathlib
from typing import Annotated, Any

import typer

from jaxhet._errors import UsageError
from jaxhet._telemetry import TRACE_FILE


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
    files = TRACE_FILE.format("*")
    traces = [_read(path) for path in sorted(folder.glob(files))]
    if not traces:
        raise UsageError(
            f"{folder} has no {files}; start the job with JAXHET_TRACE_FOLDER={folder}: each"
            " process writes its file there when it leaves or the job fails"
        )
    merged = merge(folder, traces)
    try:
        output.write_text(json.dumps(merged))
    except OSError as error:
        raise UsageError(
            f"can't write the trace to {output}: {error.strerror}; choose another file (-o)"
        ) from None
    for one in traces:
        error_us = one["otherData"]["clock_error_us"]
        clock = (
            "it never read the coordinator's clock: its times are on its own host's clock"
            if error_us is None
            else f"clock known within {error_us:.0f} us"
        )
        num = sum(event["ph"] == "X" for event in one["traceEvents"])
        print(f"process {one['otherData']['process']}: {num} exchanges; {clock}")
    print(f"wrote {output}; open it at https://ui.perfetto.dev or chrome://tracing")


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {
            "traceEvents": [event for event in found["traceEvents"] if event["ph"]],
            "otherData": {k: found["otherData"][k] for k in ("job", "process", "clock_error_us")},
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} is no trace of a process ({error}); remove it, or name the folder of"
            " JAXHET_TRACE_FOLDER"
        ) from error


def merge(folder: pathlib.Path, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """One trace of the files of a folder. Times begin with the first exchange.

    Raises:
      UsageError: The files are of several jobs.
    """
    facts = [one["otherData"] for one in traces]
    for other in facts:
        if other["job"] != facts[0]["job"]:
            raise UsageError(
                f"{folder} has files of several jobs: process {facts[0]['process']} was in job"
                f" {facts[0]['job']}, process {other['process']} in job {other['job']}; remove the"
                " files of one job, and give each job its own JAXHET_TRACE_FOLDER"
            )
    events = [event for one in traces for event in one["traceEvents"]]
    begin_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
    return {
        "traceEvents": [
            {**event, "ts": round(event["ts"] - begin_us, 3)} if "ts" in event else event
            for event in events
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            f"largest clock error of process {one['process']}, in us": one["clock_error_us"]
            for one in facts
        },
    }
