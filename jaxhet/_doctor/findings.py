"""Problems among the facts that were found. Pure."""

from collections.abc import Iterator, Sequence

from jaxhet._doctor.report import Finding, Host, Nic, Port, Software, Vendor
from jaxhet._doctor.second_look import SecondLook
from jaxhet._jax import jaxlib
from jaxhet._vendors import BY_NAME

_MIN_SHM_BYTES = 1 << 30  # containers have 64 MiB unless they are told otherwise


def find(
    software: Software,
    vendors: Sequence[Vendor],
    nics: Sequence[Nic],
    host: Host,
    second: SecondLook,
) -> tuple[Finding, ...]:
    """All findings, errors first."""
    found = [
        *_of_software(software, vendors),
        *(finding for vendor in vendors for finding in _of_vendor(vendor, software)),
        *_of_host(host, vendors),
    ]
    if nics:
        found += [
            *_of_rdma(software, host),
            *(finding for nic in nics for finding in _of_nic(nic)),
            *(finding for nic in nics for finding in of_second_look(nic, second)),
            *(finding for vendor in vendors for finding in _of_device_memory(vendor)),
        ]
    return tuple(sorted(dict.fromkeys(found), key=lambda f: f.level))  # "error" < "warning"


def _error(text: str) -> Finding:
    return Finding("error", text)


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def _of_software(software: Software, vendors: Sequence[Vendor]) -> Iterator[Finding]:
    if not software.hlo_hook.usable:
        yield _error(software.hlo_hook.text)
    if line := jaxlib.untested(software.jax):
        yield _warning(line)
    there = {vendor.name for vendor in vendors if vendor.hardware or vendor.gpus}
    for plugin in software.plugins:
        if plugin.problem:
            level = _error if plugin.vendor in there else _warning
            yield level(
                f"{plugin.problem} Install {plugin.name}=={software.jaxlib}, or uninstall it"
            )


def _of_vendor(vendor: Vendor, software: Software) -> Iterator[Finding]:
    count = f"{len(vendor.hardware)} GPU{'s' if len(vendor.hardware) > 1 else ''}"
    has_plugin = any(plugin.vendor == vendor.name for plugin in software.plugins)
    if vendor.hardware and vendor.reason:
        level = _error if has_plugin else _warning
        yield level(f"{count} for {vendor.name} can't be used: {vendor.reason}")
    if vendor.gpus and not has_plugin:
        extra = BY_NAME[vendor.name].jax_extra
        yield _warning(
            f"the driver of {vendor.name} works, but JAX has no plugin for it, and will use the"
            f" CPU: pip install '{extra}'"
        )


def _of_host(host: Host, vendors: Sequence[Vendor]) -> Iterator[Finding]:
    has_gpus = any(vendor.gpus for vendor in vendors)
    if has_gpus and (host.shm_bytes or 0) < _MIN_SHM_BYTES:
        yield _warning(
            f"/dev/shm has {(host.shm_bytes or 0) >> 20} MiB, which NCCL and RCCL may run out of: a"
            " container needs --shm-size=8g"
        )


def _of_rdma(software: Software, host: Host) -> Iterator[Finding]:
    if not software.verbs.usable:
        yield _warning(f"there are NICs, but no verbs library: {software.verbs.text}; install it")
    if host.memlock_bytes is not None:
        yield _warning(
            f"at most {host.memlock_bytes >> 20} MiB may be locked, and RDMA locks what it moves:"
            " `ulimit -l unlimited`; a container needs --ulimit memlock=-1"
        )


def _of_nic(nic: Nic) -> Iterator[Finding]:
    if nic.problem:
        yield _warning(f"{nic.name} can't be used: {nic.problem}")
    for port in nic.ports:
        where = f"port {port.number} of {nic.name}"
        if port.state != "ACTIVE":
            yield _warning(f"{where} is {port.state} ({port.physical_state}): {_port_advice(port)}")
        elif port.problem and not port.gid_reason:  # not one that is left out
            yield _warning(f"{where} can't be used: {port.problem}")


def of_second_look(nic: Nic, second: SecondLook) -> Iterator[Finding]:
    """Differences between the two looks at a NIC."""
    for port in nic.ports:
        seen = second.ports.get((nic.name, port.number))
        if seen is None or nic.problem:
            continue
        gids = frozenset((gid.index, gid.address) for gid in port.gids)
        differing = {
            "state": seen.is_active != (port.state == "ACTIVE"),
            "MTU": seen.is_active and port.active_mtu not in (None, seen.active_mtu),
            "GIDs": seen.gids != gids,
        }
        if any(differing.values()):
            what = ", ".join(name for name, differs in differing.items() if differs)
            yield _warning(
                f"pyverbs sees another {what} of port {port.number} of {nic.name} than jaxhet: it"
                " is just changing, or the libraries are of two versions; ask again"
            )


def _port_advice(port: Port) -> str:
    if port.physical_state != "LinkUp":
        return "check cable, switch and driver, or leave it if it is not in use"
    if port.link_layer == "InfiniBand":
        return "no subnet manager has set it up"
    return "bring its network device up"


def _of_device_memory(vendor: Vendor) -> Iterator[Finding]:
    for gpu in vendor.gpus:
        if not gpu.dma_buf:
            yield _warning(
                f"no NIC can reach the memory of {gpu.id}: it has no dma-buf; data goes through"
                " host memory"
            )
