"""Network namespaces that stand for hosts with several network interfaces.

Host i has the address 10.77.k.(i + 1)/24 on its interface eth<k>, unless the test names another
network. The interfaces eth<k> of all hosts are joined by switch k: a bridge in a namespace of its
own, or a wire with a rate, a delay and losses (`tests/support/wire.cc`). Everything ends with the
processes that hold the namespaces.
"""

import concurrent.futures
import functools
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.jobs import ROOT
from tests.support.scripts import Ended, environment

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}


def unavailable(tools: Sequence[str] = tuple(_TOOLS)) -> str:
    """Why this machine can't stand for several hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [f"{tool} ({_TOOLS[tool]})" for tool in tools if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)}"
    ended = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "" if ended.returncode == 0 else "network namespaces are not permitted here"


def unavailable_wire() -> str:
    """Why this machine can't have two hosts with nothing but a wire, or ""."""
    if why := unavailable(("unshare", "nsenter")):
        return why
    if not pathlib.Path("/dev/net/tun").exists():
        return "a wire needs TAP interfaces (/dev/net/tun)"
    compiler = os.environ.get("CXX", "c++")
    return "" if shutil.which(compiler) else f"a wire needs a C++ compiler ({compiler}, or CXX)"


class _Namespace:
    """A network namespace, held by a process that waits for the end of its input."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._holder.pid
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write("held\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == "held\n"

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--", *arguments]

    def run(self, *arguments: str) -> None:
        subprocess.run(self.command(*arguments), check=True)

    def close(self) -> None:
        self._holder.communicate()


class Hosts:
    """Some hosts, with as many interfaces each as there are switches.

    Args:
      num_hosts: Number of hosts, at most 250.
      num_interfaces: Number of interfaces of each host, without the interface of a wire.
      mbit_s: Rate at which each interface sends; None: as fast as it can.
      network: First two numbers of all addresses; packets never leave the namespaces.
    """

    def __init__(
        self,
        num_hosts: int,
        num_interfaces: int,
        mbit_s: int | None = None,
        network: str = "10.77",
    ):
        self.num_interfaces = num_interfaces
        self._network = network
        self._switches = _Namespace()
        self._hosts = [_Namespace() for _ in range(num_hosts)]
        for k in range(num_interfaces):
            self._switches.run("ip", "link", "add", f"switch{k}", "type", "bridge")
            self._switches.run("ip", "link", "set", f"switch{k}", "up")
        for i, host in enumerate(self._hosts):
            if num_interfaces:
                host.run("ip", "link", "set", "lo", "up")
            for k in range(num_interfaces):
                self._plug_in(i, k)
                if mbit_s is not None:
                    self.shape(i, k, mbit_s)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*self._hosts, self._switches):
            namespace.close()

    def address(self, host: int, interface: int = 0) -> str:
        return f"{self._network}.{interface}.{host + 1}"

    def shape(self, host: int, interface: int, mbit_s: int) -> None:
        """Limits the rate at which an interface sends."""
        rate = ("rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "100ms")
        self._hosts[host].run("tc", "qdisc", "add", "dev", f"eth{interface}", "root", "tbf", *rate)

    def take_down(self, host: int, interface: int) -> None:
        self._hosts[host].run("ip", "link", "set", f"eth{interface}", "down")

    def unplug(self, host: int, interface: int) -> None:
        """Takes an interface off the switch. The host still sees it as up."""
        self._switches.run("ip", "link", "set", f"h{host}e{interface}", "nomaster")

    def start(
        self, script: str, envs: Sequence[Mapping[str, str]]
    ) -> list["subprocess.Popen[str]"]:
        """Starts a Python script on each host, with its environment."""
        return self.start_each([script] * len(self._hosts), envs)

    def start_each(
        self, scripts: Sequence[str], envs: Sequence[Mapping[str, str]] = ({}, {})
    ) -> list["subprocess.Popen[str]"]:
        """Starts a Python script of its own on each host."""
        base = environment()
        return [
            subprocess.Popen(
                host.command(sys.executable, "-c", script),
                cwd=ROOT,
                env={**base, **env},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host, script, env in zip(self._hosts, scripts, envs, strict=True)
        ]

    def job(self, **common: str) -> list[dict[str, str]]:
        """Environments of a job of one process and island on each host, over socket."""
        shared = {
            "JAXHET_COORDINATOR_ADDRESS": f"{self.address(0)}:7000",
            "JAXHET_NUM_PROCESSES": str(len(self._hosts)),
            "JAXHET_JOB_SECRET": "a secret of tests",
            "JAXHET_TRANSPORTS": "socket",
            **common,
        }
        return [
            {**shared, "JAXHET_PROCESS_ID": str(i), "JAXHET_ISLAND": f"island{i}"}
            for i in range(len(self._hosts))
        ]

    def wire(self, delay_ms: float, loss: float, mbit_s: float = 0) -> "subprocess.Popen[str]":
        """Joins hosts 0 and 1 by their interface eth<num_interfaces>, over a long line.

        Args:
          delay_ms: Time that a packet needs in one direction.
          loss: Part of the packets that is lost at random.
          mbit_s: Rate of each direction; 0: no limit.

        Returns:
          The process that carries the packets, until its input ends. It prints counts then.
        """
        name = f"eth{self.num_interfaces}"
        numbers = (delay_ms, loss, mbit_s, 1)  # 1: seed of the losses
        ends = (str(host.pid) for host in self._hosts[:2])
        addresses = (self.address(host, self.num_interfaces) for host in (0, 1))
        pairs = itertools.chain(*zip(ends, addresses, strict=True))
        process = subprocess.Popen(
            [_wire_program(), name, *map(str, numbers), *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def _plug_in(self, host: int, interface: int) -> None:
        inside, outside = f"eth{interface}", f"h{host}e{interface}"
        pid = str(self._hosts[host].pid)
        ends = ("name", outside, "type", "veth", "peer", "name", inside, "netns", pid)
        self._switches.run("ip", "link", "add", *ends)
        self._switches.run("ip", "link", "set", outside, "master", f"switch{interface}", "up")
        self._name(host, interface)

    def _name(self, host: int, interface: int) -> None:
        """Gives an interface its address."""
        name, address = f"eth{interface}", f"{self.address(host, interface)}/24"
        self._hosts[host].run("ip", "address", "add", address, "dev", name)
        self._hosts[host].run("ip", "link", "set", name, "up")


@functools.cache
def _wire_program() -> pathlib.Path:
    """`tests/support/wire.cc`, compiled."""
    source, program = ROOT / "tests" / "support" / "wire.cc", ROOT / "_build" / "wire"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        new = program.with_suffix(f".{os.getpid()}")  # other workers may do the same
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-std=c++20", "-O2", "-o", new, source], check=True)
        new.rename(program)
    return program


def wait(processes: Sequence["subprocess.Popen[str]"], timeout_s: float) -> list[Ended]:
    """How all processes end, and what they have still to print; those that do not are killed."""
    streams = [process.stdout for process in processes if process.stdout is not None]
    with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
        texts = [pool.submit(stream.read) for stream in streams]
        concurrent.futures.wait(texts, timeout_s)
        for process, text in zip(processes, texts, strict=True):
            if not text.done():
                process.kill()
    for process, stream in zip(processes, streams, strict=True):
        stream.close()
        process.wait()
    return [Ended(p.returncode, text.result()) for p, text in zip(processes, texts, strict=True)]
