"""JAX's coordination service talks to processes of the job alone; nothing secret is sent."""

import contextlib
import pathlib
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxhet._jax import jaxlib
from jaxhet._job import coordinator, membership
from jaxhet._job.coordinator import Terms
from jaxhet._net import certificates, handshake
from jaxhet._net.addresses import listen
from jaxhet._net.channel import Channel
from jaxhet.testing import free_port
from tests.support.members import described
from tests.support.scripts import run

SECRET = b"a job secret"


@pytest.fixture(scope="module")
def authority() -> certificates.Authority:
    return certificates.Authority()


@pytest.fixture(scope="module")
def address(authority: certificates.Authority) -> Iterator[str]:
    address, service = jaxlib.start_coordination_service(
        "127.0.0.1", 1, authority.service_credentials()
    )
    yield address
    service.shutdown()


def _process(authority: certificates.Authority) -> dict[str, Any]:
    identity = certificates.Identity()
    certificate = authority.sign(identity.request, 0)
    return identity.process_credentials(certificate, authority.certificate)


def _other_authority(authority: certificates.Authority) -> dict[str, Any]:
    other = certificates.Authority()
    identity = certificates.Identity()
    certificate = other.sign(identity.request, 0)
    return identity.process_credentials(certificate, authority.certificate)


@pytest.mark.parametrize(
    "stranger",
    [_other_authority, lambda authority: authority.service_credentials()],
    ids=["another authority's", "the service's own"],
)
def test_service_refuses_who_has_no_certificate_of_a_process(
    stranger: Callable[[certificates.Authority], dict[str, Any]],
    authority: certificates.Authority,
    address: str,
) -> None:
    credentials = stranger(authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(credentials["mtls_cert_file"], credentials["mtls_key_file"])
    assert _first_byte(address, context) == b""


def _first_byte(address: str, context: ssl.SSLContext) -> bytes:
    """First bytes of the service to a TLS client: HTTP/2's settings; empty if it hangs up."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as sock,
        context.wrap_socket(sock) as tls,
        contextlib.suppress(ssl.SSLError, ConnectionResetError),
    ):
        return tls.recv(1)
    return b""


def test_service_refuses_who_has_no_certificate_at_all(
    authority: certificates.Authority, address: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert _first_byte(address, context) == b""
    credentials = _process(authority)
    context.load_cert_chain(credentials["mtls_cert_file"], credentials["mtls_key_file"])
    assert _first_byte(address, context) != b""


def test_process_refuses_a_service_that_is_another_process() -> None:
    """A process of jaxlib is aborted that can't connect."""
    script = """
from jaxlib import _jax
from jaxhet._jax import jaxlib
from jaxhet._net import certificates
authority = certificates.Authority()
def process():
    identity = certificates.Identity()
    return identity.process_credentials(authority.sign(identity.request, 0), authority.certificate)
address, service = jaxlib.start_coordination_service("127.0.0.1", 1, process())
client = _jax.get_distributed_runtime_client(
    address, 0, init_timeout=2, shutdown_timeout=2, **process()
)
client.connect()
print("connected")
"""
    (ended,) = run(script, {})
    assert ended.code == -signal.SIGABRT, ended.text
    assert "connected" not in ended.text.split()
    assert "DEADLINE_EXCEEDED" in ended.text


# Requests and answers.


def _joined(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """The credentials of a job of one process, and all that was sent."""
    sent: list[Any] = []
    send = Channel.send

    def send_noted(channel: Channel, message: Any) -> None:
        sent.append(message)
        send(channel, message)

    monkeypatch.setattr(Channel, "send", send_noted)
    address = f"127.0.0.1:{free_port()}"
    server = coordinator.Coordinator(listen(address), SECRET, Terms(1, 20))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    member = membership.connect(address, SECRET, 5)
    try:
        member.join(described(num_processes=1), 5)
    finally:
        member.leave()
        server.stop()
        thread.join(10)
    return member.credentials, sent


def test_private_key_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials, sent = _joined(monkeypatch)
    assert "PRIVATE KEY" in pathlib.Path(credentials["mtls_key_file"]).read_text()
    assert "BEGIN CERTIFICATE REQUEST" in str(sent[0])
    assert "BEGIN CERTIFICATE-" in str(sent[1])
    assert "PRIVATE KEY" not in str(sent)


def test_files_are_in_memory(authority: certificates.Authority) -> None:
    for name in _process(authority).values():
        if str(name).startswith("/"):
            assert str(pathlib.Path(name).readlink()).startswith("/memfd:jaxhet")


def test_guess_of_the_secret_takes_time() -> None:
    start = time.process_time()
    handshake._stretched.__wrapped__(b"a guess")
    assert time.process_time() - start > 0.005  # an HMAC alone takes 1 µs
