"""The guests themselves: what every other test here stands on."""

import pytest

from tests.rdma_vm.guest import Guest, GuestError, boot
from tests.rdma_vm.image import ROOT, Image

_SERVER = "ib_write_bw -d rxe0 -x 1 -F -s 65536 -n 20"
_CLIENT = f"until {_SERVER} 10.77.0.1; do sleep 1; done"  # until the server listens


def test_command_reports_its_status_and_output(guest: Guest):
    ended = guest.run("pwd; echo oops >&2; exit 3", 30)
    assert ended.code == 3
    assert ended.text == f"{ROOT}\noops\n"


def test_guest_sees_the_host_and_keeps_nothing(guest: Guest):
    mark = ROOT / "made-in-a-guest"
    ended = guest.run(f"cmp Makefile {ROOT}/Makefile && touch {mark} && ls {mark}", 30)
    assert ended.code == 0, ended.text
    assert not mark.exists()


def test_hung_command_is_an_error_with_its_output(image: Image):
    guest = boot(image)
    with pytest.raises(GuestError, match=r"no answer in time\nbefore\n"):
        guest.run("echo before; sleep 60", 2)
    assert not guest.is_alive


def test_dead_guest_is_an_error_with_its_console(image: Image):
    guest = boot(image)
    with pytest.raises(GuestError, match="Kernel panic"):
        guest.run("echo c > /proc/sysrq-trigger", 30)


def test_rdma_write_in_one_guest(guest: Guest):
    ended = guest.run(f"{_SERVER} & {_CLIENT} && wait $!", 120)
    assert ended.code == 0, ended.text


def test_rdma_write_between_two_guests(pair: tuple[Guest, Guest]):
    server, client = pair
    serving = server.start(_SERVER)
    ended = client.run(_CLIENT, 120)
    assert ended.code == 0, ended.text
    assert server.wait(serving, 60).code == 0
