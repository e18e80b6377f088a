"""Retired words stay retired: one word per idea, as in docs/explanation/glossary.md."""

import pathlib
import subprocess
from collections.abc import Iterable

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PATTERNS = {  # extended regular expression -> the word in use
    r"\b(shard_)?keepers?\b": "replicas of a shard",
    r"drawn[ _]in\b": "absorbed",
    r"\b_?[Aa]dder\b": "ExchangeBuilder",
    r"(value|\bv|rows|mine|own|like|joined)\.by\(": "with_array",
    r"bucket\.together\b|def together\(": "bucket_all_reduces",
    r"scatter\.narrow\b|def _?narrow\(": "to_reduce_scatter",
    r"\b(came|came_[a-z]+)\b": "received, arrived",
    r"[Pp]atience|PATIENCE": "wait budget",
    r"\bClaim\b|\bclaim_of\b|_claims?\b|\bclaimed\b|\bclaim\.": "ProcessInfo",
    r"\bCore(&|::)|Core core|engine/core\.": "ProgressEngine",
    r"\bMembershipOf\b|memberships_|engine/membership": "CommunicatorState",
    r"\bRing(End|Transport|Way|Word|Set[uU]p|Step|Peer|Mail|Turn|Slot|Socket|Option|Bytes)": (
        "DeviceChannel, DeviceTransport, RouteChoices, Channel…"
    ),
    r"\b(Carried|Rank|Tcp|Verbs|SharedWords|Target|Source)Ring\b": "ProxiedChannel, …Channel",
    r"transport/ring\b|ring_(table|setup|transports)\b|RING_TRANSPORTS": "device_channel",
    r"\b(a|the|this|of|no|each|set-up of|all) rings?\b[^_-]*(between|from|to) (GPU|device|rank)": (
        "device channel"
    ),
    r"`(filled|emptied)`|(words\(\)|words|words_)(\.|->)(filled|emptied)\b": "tail, head",
    r"\bRingTurn\b|words(\(\))?(\.|->)gate\b|\bend\.gate\b": "generation, abort flag",
    r"\b(LegsOf|PermuteLeg|GroupLegs|StartLeg|last_leg_)\b|\b[Ll]egs?\b|_legs?\b": (
        "transfer, local phase"
    ),
    r"\bRail(Info)?\b|\brails_|num_rails|SetUpRail": "NIC pair",
    r"\bPath(Info|Event|EventInfo)\b|ClosePath|NumLivePaths|RDMA paths?\b": "queue pair",
    r"PostNote|kNoteBytes|arrived_note|\bnotes_": "header",
    r"[Cc]ulprit": "failed process",
    r"[Vv]erdict": "result",
    r"\b([Ss]tory|[Ss]tories)\b|_stor(y|ies)\b": "summary",
    r"\b[Bb]ur(y|ied|ies)\b": "leak on purpose",
    r"\b[Jj]udg|_judg|[a-z]Judg": "check",
    r"bytes_pulled|bytes_sent_in_place": "bytes_zero_copy_received, bytes_zero_copy_sent",
    r"own_position|to_positions|num_positions|collectives?\.positions": "logical id",
    r"kLeastPieceBytes": "chunk",
    r"\b[Bb]lam(e|es|ed|ing)\b|[a-z]Blam|_blam": "attribute",
}
_SAMPLES = (
    "keepers shard_keepers was_drawn_in Adder(x) value.by(x) bucket.together(x) scatter.narrow(x)",
    "came came_result kMostPatience error.culprit() kVerdict the story Bury(x) Judge(peer)",
    "bytes_pulled bytes_sent_in_place own_position(c) to_positions(ids) kLeastPieceBytes",
    "is_judged HandleBlaming error.blame two_phase_bytes JAXHET_RING_SOCKETS",
    "RingEnd TcpRing transport/ring/ring.h ring_table.cc `filled` words.emptied RingTurn",
    "Opens a ring between devices. One leg. LegsOf(request)",
    "RailInfo PathInfo info; RDMA path 3 PostNote(slot)",
    "Claim(process) make_claim Core& core engine/core.h MembershipOf(exchange)",
)
_OPTIONS = {  # names of options in earlier versions, which `jaxhet._config` refuses -> name
    r"two[ _-]phase|TWO_PHASE": "two-shot",
    r"ring_sockets|RING_SOCKETS": "device_channel_sockets",
}
_REFUSED = ("jaxhet/_options.py", "tests/python/test_config.py")
_HISTORY = ("CHANGELOG.md", "tests/python/test_words.py")


def _found(root: pathlib.Path, option: str, patterns: Iterable[str], *allowed: str) -> list[str]:
    """The lines of files below `root`, as `file:line:text`, that match one of the patterns."""
    wanted = [argument for pattern in patterns for argument in ("-e", pattern)]
    excluded = [f":!{name}" for name in (*_HISTORY, *allowed)]
    command = ["git", "-c", "safe.directory=*", "grep", "-InE", option, *wanted]
    done = subprocess.run(
        [*command, "--", ".", *excluded], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_no_retired_word_is_in_the_tree() -> None:
    assert not _found(_ROOT, "--untracked", _PATTERNS)
    assert not _found(_ROOT, "--untracked", _OPTIONS, *_REFUSED)


@pytest.mark.parametrize("pattern", [*_PATTERNS, *_OPTIONS])
def test_each_retired_word_is_found(pattern: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "sample.txt").write_text("\n".join(_SAMPLES))
    (tmp_path / "CHANGELOG.md").write_text("\n".join(_SAMPLES))
    found = _found(tmp_path, "--no-index", [pattern])
    assert found
    assert all(line.startswith("sample.txt:") for line in found)
