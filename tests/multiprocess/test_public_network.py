"""Jobs over a network with public addresses, which here are those of network namespaces."""

import pytest

from tests.support import hosts
from tests.support.hosts import Hosts

_JOIN = "import jaxhet; jaxhet.initialize(); print('joined')"

_reason = hosts.unavailable()
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason or "never")


@pytest.mark.parametrize(
    ("encryption", "code", "words"),
    [
        (None, 1, "8.77.0.1, which is an address of the internet: set JAXHET_ENCRYPTION=full"),
        pytest.param("off", 0, "because JAXHET_ENCRYPTION is off", marks=pytest.mark.slow),
        pytest.param("full", 0, "joined", marks=pytest.mark.slow),
    ],
    ids=["unset", "off", "full"],
)
def test_public_addresses_need_a_choice(encryption: str | None, code: int, words: str) -> None:
    env = {} if encryption is None else {"JAXHET_ENCRYPTION": encryption}
    with Hosts(2, 1, network="8.77") as net:
        _, second = hosts.wait(net.start(_JOIN, net.job(**env)), 60)
    assert (second.code, words in second.text) == (code, True), second.text
