"""`--balance`: shares of a batch, the controller with made-up times, and the loss of a run."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jaxhet
from models import pretrain
from models.configs import CONFIGS
from models.data import Batches
from models.extras import loop
from models.extras.corpus import Corpus
from models.extras.options import parse
from models.extras.records import METRICS, read_rows
from models.extras.shares import (
    Controller,
    Cost,
    fit,
    num_microbatches,
    parse_counts,
    parse_parts,
)
from models.sharding import activation_sharding
from models.train import Schedule, Trainer

CORPUS = Corpus("numbers", (np.arange(1000, dtype=np.uint16),))
WINDOW = 10  # steps


def test_shares_are_the_rows_of_a_batch_in_order_whatever_their_sizes(make_mesh):
    batches = Batches(CORPUS, seed=0, batch=24, positions=16)
    rows = batches.rows(7, 0, 24).reshape(6, 4, 17)
    sharding = activation_sharding("shares", make_mesh(data=2, fsdp=2))
    for counts in ((3, 3), (5, 1), (1, 5)):
        shares = batches.shares(7, counts, (5, 4), sharding)
        assert {shard.data.shape for shard in shares.addressable_shards} == {(1, 5, 2, 17)}
        used = [np.asarray(share)[:count] for share, count in zip(shares, counts, strict=True)]
        np.testing.assert_array_equal(np.concatenate(used), rows)


def test_fit_finds_the_costs_and_stays_between_sensible_ones():
    for times, microbatch, fixed in (
        ({1: 0.5, 4: 1.4}, 0.3, 0.2),
        ({1: 0.2, 4: 1.2}, 0.3, 0),  # noise: no negative rest
        ({1: 1.3, 4: 1.2}, 0.15, 0.6),
    ):
        cost = fit(times)
        assert (cost.microbatch, cost.fixed) == pytest.approx((microbatch, fixed))


class Islands:
    """Two islands of made-up speeds, and a run on them: each window of steps, and each decision."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds  # times of a microbatch
        self.controller = Controller((8, 8))
        self.measured_at: list[int] = []
        self.shares = [self.controller.counts]
        self.step = 0
        self.measure()

    def measure(self) -> None:
        self.measured_at.append(self.step)
        costs = [Cost(s, 0.01) for s in self.seconds]
        if self.controller.decide(costs):
            self.shares.append(self.controller.counts)

    def run(self, windows: int, noise=(0.0,)) -> None:
        for _, more in zip(range(windows), itertools.cycle(noise), strict=False):
            self.step += WINDOW
            pairs = zip(self.controller.counts, self.seconds, strict=True)
            if self.controller.is_due(max(k * t for k, t in pairs) * (1 + more)):
                self.measure()


def test_slow_island_has_fewer_microbatches():
    islands = Islands(0.1, 0.3)
    assert islands.controller.counts == (12, 4)
    assert islands.shares == [(8, 8), (12, 4)]


def test_island_that_becomes_slower_is_noticed_within_20_steps():
    islands = Islands(0.1, 0.1)
    islands.run(5)
    islands.seconds = (0.1, 0.2)
    islands.run(10)
    assert islands.measured_at == [0, 5 * WINDOW + 20]
    assert islands.controller.counts == (11, 5)


def test_island_that_becomes_faster_is_noticed_in_the_end():
    islands = Islands(0.1, 0.3)
    islands.run(3)
    islands.seconds = (0.1, 0.1)  # hidden: the other one takes as long as before
    islands.run(60)
    assert islands.controller.counts == (8, 8)
    assert len(islands.measured_at) == 2


def test_island_that_stalls_once_is_not_measured_again():
    islands = Islands(0.1, 0.2)
    for windows in (4, 1, 6, 1, 6):
        islands.seconds = (0.1, 2.0) if windows == 1 else (0.1, 0.2)
        islands.run(windows)
    assert islands.measured_at == [0]
    assert islands.shares == [(8, 8), (11, 5)]


def test_island_that_is_slow_for_a_while_moves_shares_once_each_way():
    islands = Islands(0.1, 0.1)
    for seconds, windows in ((0.1, 5), (0.3, 4), (0.1, 120)):
        islands.seconds = (0.1, seconds)
        islands.run(windows)
    assert islands.shares == [(8, 8), (12, 4), (8, 8)]
    assert len(islands.measured_at) == 4  # the last one after 50 windows


