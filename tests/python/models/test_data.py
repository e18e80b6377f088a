import numpy as np
import pytest

from models.data import Batches, Corpus, open_corpus
from models.sharding import activation_sharding

CORPUS = Corpus("numbers", np.arange(1000, dtype=np.uint16).astype(np.uint8))


def test_default_corpus_is_text():
    corpus = open_corpus()
    assert corpus.text.size > 100_000
    assert b"assert" in corpus.text.tobytes()


def test_file_is_mapped(tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    corpus = open_corpus(str(tmp_path / "text"))
    assert isinstance(corpus.text, np.memmap)
    assert (corpus.text.tobytes(), corpus.identity) == (b"some text", "text:9")


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
    np.testing.assert_array_equal(Batches(CORPUS, 0, 1, 999).rows(0, 0, 1)[0], CORPUS.text)


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
    with pytest.raises(ValueError, match=r"numbers has 1000 bytes.*longer --data or a smaller"):
        Batches(CORPUS, 0, 1, 1000)
