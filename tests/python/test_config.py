"""Options: one table, and errors that list the valid values."""

import inspect
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jaxhet
from jaxhet import _config, _options
from jaxhet._errors import UsageError


def test_default_when_nothing_is_given() -> None:
    assert _config.resolve({}, {}).socket_port == 0


def test_argument_wins_over_environment() -> None:
    config = _config.resolve({"process_id": 3}, {"JAXHET_PROCESS_ID": "1"})
    assert config.process_id == 3


def test_numbers_of_numpy_become_pythons() -> None:
    config = _config.resolve({"process_id": np.int32(1), "deadline_s": np.int64(3)}, {})
    assert [type(config.process_id), type(config.deadline_s)] == [int, float]


def test_number_as_text_is_refused() -> None:
    with pytest.raises(UsageError, match="process_id='1' is not a number"):
        _config.resolve({"process_id": "1"}, {})


def test_environment_is_parsed() -> None:
    environ = {
        "JAXHET_TRANSPORTS": "tcp, process_vm",  # an alias of socket
        "JAXHET_DEADLINE_S": "2.5",
        "JAXHET_WIRE": "data=mxint8, bf16",
        "JAXHET__ONE_WORLD_KERNELS": "no",
    }
    config = _config.resolve({}, environ)
    assert (config.transports, config.deadline_s, config.one_world_kernels) == (
        ("socket", "process_vm"),
        2.5,
        False,
    )
    assert config.wire == ("data=mxint8", "bf16")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAXHET__ALGORITHM": "ring"}, "algorithm takes auto, flat, hierarchical"),
        ({"JAXHET_LOG_LEVEL": "loud"}, "log_level takes info, warning, error, critical"),
        ({"JAXHET_WIRE": "data=int8"}, "wire takes bf16, mxfp8, mxint8, mxint4"),
        ({"JAXHET_WIRE": "data=bf16,data=mxint8"}, "gives two values for one name"),
        ({"JAXHET_WIRE": "bf16,mxint8"}, "gives two values for one name"),
        ({"JAXHET_TRANSPORTS": "shm"}, "transports takes cuda_ipc, hip_ipc, host, process_vm"),
        ({"JAXHET_TRANSPORTS": "udp"}, "transports takes cuda_ipc, hip_ipc, host"),
        ({"JAXHET_TRANSPORTS": ""}, "transports takes cuda_ipc, hip_ipc, host"),
        ({"JAXHET_PROCESS_ID": "one"}, "JAXHET_PROCESS_ID='one' is not a whole number"),
        ({"JAXHET_NUM_PROCESSES": "0"}, "below the minimum, 1"),
        ({"JAXHET_VERBS_TIMEOUT": "99"}, "JAXHET_VERBS_TIMEOUT='99' is above the maximum, 31"),
        ({"JAXHET_DEADLINE_S": "inf"}, "above the maximum, 604800"),
        ({"JAXHET_DEADLINE_S": "nan"}, "below the minimum, 0.001"),
        ({"JAXHET__ONE_WORLD_KERNELS": "perhaps"}, "is not 1, true, yes, 0, false or no"),
    ],
)
def test_wrong_value_lists_the_valid_ones(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _config.resolve({}, environ)


def test_unknown_argument_lists_the_options() -> None:
    with pytest.raises(
        UsageError, match="no option 'colour'; the options are cluster_detection_method"
    ):
        _config.resolve({"colour": 1}, {})


def test_unknown_environment_name_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="JAXHET_TRANSPORT; did you mean JAXHET_TRANSPORTS"):
        _config.resolve({}, {"JAXHET_TRANSPORT": "socket"})
    # A name that shares only the prefix with an option is not suggested.
    with pytest.warns(UserWarning, match="unknown environment variable JAXHET_FOO$"):
        _config.resolve({}, {"JAXHET_FOO": "1"})


def test_engines_values_have_its_names_and_units() -> None:
    arguments = {"deadline_s": 2.5, "verbs_devices": ("a", "b:1")}
    values = _config.resolve(arguments, {}).engine_values()
    assert values["deadline_ms"] == 2500
    assert values["first_deadline_ms"] == 15_000
    assert (values["verbs_devices"], values["verbs_gid_index"]) == ("a,b:1", -1)


def test_timeouts_follow_from_four() -> None:
    config = _config.resolve({"deadline_s": 10, "peer_timeout_s": 4, "exit_timeout_s": 50}, {})
    assert (config.first_deadline_s, config.tuning_timeout_s) == (60, 20)
    assert (config.heartbeat_s, config.exit_after_failure_s) == (0.5, 5)
    assert config.engine_values()["heartbeat_ms"] == 500


