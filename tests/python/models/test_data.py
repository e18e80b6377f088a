import numpy as np
import pytest

from models.data import Batches, segments
from models.extras.corpus import Corpus
from models.sharding import activation_sharding

NUMBERS = np.arange(1000, dtype=np.uint16).astype(np.uint8)
CORPUS = Corpus("numbers", (NUMBERS,))


def test_rows_are_windows_that_depend_on_seed_step_and_row_alone():
    batches = Batches(CORPUS, seed=3, batch=8, positions=16)
    rows = batches.rows(5, 0, 8)
    assert (rows.shape, rows.dtype) == ((8, 17), np.int32)
    np.testing.assert_array_equal(np.diff(rows) % 256, 1)
    np.testing.assert_array_equal(batches.rows(5, 2, 4), rows[2:4])
    np.testing.assert_array_equal(Batches(CORPUS, 3, 64, 16).rows(5, 0, 8), rows)
    for other in (batches.rows(6, 0, 8), Batches(CORPUS, 4, 8, 16).rows(5, 0, 8)):
        assert (other != rows).any()


def test_window_may_be_the_whole_corpus():
    np.testing.assert_array_equal(Batches(CORPUS, 0, 1, 999).rows(0, 0, 1)[0], NUMBERS)


def test_permuted_batch_has_the_same_rows_in_another_order():
    rows = Batches(CORPUS, 0, 8, 16).rows(1, 0, 8)
    permuted = Batches(CORPUS, 0, 8, 16, permute=1).rows(1, 0, 8)
    assert (rows != permuted).any()
    assert sorted(map(tuple, rows)) == sorted(map(tuple, permuted))


def test_global_batch_is_read_by_the_devices_that_hold_its_rows(make_mesh):
    batches = Batches(CORPUS, seed=0, batch=8, positions=16)
    batch = batches(7, activation_sharding("tokens", make_mesh(data=2, model=2)))
    np.testing.assert_array_equal(batch, batches.rows(7, 0, 8))
    assert {shard.data.shape for shard in batch.addressable_shards} == {(4, 17)}


def test_short_corpus_says_what_to_change():
    with pytest.raises(ValueError, match=r"numbers has 1000 tokens.*longer --data or a smaller"):
        Batches(CORPUS, 0, 1, 1000)


def test_epoch_has_each_row_once_and_the_next_one_another_order():
    corpus = Corpus("numbers", (np.arange(1 + 6 * 16, dtype=np.uint16),))
    batches = Batches(corpus, seed=3, batch=2, positions=16, order="epochs")
    epochs = [[batches.rows(3 * epoch + step, 0, 2) for step in range(3)] for epoch in range(2)]
    firsts = [[int(row[0]) for rows in epoch for row in rows] for epoch in epochs]
    assert sorted(firsts[0]) == sorted(firsts[1]) == [0, 16, 32, 48, 64, 80]
    assert firsts[0] != firsts[1]
    np.testing.assert_array_equal(np.diff(epochs[0][0]), 1)


def test_rows_of_an_epoch_depend_on_the_step_and_not_on_who_reads_them():
    batches = Batches(CORPUS, 3, 8, 16, order="epochs")
    rows = batches.rows(5, 0, 8)
    alone = Batches(CORPUS, 3, 8, 16, order="epochs")  # a process that begins at step 5
    np.testing.assert_array_equal(alone.rows(5, 2, 4), rows[2:4])
    assert (Batches(CORPUS, 4, 8, 16, order="epochs").rows(5, 0, 8) != rows).any()


def test_segments_number_the_documents_of_a_row():
    tokens = np.array([[5, 0, 7, 7, 0, 0, 3], [1, 2, 3, 4, 5, 6, 7]])
    assert segments(tokens, end=0).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
