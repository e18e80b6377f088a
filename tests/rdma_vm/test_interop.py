"""`jaxhet doctor` on a machine with an RDMA NIC in software."""

import json

import pytest

from tests.rdma_vm.guest import REAL_VERBS, Guest

pytestmark = pytest.mark.early

_DOCTOR = ".venv/bin/python -m jaxhet.cli doctor --json 2>/dev/null"


@pytest.mark.slow  # emulation of the doctor takes two minutes
def test_doctor_sees_the_nic(guest: Guest):
    ended = guest.run(_DOCTOR, 240, REAL_VERBS)
    report = json.loads(ended.text)
    assert [nic["name"] for nic in report["nics"]] == ["rxe0"]
