"""Our queue pairs talk to a peer that was written with pyverbs, and to ourselves."""

import json

import pytest

from tests.rdma_vm.guest import REAL_VERBS, Guest

pytestmark = pytest.mark.early

_DOCTOR = ".venv/bin/python -m jaxhet.cli doctor --json 2>/dev/null"


@pytest.mark.slow  # emulation of the doctor takes two minutes
def test_pyverbs_sees_the_nic_as_we_do(guest: Guest):
    ended = guest.run(_DOCTOR, 240, REAL_VERBS)
    report = json.loads(ended.text)
    assert report["software"]["pyverbs"]["text"] == "of /usr/bin/python3, which sees 1 NIC"
    assert [nic["name"] for nic in report["nics"]] == ["rxe0"]
    assert not [finding for finding in report["findings"] if "pyverbs" in finding["text"]]
