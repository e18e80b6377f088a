import dataclasses
import inspect
import json
import sys

import numpy as np
import pytest

from models.data import Batches
from models.extras import shards, tokenize
from models.extras.corpus import Corpus, open_corpus
from models.extras.text import Tokenizer, documents

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "</s>": 3}


@pytest.fixture
def tokenizer(tmp_path) -> str:
    """A `tokenizer.json` that knows two words."""
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"}
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    return str(path)


def read(corpus: Corpus) -> list[int]:
    return corpus.read(0, corpus.size).tolist()


def test_standard_library_is_long_and_the_same_each_time():
    corpus = open_corpus("standard-library")
    # 500 steps of 8 rows of 1,024 tokens need 4.1 million.
    assert corpus.size > 5_000_000
    assert open_corpus("standard-library").digest() == corpus.digest()
    text = corpus.read(0, corpus.size).astype(np.uint8).tobytes()
    assert inspect.getsource(dataclasses).encode() in text
    assert inspect.getsource(json).encode() in text
    assert inspect.getsource(pytest).encode() not in text  # another package


def test_no_row_of_the_standard_library_is_read_twice_in_500_steps():
    batches = Batches(open_corpus("standard-library"), 0, batch=8, positions=1024, order="epochs")
    assert batches.passes(500) < 1
    rows = {row.tobytes() for step in range(500) for row in batches.rows(step, 0, 8)}
    assert len(rows) == 4000


def test_reads_cross_the_ends_of_pieces_and_parts_are_views():
    corpus = Corpus("numbers", (np.arange(5), np.arange(5, 6), np.arange(6, 10)))
    for start in range(10):
        for stop in range(start + 1, 11):
            assert corpus.read(start, stop).tolist() == list(range(start, stop))
    first, last = corpus.split(0.3)
    assert (read(first), read(last)) == ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert first.read(4, 7).dtype == np.int32
    assert corpus.split(0)[1].size == 0


def test_text_of_a_tokenizer_ends_with_its_end(tmp_path, tokenizer):
    (tmp_path / "text").write_text("one two\nthree")
    corpus = open_corpus(str(tmp_path / "text"), tokenizer)
    assert (read(corpus), corpus.vocab, corpus.end) == ([1, 2, 0, 3], 4, 3)
    assert corpus.identity.startswith("text:4:")


@pytest.mark.parametrize("longest", [1, 4, 7, 100])
def test_shards_hold_the_tokens_of_all_documents(longest, tmp_path, tokenizer, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "one two"}\n\n{"body": "two"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "two two"}')
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    out = tmp_path / "out"
    words = ["--field=body", f"--shard-tokens={longest}", f"--tokenizer={tokenizer}"]
    tokenize.main([*files, f"--out={out}", *words])
    assert f"8 tokens (uint16) in {-(-8 // longest)} shards" in capsys.readouterr().out
    corpus = open_corpus(str(out), tokenizer)
    assert read(corpus) == [1, 2, 3, 2, 3, 2, 2, 3]
    assert all(isinstance(piece, np.memmap) for piece in corpus.pieces)
    assert (corpus.vocab, corpus.end, corpus.tokenizer) == (4, 3, Tokenizer.load(tokenizer).digest)


def test_vocabulary_beyond_16_bits_makes_wider_shards(tmp_path):
    assert (shards.dtype_for(1 << 16), shards.dtype_for((1 << 16) + 1)) == ("uint16", "uint32")
    index = shards.Index("uint32", 1 << 20, None, "")
    shards.write(tmp_path / "out", index, [np.array([1 << 19, 7])], longest=9)
    assert read(open_corpus(str(tmp_path / "out"))) == [1 << 19, 7]


def test_wrong_shards_say_what_to_do(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"has no index.json: it holds no complete shards; make"):
        open_corpus(str(tmp_path))
    out = tmp_path / "out"
    shards.write(out, shards.Index("uint16", 256, None, ""), [np.arange(9)], longest=9)
    with pytest.raises(ValueError, match="is not empty: give a new folder as --out"):
        shards.write(out, shards.Index("uint16", 256, None, ""), [], longest=9)
    with pytest.raises(
        ValueError,
        match=r"with another tokenizer than .*: make them anew with `.* --tokenizer .*`, or name",
    ):
        open_corpus(str(out), tokenizer)
    (out / "00000.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"has 3 bytes, but index.json says 9 tokens of 2: copy"):
        open_corpus(str(out))
    (out / "index.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="is not of the format jaxhet-tokens-1: make"):
        open_corpus(str(out))


@pytest.mark.parametrize("line", ["no json", "[1]", '{"other": "x"}', '{"text": 3}'])
def test_wrong_line_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: no JSON object with a string 'text'"):
        list(documents(path))


def test_wrong_tokenizers_say_what_to_do(tmp_path, tokenizer):
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no.json is no tokenizer.json of tokenizers: "):
        Tokenizer.load(str(tmp_path / "no.json"))
    with pytest.raises(ValueError, match="has no token '<end>': give another --end-token"):
        Tokenizer.load(tokenizer, "<end>")
    assert Tokenizer.load(tokenizer, "two").end == 2
    with pytest.raises(ValueError, match="bytes have no token '<end>': give --tokenizer, or no"):
        Tokenizer.load(None, "<end>")
    with pytest.raises(SystemExit, match="No such file"):
        tokenize.main([str(tmp_path / "none"), f"--out={tmp_path / 'out'}"])


def write_parquet(path, columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, row_group_size=2)


def test_parquet_is_read_without_missing_texts(tmp_path):
    path = tmp_path / "a.parquet"
    texts = ["one", None, "", "zwei ü", "three"]
    write_parquet(path, {"number": list(range(5)), "text": texts, "body": ["b"] * 5})
    assert list(documents(path)) == ["one", "", "zwei ü", "three"]
    assert list(documents(path, "body")) == ["b"] * 5
    corpus = open_corpus(str(path))
    assert corpus.read(0, corpus.size).tolist() == list("onezwei üthree".encode())
    out = tmp_path / "out"
    tokenize.main([str(path), f"--out={out}"])
    assert open_corpus(str(out)).size == corpus.size


def test_wrong_parquet_says_what_to_do(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"number": [1, 2], "text": ["a", "b"]})
    with pytest.raises(ValueError, match="has no column 'body' but number, text: name the one"):
        list(documents(path, "body"))
    with pytest.raises(ValueError, match="column 'number' has type int64, and not string: name"):
        list(documents(path, "number"))
    path.write_bytes(b"no parquet" * 9)
    with pytest.raises(ValueError, match=r"a.parquet is no Parquet file: "):
        list(documents(path))
    with pytest.raises(SystemExit, match="No such file"):
        tokenize.main([str(tmp_path / "none.parquet"), f"--out={tmp_path / 'out'}"])


def test_parquet_asks_for_pyarrow_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = r"a.parquet needs pyarrow, which is not installed: pip install pyarrow"
    with pytest.raises(ValueError, match=words):
        list(documents(tmp_path / "a.parquet"))
