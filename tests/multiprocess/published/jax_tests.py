"""One process of a job that runs files of JAX's own multi-process tests.

The process joins the job that it finds, as any program does: one of jaxhet's below `jaxhet run`,
or one of plain JAX. It prints a line of JSON for each file: the tests
and their outcomes.
"""

import json
import pathlib
import runpy
import sys
import types
import typing
import unittest

import jax
from absl import flags


class _Outcomes(unittest.TextTestResult):
    """Outcome of each test: one word and the first line of its error."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.outcomes: dict[str, str] = {}

    @typing.override
    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self.outcomes.setdefault(test.id(), "passed")

    @typing.override
    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcomes.setdefault(test.id(), "skipped")

    @typing.override
    def addFailure(self, test: unittest.TestCase, err: tuple) -> None:  # type: ignore[type-arg]
        super().addFailure(test, err)
        self._failed(test, err[1])

    @typing.override
    def addError(self, test: unittest.TestCase, err: tuple) -> None:  # type: ignore[type-arg]
        super().addError(test, err)
        self._failed(test, err[1])

    def _failed(self, test: unittest.TestCase, error: BaseException) -> None:
        lines = str(error).strip().splitlines() or [""]
        self.outcomes[test.id()] = f"failed: {type(error).__name__}: {lines[0][:200]}"


def _load(program: str) -> types.ModuleType:
    """The file as a module, under its own name, by which its tests are reported."""
    name = pathlib.Path(program).stem
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__.update(runpy.run_path(program, run_name=name))
    return module


def main() -> None:
    jax.distributed.initialize()
    jax.config.config_with_absl()
    from jax._src import test_multiprocess, test_util

    flags.FLAGS(["test", f"--num_processes={jax.process_count()}"])
    assert test_multiprocess.NUM_PROCESSES.value == jax.process_count()
    loader = test_util.JaxTestLoader()
    for program in sys.argv[1:]:
        runner = unittest.TextTestRunner(resultclass=_Outcomes, verbosity=0)  # type: ignore[arg-type]
        result = runner.run(loader.loadTestsFromModule(_load(program)))
        assert isinstance(result, _Outcomes)
        print(json.dumps({str(jax.process_index()): result.outcomes}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
