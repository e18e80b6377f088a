"""The report as text on a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxhet._doctor.report import Host, Nic, Part, Report, Software, Vendor
from jaxhet._job.proofs import Qualification

_COLOURS = {"error": "bold red", "warning": "yellow"}


def show(report: Report, console: Console) -> None:
    """Prints the report. Problems are the last lines, where users see them."""
    _section(console, "Software", _of_software(report.software))
    _section(console, "GPUs", (row for vendor in report.vendors for row in _of_vendor(vendor)))
    nics = [row for nic in report.nics for row in _of_nic(nic)]
    _section(console, "NICs", nics or [("none", "the kernel has no InfiniBand or RoCE device")])
    _section(console, "Kernel", _of_host(report.host))
    for finding in report.findings:
        console.print(Text(f"{finding.level}: ", _COLOURS[finding.level]) + Text(finding.text))
    if report.ok:
        console.print(Text("ok: all that is needed works", "green"))


def show_proofs(found: Qualification, console: Console) -> None:
    """Prints the proofs, a line for each size."""
    table = Table(box=None, pad_edge=False)
    for title in ("processes", "transport", "bytes", "p50 us", "GB/s each way"):
        table.add_column(title, justify="left" if title in ("processes", "transport") else "right")
    unproven = []
    for pair in found.pairs:
        places = zip(pair.processes, pair.hosts, pair.platforms, strict=True)
        where = ", ".join(f"{process}: {platform} of {host}" for process, host, platform in places)
        for proof in pair.proofs:
            if proof.state != "proven":
                unproven.append(f"{where}: {proof.transport} {proof.state}: {proof.reason}")
            for swap in proof.swaps:
                figures = (f"{swap.num_bytes}", f"{swap.p50_us:.0f}", f"{swap.gb_per_s:.3g}")
                table.add_row(Text(where), proof.transport, *figures)
    console.print(table)
    for line in unproven:
        console.print(Text(line, "yellow"))
    conclusion = (
        "ok: every pair has a proven transport"
        if found.ok
        else "error: a pair has no proven transport, or one failed"
    )
    console.print(Text(conclusion, "green" if found.ok else "bold red"))


def _section(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    console.print(Text(title, "bold"))
    console.print(table)


def _of_software(software: Software) -> Iterable[tuple[str, str]]:
    yield "jaxhet", software.jaxhet
    yield "Python", software.python
    yield "jax, jaxlib", f"{software.jax}, {software.jaxlib}"
    yield "HLO hook", "there" if software.hlo_hook.usable else software.hlo_hook.text
    for plugin in software.plugins:
        yield plugin.name, plugin.version + (f": {plugin.problem}" if plugin.problem else "")
    if not software.plugins:
        yield "plugins", "none: JAX uses the CPU"
    yield "libibverbs", _part(software.verbs)
    yield "pyverbs", _part(software.pyverbs)
    yield "libcrypto", _part(software.libcrypto)


def _part(part: Part) -> str:
    return part.text if part.usable else f"off: {part.text}"


def _of_vendor(vendor: Vendor) -> Iterable[tuple[str, str]]:
    for gpu in vendor.gpus:
        can = {
            "stream values": gpu.stream_values,
            "dma-buf": gpu.dma_buf,
            "GPUDirect RDMA": gpu.gpu_direct_rdma,
        }
        parts = ", ".join(name if has else f"no {name}" for name, has in can.items())
        yield gpu.id, f"{gpu.name}, {gpu.pci}, driver {gpu.driver}; {parts}"
    if not vendor.gpus:
        there = ", ".join(vendor.hardware) or "no GPU"
        reason = vendor.reason or "the driver shows no GPU"
        yield vendor.name, f"off: {there} on the PCI bus; {reason}"


def _of_nic(nic: Nic) -> Iterable[tuple[str, str]]:
    yield nic.name, f"off: {nic.problem}" if nic.problem else "usable"
    for port in nic.ports:
        mtu = f"MTU {port.active_mtu}" if port.active_mtu else "MTU unknown without libibverbs"
        layer = "RoCE" if port.link_layer == "Ethernet" else port.link_layer
        off = f"; off: {port.problem}" if port.problem else ""
        yield f"  port {port.number}", f"{port.state}, {layer}, {port.rate}, {mtu}{off}"
        index = "none" if port.gid_index is None else str(port.gid_index)
        yield "    GID", f"{index}: {port.gid_reason}" if port.gid_reason else index
        for gid in port.gids:
            yield f"    {gid.index:3}", f"{gid.address}  {gid.type}  {gid.netdev}".rstrip()


def _of_host(host: Host) -> Iterable[tuple[str, str]]:
    yield "release", host.kernel
    yield "locked memory", "unlimited" if host.memlock_bytes is None else _size(host.memlock_bytes)
    yield "/dev/shm", "not there" if host.shm_bytes is None else _size(host.shm_bytes)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"
