"""A booted virtual machine that runs commands, each with the host's files and its own output."""

import dataclasses
import itertools
import os
import pathlib
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from tests.rdma_vm.image import ROOT, Image

_BOOT_TIMEOUT_S = 90
_BOOT_TRIES = 3  # under emulation a boot hangs now and then
_MTU = 9000  # gives an RDMA MTU of 4096
_MEMORY = "3G"
# Programs of tests/cpp would find the software libibverbs of the tests first.
REAL_VERBS = {"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu"}
# The emulator moves byte after byte for `rep movsb`, with which glibc would copy large memory.
_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-ERMS,-FSRM"}
_PACKETS = "/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"
_TAIL_LINES = 80


class GuestError(AssertionError):
    """The guest died, hung, or did not come up; the text has the end of its console."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    text: str


class Guest:
    """One virtual machine with the soft-RoCE device rxe0.

    Args:
      image: image to boot.
      address: address of the network device below rxe0.
      network: our end of a stream to another guest's network device; by default the guest is alone
        and its device a dummy.
    """

    def __init__(
        self, image: Image, address: str = "10.77.0.1", network: socket.socket | None = None
    ):
        self.address = address
        self._folder = tempfile.TemporaryDirectory(prefix="jaxhet-guest-")
        self._share = pathlib.Path(self._folder.name, "share")
        self._share.mkdir()
        self._console = pathlib.Path(self._folder.name, "console.txt")
        self._numbers = itertools.count()
        self._port, port = socket.socketpair()
        self._buffer = b""
        descriptors = [end.fileno() for end in (port, network) if end]
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                self._command(image, *descriptors),
                env=image.host_environment(),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        port.close()

    def _command(self, image: Image, port: int, network: int | None = None) -> list[str]:
        netdev = "dummy" if network is None else "eth0"
        kernel = (
            "console=ttyS0 loglevel=4 panic=-1 nokaslr mitigations=off tsc=reliable nowatchdog"
            " audit=0 random.trust_cpu=on rcupdate.rcu_expedited=1"
            f" jaxhet.netdev={netdev} jaxhet.address={self.address} jaxhet.mtu={_MTU}"
        )
        mounts = {"host": "/", "packages": image.packages}
        shares = {name: f"path={path},readonly=on" for name, path in mounts.items()}
        shares["share"] = f"path={self._share}"
        command = ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *image.firmware()]
        command += ["-M", "q35", "-cpu", "max,la57=off"]
        command += ["-accel", "tcg,thread=multi,tb-size=512", "-m", _MEMORY]
        command += ["-smp", "2" if network is None else "1"]  # the host has two cores
        command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        command += ["-append", kernel, "-serial", "stdio", "-device", "virtio-serial-pci"]
        command += ["-chardev", f"socket,id=port,fd={port}"]
        command += ["-device", "virtserialport,nr=1,chardev=port"]
        for name, options in shares.items():
            files = f"local,id={name},security_model=none,multidevs=remap,{options}"
            command += ["-fsdev", files]
            command += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        if network is not None:
            mac = f"52:54:00:77:00:{int(self.address.rpartition('.')[2]):02x}"
            command += ["-netdev", f"socket,id=network,fd={network}", "-device"]
            command += [f"virtio-net-pci,netdev=network,mac={mac},host_mtu={_MTU},romfile="]
        return command

    def wait_up(self) -> None:
        """Waits until the guest takes commands."""
        self._wait("up", _BOOT_TIMEOUT_S)

    def start(self, script: str, env: Mapping[str, str] | None = None) -> str:
        """Starts a shell script in the project's root; returns its name for `wait`."""
        name = f"command{next(self._numbers)}"
        exports = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": "/tmp", **_COPIES}
        exports |= env or {}
        lines = [f"export PATH={shlex.quote(os.environ['PATH'])}:/usr/sbin:/sbin"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
        lines += [f"cd {shlex.quote(str(ROOT))}", script]
        (self._share / name).write_text("\n".join(lines) + "\n")
        try:
            self._port.sendall(name.encode() + b"\n")
        except OSError as error:
            raise GuestError(f"the guest has gone: {error}\n{self._tail()}") from None
        return name

    def wait(self, name: str, timeout_s: float) -> Ended:
        """Waits for a command; commands of one guest run one after another.

        Raises:
          GuestError: the guest died, or the command takes too long: then the guest is ended.
        """
        code = self._wait(name, timeout_s)
        return Ended(code, self._output(name))

    def run(self, script: str, timeout_s: float, env: Mapping[str, str] | None = None) -> Ended:
        """`start` and `wait`."""
        return self.wait(self.start(script, env), timeout_s)

    def packets(self) -> int:
        """How many packets rxe0 has sent: shows that a test used it."""
        return int(self.run(f"cat {_PACKETS}", 60).text)

    @property
    def is_alive(self) -> bool:
        """Whether the emulator still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the guest at once: it keeps nothing."""
        self._port.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _wait(self, name: str, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            answered, code = self._answer(name, deadline)
            if answered == name:  # else of a command that a failed test did not wait for
                return code

    def _answer(self, name: str, deadline: float) -> tuple[str, int]:
        while b"\n" not in self._buffer:
            self._port.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._port.recv(4096)
            except TimeoutError:
                self._give_up(name, "no answer in time")
            except OSError as error:
                self._give_up(name, str(error))
            else:
                if not data:
                    self._give_up(name, "it ended")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answered, code = line.decode().split()
        return answered, int(code)

    def _give_up(self, name: str, why: str) -> NoReturn:
        text = f"guest {self.address}, {name}: {why}\n{self._output(name)}\n{self._tail()}"
        self.close()
        raise GuestError(text)

    def _output(self, name: str) -> str:
        path = self._share / f"{name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _tail(self) -> str:
        lines = self._console.read_text(errors="replace").splitlines()
        return "\n".join(["the end of its console:", *lines[-_TAIL_LINES:]])


def boot(image: Image) -> Guest:
    """Starts a guest, and waits until it is up."""
    return _up(lambda: [Guest(image)])[0]


def boot_pair(image: Image) -> tuple[Guest, Guest]:
    """Two guests, up, whose rxe0 are joined."""

    def pair() -> list[Guest]:
        ends = socket.socketpair()
        guests = [Guest(image, f"10.77.0.{i + 1}", end) for i, end in enumerate(ends)]
        for end in ends:
            end.close()
        return guests

    first, second = _up(pair)
    return first, second


def _up(make: Callable[[], list[Guest]]) -> list[Guest]:
    """The guests that `make` starts, once all of them are up."""
    for last in (*[False] * (_BOOT_TRIES - 1), True):
        guests = make()
        try:
            for guest in guests:
                guest.wait_up()
        except GuestError:
            for guest in guests:
                guest.close()
            if last:
                raise
        else:
            return guests
    raise AssertionError("not reached")