def test_values_of_the_job_fill_what_nobody_gave() -> None:
    for given, value in (({}, True), ({"one_world_kernels": False}, False)):
        placed = _config.resolve(given, {}).placed(0, 1)
        assert placed.filled({"one_world_kernels": True}).one_world_kernels is value


def test_variables_of_nccl_set_options_that_nothing_else_sets() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "^docker,lo",
        "NCCL_IB_TC": "0x60",
        "NCCL_IB_GID_INDEX": "-1",  # NCCL's "not set"
        "NCCL_IB_TIMEOUT": "22",
        "JAXHET_VERBS_TIMEOUT": "20",
    }
    config = _config.resolve({}, environ)
    assert _config.resolve({}, {}).engine_values()["verbs_timeout"] == 18
    assert config.socket_interfaces == ("^docker", "lo")
    assert (config.verbs_traffic_class, config.verbs_gid_index, config.verbs_timeout) == (
        96,
        None,
        20,
    )
    assert config.of_nccl == (
        "JAXHET_SOCKET_INTERFACES is not set: NCCL_SOCKET_IFNAME=^docker,lo sets it",
        "JAXHET_VERBS_TRAFFIC_CLASS is not set: NCCL_IB_TC=0x60 sets it",
    )
    assert _config.resolve({"verbs_traffic_class": 1}, environ).verbs_traffic_class == 1
    with pytest.raises(UsageError, match="NCCL_IB_SL='16' is above the maximum, 15"):
        _config.resolve({}, {"NCCL_IB_SL": "16"})


@pytest.mark.parametrize(
    ("wanted", "selected"),
    [
        ("mlx5_1", ("mlx5_1", "mlx5_10")),
        ("=mlx5_1", ("mlx5_1",)),
        ("=mlx5_1:2,irdma0", ("irdma0", "mlx5_1:2")),
        ("^mlx5_1", ("irdma0", "mlx5_0")),
        ("^=mlx5_1", ("irdma0", "mlx5_0", "mlx5_10")),
        ("bnxt", ("bnxt",)),  # the engine's error names it
        ("^mlx5,irdma", ("^mlx5", "irdma")),
    ],
)
def test_nics_are_named_as_in_nccl(
    wanted: str, selected: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_10", "irdma0"):
        (tmp_path / name).mkdir()
    assert _options.NameList.parse(wanted.split(",")).nics(tmp_path) == selected


def test_private_options_are_no_public_ones() -> None:
    public = {o.name for o in _options.table(_options.Options)}
    assert len(public) <= 36
    private = [o for o in _config.TABLE if o.name not in public]
    assert {o.env for o in private if o.is_knob} >= {
        "JAXHET__ALGORITHM",
        "JAXHET__ONE_WORLD_KERNELS",
    }
    with pytest.warns(UserWarning, match="unknown environment variable JAXHET_ALGORITHM"):
        _config.resolve({}, {"JAXHET_ALGORITHM": "flat"})
    with pytest.raises(UsageError, match="no option 'heartbeat_s'"):
        _config.resolve({"heartbeat_s": 1}, {})


def test_integers_of_the_engine_have_both_limits() -> None:
    """The engine does not check them again."""
    numbers = [o for o in _config.TABLE if o.engine and o.type in (int, float)]
    assert len(numbers) > 9
    assert not [o.name for o in numbers if o.minimum is None or o.maximum is None]


def test_signature_of_initialize_is_made_of_the_options() -> None:
    signature = inspect.signature(jaxhet.initialize)
    assert signature.parameters.keys() == {o.name for o in _options.table(_options.Options)}
    assert signature.parameters["deadline_s"].annotation is float
    assert signature.parameters["deadline_s"].default == 300
    positional = ["coordinator_address", "num_processes", "process_id", "island"]
    assert [*signature.parameters][:4] == positional


def test_type_checkers_know_the_arguments_of_initialize(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import jaxhet\n"
        "jaxhet.initialize('nv0:1', 2, 0, 'nv', deadline_s=9, transports=['socket'])\n"
        "jaxhet.initialize(deadline_s='9')\n"
        "jaxhet.initialize(encryption='on')\n"
        "jaxhet.initialize(colour=1)\n"
    )
    root = pathlib.Path(jaxhet.__file__).parents[1]
    settings = {"extraPaths": [str(root)], "venvPath": str(root), "venv": ".venv"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    found = json.loads(ended.stdout)["generalDiagnostics"]
    wrong = [(d["range"]["start"]["line"] + 1, d["rule"]) for d in found]
    assert wrong == [
        (3, "reportArgumentType"),
        (4, "reportArgumentType"),
        (5, "reportCallIssue"),
    ]
