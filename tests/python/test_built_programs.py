"""Results of C++ tests, read by tools/programs.py from the output of a program."""

from tools.programs import results_of

_PRINTED = """\
[ RUN      ] Plain/BytesTest.CountsBytes/verbs_2x2
[rank 0/4 cpu0] a line of the engine (3 ms)
[       OK ] Plain/BytesTest.CountsBytes/verbs_2x2 (12 ms)
[ RUN      ] Plain/BytesTest.CountsBytes/tcp
[  FAILED  ] Plain/BytesTest.CountsBytes/tcp, where GetParam() = tcp (4 ms)
[ RUN      ] MailboxTest.AnotherUserIsRefused
[  SKIPPED ] MailboxTest.AnotherUserIsRefused (0 ms)
[ RUN      ] UnitTest.ErrorNamesItsClass
[  FAILED  ] UnitTest.ErrorNamesItsClass (0 ms)
[==========] 4 tests from 3 test suites ran. (16 ms total)
[  PASSED  ] 1 test.
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] Plain/BytesTest.CountsBytes/tcp, where GetParam() = tcp
[  FAILED  ] UnitTest.ErrorNamesItsClass
"""


def test_results_name_each_test_that_ran_once() -> None:
    assert results_of(_PRINTED) == [
        ("OK", "Plain/BytesTest.CountsBytes/verbs_2x2"),
        ("FAILED", "Plain/BytesTest.CountsBytes/tcp"),
        ("SKIPPED", "MailboxTest.AnotherUserIsRefused"),
        ("FAILED", "UnitTest.ErrorNamesItsClass"),
    ]