def test_compilation_in_the_first_window_is_no_drift():
    islands = Islands(0.1, 0.1)
    islands.run(1, noise=(20,))
    islands.run(10)
    assert islands.measured_at == [0]


def test_noise_does_not_move_microbatches():
    islands = Islands(0.100, 0.104)
    islands.run(12, noise=(0, 0.3, 0.35, -0.2))
    assert len(islands.measured_at) > 1
    for seconds in ((0.104, 0.1), (0.1, 0.103), (0.102, 0.1)):
        islands.seconds = seconds
        islands.measure()
    assert set(islands.shares) == {(8, 8)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", r"--balance 'fast' is not auto, even, or numbers such as 3,1"),
        ("3,-1", "is not auto, even, or numbers"),
        ("4,2,2", "has 3 numbers: give one for each of the 2 positions"),
        ("3,1", "has the sum 4, and a batch has 8 microbatches"),
        ("0,0", "has the sum 0, and a batch has 8 microbatches"),
        ("8,0", "each position computes at least one microbatch"),
    ],
)
def test_numbers_that_do_not_fit(text, words):
    with pytest.raises(ValueError, match=words):
        parse_counts(text, 8, 2)
    assert parse_counts("5,3", 8, 2) == (5, 3)
    assert parse_counts("even", 8, 2) == (4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts=island1"], "--parts 'island1' is not of the form island1=2,rocm=4"),
        (["--parts=island1=0"], "is not of the form island1=2"),
        (["--parts=island1=2"], "--parts island1=2 without --balance"),
    ],
)
def test_parts_that_do_not_fit(words, message):
    with pytest.raises(ValueError, match=message):
        parse_parts(parse(words))
    assert parse_parts(parse(["--parts=rocm=2,a=1", "--balance=even"])) == {"rocm": 2, "a": 1}


def test_parts_take_less_memory(make_mesh):
    config = dataclasses.replace(CONFIGS["tiny"], layers=4)
    schedule = Schedule(learning_rate=1e-2, warmup=2, weight_decay=0.1, max_gradient_norm=1.0)

    def temporary(**parts: int) -> int:
        trainer = Trainer(config, schedule, make_mesh(data=2), parts=parts)
        program = trainer.lower(jax.jit, 64, 64, microbatches=4)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temporary(cpu=4) < 0.4 * temporary()
    with pytest.raises(jaxhet.UsageError, match="can't be computed in 5 parts on an island"):
        temporary(cpu=5)


def test_mesh_or_parts_that_leave_nothing_to_balance(make_mesh):
    def options(accumulate):
        return parse(["--balance=auto", f"--accumulate={accumulate}"])

    with pytest.raises(ValueError, match="shared along the axis data, on a mesh without stages"):
        num_microbatches(options(4), make_mesh(fsdp=4))
    with pytest.raises(ValueError, match="microbatches are what islands share; give --accumulate"):
        num_microbatches(options(1), make_mesh(data=2))
    assert num_microbatches(options(4), make_mesh(data=2)) == 8


def test_loss_does_not_depend_on_the_shares(tmp_path, monkeypatch, fast_jit):
    monkeypatch.setattr(loop.jaxhet, "jit", fast_jit)
    losses = {}
    parts = ["--parts=cpu=2"]
    for balance in (None, "5,3", "auto"):
        run_dir = tmp_path / str(balance)
        words = ["--config=tiny", "--batch=32", "--seq=16", "--mesh=data=2,fsdp=2", "--steps=4"]
        words += ["--accumulate=4", "--loss-chunk=6", "--log-every=2", f"--run-dir={run_dir}"]
        pretrain.main([*words, *([f"--balance={balance}", *parts] if balance else [])])
        rows = read_rows(run_dir / METRICS)
        losses[balance] = [row["loss"] for row in rows]
        noted = [row["balance"] for row in rows if "balance" in row]
        assert [sum(note["counts"]) for note in noted[:1]] == ([8] if balance else [])
        assert [len(note.get("microbatch_seconds", [])) for note in noted[:1]] == (
            {None: [], "5,3": [0], "auto": [2]}[balance]
        )
    for balance in ("5,3", "auto"):
        np.testing.assert_allclose(losses[balance], losses[None], rtol=1e-5)
