"""Network namespaces that stand for hosts with several network interfaces.

Host i has the address 10.77.k.(i + 1)/24 on its interface eth<k>, unless the test names another
network. The interfaces eth<k> of all hosts are joined by switch k: a bridge in a namespace of its
own, or a wire that delays and loses packets (`tests/support/wire.py`). Everything ends with the
processes that hold the namespaces.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.jobs import ROOT
from tests.support.scripts import Ended, environment

_TOOLS = ("ip", "tc", "unshare", "nsenter")


def unavailable() -> str:
    """Why this machine can't stand for several hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)"
    ended = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "" if ended.returncode == 0 else "network namespaces are not permitted here"


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
      num_interfaces: Number of interfaces of each host.
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
            for host, env in zip(self._hosts, envs, strict=True)
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

    def wire(self, delay_ms: int, loss: float) -> "subprocess.Popen[str]":
        """Joins hosts 0 and 1 by their interface eth<num_interfaces>, over a bad line.

        Returns:
          The process that carries the packets, until its input ends.
        """
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.wire", f"eth{self.num_interfaces}"),
                *(str(delay_ms), str(loss), *(str(host.pid) for host in self._hosts[:2])),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for i in (0, 1):
            self._name(i, self.num_interfaces)
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
