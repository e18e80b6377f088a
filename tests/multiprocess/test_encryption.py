"""Jobs over socket with somebody in between who reads and changes what the processes exchange."""

import pytest
from two_islands import SET_UP

from jaxhet._net import handshake
from tests.support.relay import Relay, in_between
from tests.support.scripts import Ended, job, run

MARKER = b"MARKERS."  # finite as two floats
_HANDSHAKE_BYTES = 2 * handshake.NONCE_BYTES + 2 * handshake.MAC_BYTES  # at least, both ways
PLAN = b"all-reduce sum"  # part of a plan's line
_LONG = 4096  # a piece of data, not a message
SUM = (
    SET_UP
    + f"""
rows = np.frombuffer({MARKER!r} * 16384, np.float32)[None].repeat(mesh.size, 0)
x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("x")), lambda i: rows[i])
total = np.asarray(over_islands(psum)(x).addressable_shards[0].data)[0]
print("right" if (total == rows.sum(0)).all() else "WRONG", flush=True)
"""
)


def _changed(piece: bytes) -> bytes:
    """Long pieces with another last bit."""
    return piece[:-1] + bytes([piece[-1] ^ 1]) if len(piece) > _LONG else piece


def _run_through_relay(encryption: str) -> tuple[list[Ended], Relay]:
    first, second = job(2, JAXHET_TRANSPORTS="socket", JAXHET_ENCRYPTION=encryption)
    with in_between(first, _changed) as relay:
        return run(SUM, first, second), relay


def test_changed_data_is_a_wrong_result_without_encryption() -> None:
    both, relay = _run_through_relay("off")
    assert [ended.code for ended in both] == [0, 0], both
    assert any("WRONG" in ended.text for ended in both), both
    assert MARKER * 8 in relay.seen
    assert PLAN in relay.seen


@pytest.mark.parametrize(
    ("encryption", "is_visible"),
    [pytest.param("auth", True, marks=pytest.mark.slow), ("full", False)],
)
def test_changed_data_is_an_error_by_name(encryption: str, is_visible: bool) -> None:
    both, relay = _run_through_relay(encryption)
    assert len(relay.seen) > _HANDSHAKE_BYTES + len(MARKER) * 16384
    assert (MARKER * 8 in relay.seen) == (PLAN in relay.seen) == is_visible
    for ended in both:
        assert ended.code != 0
        assert "right" not in ended.text
        assert "WRONG" not in ended.text
        assert "TransportError: [" in ended.text
        assert "process " in ended.text
        assert f"is not what it sealed (JAXHET_ENCRYPTION={encryption})" in ended.text
        assert "it was changed, repeated, reordered or cut on its way" in ended.text
