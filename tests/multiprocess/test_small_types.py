"""Collectives of types of less than a byte give right values across islands."""

from tests.support import scripts


def test_collectives_of_small_types() -> None:
    program = "from tests.multiprocess import small_types; small_types.main()"
    for one in scripts.run(program, *scripts.job(JAXHET_CPU_DEVICES="2"), timeout_s=150):
        assert one.code == 0, one.text
        assert "all are right" in one.text
