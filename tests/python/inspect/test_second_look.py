"""pyverbs as a second look at NICs, with a pyverbs that is not one."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from jaxhet._doctor import findings, second_look
from jaxhet._doctor.nics import read_nics
from jaxhet._doctor.report import Nic
from jaxhet._doctor.second_look import SeenPort
from tests.python.inspect.trees import Tree, chosen

# Stand-in for the part of pyverbs.device that the reader uses; mlx5_1 can't be opened.
_PYVERBS = """\
from types import SimpleNamespace as Some

def get_device_list():
    return [Some(name=b"mlx5_0"), Some(name=b"mlx5_1")]

class Context:
    def __init__(self, name):
        if name == "mlx5_1":
            raise RuntimeError("Failed to open device mlx5_1")
    def query_device(self):
        return Some(phys_port_cnt=1)
    def query_port(self, number):
        return Some(state=4, active_mtu=5, gid_tbl_len=7)
    def query_gid(self, number, index):
        gids = {GIDS}
        return Some(gid=gids[index])
"""


def _python(folder: pathlib.Path, nic: Nic) -> str:
    """A Python that has such a pyverbs, whose NIC has the GIDs of `nic`."""
    empty = "0000:0000:0000:0000:0000:0000:0000:0000"
    gids = {gid.index: gid.address for gid in nic.ports[0].gids}
    package = folder / "lib" / "pyverbs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    listed = repr([gids.get(i, empty) for i in range(7)])
    (package / "device.py").write_text(_PYVERBS.replace("{GIDS}", listed))
    python = folder / "python3"
    python.write_text(
        f'#!/bin/sh\nshift\nPYTHONPATH={package.parent} exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def nic(tmp_path: pathlib.Path) -> Nic:
    Tree(tmp_path).roce_host()
    return read_nics(tmp_path, chosen("mlx5_0"))[0]


def test_first_python_with_pyverbs_is_asked(tmp_path: pathlib.Path, nic: Nic):
    python = _python(tmp_path, nic)
    seen = second_look.look(["/no/python3", "false", python])
    assert seen.part.usable
    assert seen.part.text == f"of {python}, which sees 2 NICs"
    (port,) = seen.ports.values()
    assert (port.is_active, port.active_mtu) == (True, 4096)
    assert (5, "::ffff:10.1.0.7") in port.gids
    assert [*findings.of_second_look(nic, seen)] == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"is_active": False}, "state"),
        ({"active_mtu": 1024}, "MTU"),
        ({"gids": frozenset({(0, "fe80::1")})}, "GIDs"),
        ({"is_active": False, "gids": frozenset()}, "state, GIDs"),
    ],
)
def test_what_differs_is_a_warning(nic: Nic, changes: dict[str, object], what: str):
    gids = frozenset((gid.index, gid.address) for gid in nic.ports[0].gids)
    port: SeenPort = dataclasses.replace(SeenPort(True, 4096, gids), **changes)  # type: ignore[arg-type]
    seen = dataclasses.replace(second_look.look([]), ports={("mlx5_0", 1): port})
    (finding,) = findings.of_second_look(nic, seen)
    assert finding.level == "warning"
    assert f"pyverbs sees another {what} of port 1 of mlx5_0" in finding.text


def test_without_pyverbs_there_is_a_reason():
    seen = second_look.look(["/no/python3"])
    assert not seen.part.usable
    assert "not installed" in seen.part.text
    assert "/no/python3" in seen.part.text
    failing = second_look.look(["false"])
    assert "false ended with exit code 1" in failing.part.text


def test_reader_needs_nothing_of_jaxhet(tmp_path: pathlib.Path, nic: Nic):
    python = _python(tmp_path, nic)
    reader = pathlib.Path(second_look.__file__).with_name("pyverbs_reader.py")
    copy = tmp_path / "reader.py"
    copy.write_text(reader.read_text())
    ended = subprocess.run(
        [python, "-I", str(copy)], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    assert '"mlx5_1": {"error": "Failed to open device mlx5_1"}' in ended.stdout
