"""Arrays in host memory, and with layouts that a program chooses, in programs that exchange."""

from tests.support.scripts import ON_GPUS_TOO, job, on, run


@ON_GPUS_TOO
def test_arrays_have_the_memory_and_the_layout_that_the_program_says(platform: str) -> None:
    program = "from tests.multiprocess import host_memory; host_memory.main()"
    for one in run(program, *on(platform, job(JAXHET_CPU_DEVICES="2")), timeout_s=120):
        assert one.code == 0, one.text
        assert "all are right" in one.text
