"""GGUF files: the reader, and models in them beside the same ones in Hugging Face's folders."""

import dataclasses
import json
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tokenizers
from flax import nnx

from models import convert, generate, initial, loop, perplexity, pretrain
from models.gguf import TYPES, File, find
from models.gguf_model import Tensors, config_json, tokenizer_config_json, tokenizer_json
from models.huggingface import load, read_config
from models.llama import Llama
from models.options import Options
from models.text import Codec, Tokenizer
from tests.python.models.gguf_files import contents, string, value, write_golden
from tests.python.models.golden_models import GOLDEN, PROMPT, expected
from tests.support.small_model import SMOLLM2, needs_smollm2

FAMILIES = ("llama-2", "llama-3", "qwen2", "qwen2.5", "qwen3")
METADATA = {
    "general.name": "grüße",
    "a.count": 7,
    "a.below": -7,
    "a.real": 0.5,
    "a.flag": True,
    "a.words": ["x", "", "yz"],
    "a.numbers": [1, 2, 3],
    "a.nothing": [],
}
RANDOM = np.random.default_rng(0)
VALUES = {
    "vector": (RANDOM.normal(size=7).astype(np.float32), "F32"),
    "halves": (RANDOM.normal(size=(3, 5)).astype(np.float16), "F16"),
    "brains": (RANDOM.normal(size=(2, 3, 1)).astype(jnp.bfloat16), "BF16"),
    "bytes": (RANDOM.normal(size=(5, 64)).astype(np.float32), "Q8_0"),
    "nibbles": (RANDOM.normal(size=(5, 96)).astype(np.float32), "Q4_1"),
}


@pytest.fixture
def write(tmp_path):
    def write(data: bytes):
        (tmp_path / "file.gguf").write_bytes(data)
        return tmp_path / "file.gguf"

    return write


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 64])
def test_file_has_what_was_written(write, version, alignment):
    metadata = METADATA | {"general.alignment": alignment}
    file = File(write(contents(metadata, VALUES, version)))
    assert file.metadata == metadata
    assert list(file.tensors) == list(VALUES)
    for name, (values, kind) in VALUES.items():
        read = file.read(name)
        assert read.shape == values.shape == file.tensors[name].shape
        if kind in ("Q8_0", "Q4_1"):
            assert read.dtype == np.float32
            steps = 127 if kind == "Q8_0" else 7.5
            assert np.abs(read - values).max() < 1.1 * np.abs(values).max() / steps / 2
        else:
            assert read.dtype == values.dtype
            assert read.tobytes() == values.tobytes()
        np.testing.assert_array_equal(file.read(name, slice(1, 3)), read[1:3])
        np.testing.assert_array_equal(file.read(name, np.array([1, 0])), read[[1, 0]])


def test_blocks_are_decoded_as_ggml_does():
    """The loops of `dequantize_row_q8_0` and `dequantize_row_q4_1` in ggml-quants.c."""
    scale, least = struct.pack("<e", 0.25), struct.pack("<e", -3.0)
    steps = RANDOM.integers(0, 256, 32, dtype=np.uint8)
    block = np.frombuffer(scale + steps.tobytes(), np.uint8)[None]
    signed = [int(step) - 256 * (step > 127) for step in steps]
    assert TYPES[8].decode(block)[0].tolist() == [0.25 * step for step in signed]
    block = np.frombuffer(scale + least + steps[:16].tobytes(), np.uint8)[None]
    nibbles = [int(step) & 15 for step in steps[:16]] + [int(step) >> 4 for step in steps[:16]]
    assert TYPES[3].decode(block)[0].tolist() == [0.25 * step - 3.0 for step in nibbles]


def header(*entries: bytes, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    counts = struct.pack("<IQQ", version, tensors, len(entries) - tensors)
    return magic + counts + b"".join(entries)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + axes + struct.pack("<IQ", kind, start) + bytes(64)


KEY = string("key")
HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no GGUF file: it does not begin with GGUF"),
        (header(magic=b"GGML"), "is no GGUF file"),
        (b"GGUF\3\0", "is damaged: it ends inside its version. Copy or download it again"),
        (header(version=1), "has version 1 of GGUF: take a file of version 2 or 3"),
        (header(version=3 << 24), "whose numbers are little-endian"),
        (header()[:-1], "it ends inside its counts"),
        (header(b""), "it ends inside a key of metadata"),
        (header(HUGE + b"key"), "it ends inside a key of metadata"),
        (header(string(b"\xff")), "a key of metadata is not UTF-8"),
        (header(KEY + value("x")[:-1]), "it ends inside key"),
        (header(KEY + value("x"), KEY + value(1)), "it has the key 'key' twice"),
        (header(KEY + struct.pack("<I", 13)), "the value of key has the unknown type 13"),
        (header(KEY + struct.pack("<II", 9, 4) + HUGE), "it ends inside key"),
        (header(KEY + struct.pack("<II", 9, 7) + HUGE), "it ends inside key"),
        (header(KEY + struct.pack("<II", 9, 8) + HUGE), "it ends inside key"),
        (header(KEY + struct.pack("<II", 9, 9) + HUGE), "the value of key has the unknown type 9"),
        (header(string("general.alignment") + value(24)), "alignment is 24 and no power of two"),
        (header(string("general.alignment") + value("x")), "alignment is 'x' and no power of two"),
        (header(tensor("w", (2,))[:9], tensors=1), "it ends inside the entry of the tensor 'w'"),
        (header(tensor("w", ()), tensors=1), "the tensor 'w' has 0 axes, and not 1 to 4"),
        (header(tensor("w", (1,) * 5), tensors=1), "the tensor 'w' has 5 axes, and not 1 to 4"),
        (header(tensor("w", (2, 0)), tensors=1), r"'w' of F32 has the shape \(0, 2\)"),
        (header(tensor("w", (48, 2), 8), tensors=1), r"'w' of Q8_0 has the shape \(2, 48\)"),
        (header(tensor("w", (256,), 14), tensors=1), "'w' has the type Q6_K, which is not decoded"),
        (header(tensor("w", (256,), 99), tensors=1), "type 99.*no types but F32, F16, Q4_1, Q8_0"),
        (header(tensor("w", (2,), 0, 4), tensors=1), "'w' is not aligned to 32 bytes"),
        (header(tensor("w", (40,)), tensors=1), "it ends before the tensor 'w' does"),
        (header(tensor("w", (1 << 63, 1 << 63)), tensors=1), "it ends before the tensor 'w' does"),
        (header(tensor("w", (2,), 0, 1 << 63), tensors=1), "it ends before the tensor 'w' does"),
    ],
)
def test_bad_file_is_refused_in_words(write, data, words):
    with pytest.raises(ValueError, match=words) as error:
        File(write(data))
    assert "file.gguf" in str(error.value)


def test_tensor_that_is_there_twice_is_refused(write):
    entry = tensor("w", (2,))[:-64]
    data = header(entry, entry, tensors=2) + bytes(128)
    with pytest.raises(ValueError, match="it has the tensor 'w' twice"):
        File(write(data))


def test_mutated_headers_give_value_errors_only(write, tmp_path):
    """2,000 files with changed, cut or moved bytes: each is read, or refused by a ValueError."""
    write_golden(tmp_path / "good.gguf", "llama-3", "F16", trained()[1])
    good = (tmp_path / "good.gguf").read_bytes()
    size = good.index(b"blk.1.ffn_down") + 60
    random = np.random.default_rng(7)
    refused = []
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(random.integers(1, 4)):
            place = int(random.integers(0, size))
            match random.integers(0, 4):
                case 0:
                    data[place] = random.integers(0, 256)
                case 1:
                    data[place] ^= 1 << random.integers(0, 8)
                case 2:
                    data[place : place + 8] = struct.pack("<Q", int(random.integers(0, 1 << 63)))
                case _:
                    del data[place : place + int(random.integers(1, 9))]
        if random.integers(0, 8) == 0:
            del data[random.integers(0, len(data)) :]
        try:
            file = File(write(bytes(data)))
            for name in file.tensors:
                file.read(name)
            config_json(file)
            Tensors(file).shapes()
            tokenizer_json(file)
            tokenizer_config_json(file)
        except ValueError as error:
            refused.append(str(error))
    assert 200 < len(refused) < 2000
    assert not [text for text in refused if "file.gguf" not in text]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "F32") for family in FAMILIES),
        *(pytest.param(family, "BF16", marks=pytest.mark.slow) for family in FAMILIES[1:]),
        (FAMILIES[0], "BF16"),
    ],
)
def test_parameters_are_those_of_the_folder(family, kind, tmp_path, make_mesh):
    write_golden(tmp_path / "model.gguf", family, kind)
    config, params = load(tmp_path / "model.gguf", make_mesh(data=1))
    same, theirs = load(GOLDEN / family, make_mesh(data=1), param_dtype=config.param_dtype)
    assert config == (same if kind == "BF16" else read_config(tmp_path))
    assert config.param_dtype == ("bfloat16" if kind == "BF16" else "float32")
    jax.tree.map(np.testing.assert_array_equal, params, theirs)


def test_logits_are_those_of_transformers(tmp_path, make_mesh, fast_jit):
    golden, mesh = expected("llama-3"), make_mesh(fsdp=2, model=2)
    write_golden(tmp_path / "model.gguf", "llama-3", "F32")
    with jax.set_mesh(mesh):
        config, params = load(tmp_path / "model.gguf", mesh)
        graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
        tokens = jnp.tile(golden["tokens"], (2, 1))
        ours = fast_jit(lambda params: nnx.merge(graph, params)(tokens))(params)
    np.testing.assert_allclose(ours[1:], golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"general.architecture": "bert"}, "general.architecture 'bert' can't be represented"),
        ({"llama.expert_count": 8}, "llama.expert_count '8' can't be represented"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' can't be"),
        ({"llama.odd": 1}, "llama.odd '1' can't be represented: known keys are attention.head_c"),
        ({"llama.block_count": 0}, "llama.block_count '0'.*it must be a positive number"),
        ({"llama.block_count": [2, 2]}, r"llama.block_count '\[2, 2\]'.*must be a positive number"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base '-1.0'.*must be a positive number"),
        ({"llama.rope.dimension_count": 2}, "dimension_count '2'.*a head has the size 4"),
        ({"llama.attention.value_length": 8}, "value_length '8'.*a head has the size 4"),
    ],
)
def test_model_that_the_layers_do_not_compute_is_refused_by_its_key(more, words, tmp_path):
    write_golden(tmp_path / "model.gguf", "llama-3", "F32", more)
    with pytest.raises(ValueError, match=words):
        read_config(tmp_path / "model.gguf")


def test_scaled_positions_and_unknown_tensors_are_refused(write, make_mesh):
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4}
    factors = {"rope_freqs.weight": (np.ones(2, np.float32), "F32")}
    with pytest.raises(ValueError, match=r"scaled rotary positions.*take Hugging Face's folder"):
        read_config(write(contents(metadata, factors)))
    with pytest.raises(ValueError, match=r"llama.attention.head_count 'None'.*it must be there"):
        read_config(write(contents({"general.architecture": "llama"}, {})))
    path = write(b"")
    write_golden(path, "llama-3", "F32")
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    with pytest.raises(
        ValueError, match=r"up_proj.weight is missing; blk.0.ffn_xx.weight is not of"
    ):
        load(path, make_mesh(data=1))


def trained() -> tuple[tokenizers.Tokenizer, dict]:
    """A byte-level tokenizer of 64 tokens as SmolLM's is, and as metadata."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text = "she sells sea shells by the sea shore in 2024, 2025 and 20255; the shells she sells"
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=64, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([text] * 5, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return tokenizer, metadata


def test_tokenizer_is_rebuilt(write):
    theirs, metadata = trained()
    text = "the sea shore, 20255 shells<|im_end|> by sea<|endoftext|>"
    path = write(contents(metadata, {}))
    ours = Codec.load(path)
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode("sea 2024 shells")) == "sea 2024 shells"
    assert ours.decode([1]) == ""
    loaded = Tokenizer.load(str(path))
    assert loaded.end == 0
    assert loaded.vocab == len(metadata["tokenizer.ggml.tokens"])
    path = write(contents(metadata | {"tokenizer.ggml.add_bos_token": True}, {}))
    assert Codec.load(path).encode("sea") == [0, *theirs.encode("sea").ids]


def test_digits_are_alone_if_the_file_says_so(write):
    theirs, metadata = trained()
    more = {"tokens": "20", "token_type": 1, "merges": "2 0"}
    metadata |= {k: [*metadata[k], x] for m, x in more.items() for k in [f"tokenizer.ggml.{m}"]}
    assert Codec.load(write(contents(metadata, {}))).encode("202") == theirs.encode("202").ids
    path = write(contents(metadata | {"tokenizer.ggml.pre": "gpt-2"}, {}))
    assert Codec.load(path).encode("202") == [
        len(metadata["tokenizer.ggml.tokens"]) - 1,
        *theirs.encode("2").ids,
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "llama"}, "of kind 'llama', cut by 'smollm'; only gpt2, cut by gpt-2 or smo"),
        ({"pre": "qwen2"}, "cut by 'qwen2'.*Put the model's tokenizer.json beside it"),
        ({"merges": ["a b c"]}, "tokens, their types and merges are not those of one tokenizer"),
        ({"merges": ["ä ö"]}, "no tokenizer that can be rebuilt: .*ä"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "not those of one tokenizer"),
        ({"token_type": [1]}, "not those of one tokenizer"),
        ({"tokens": 7}, "tokenizer.ggml.tokens is no list of str"),
    ],
)
def test_other_tokenizer_is_refused_in_words(more, words, write):
    metadata = trained()[1] | {f"tokenizer.ggml.{key}": x for key, x in more.items()}
    with pytest.raises(ValueError, match=words):
        Codec.load(write(contents(metadata, {})))


def test_file_or_its_folder_stands_for_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json: .*, or a GGUF file"):
        read_config(tmp_path)
    write_golden(tmp_path / "model.gguf", "llama-3", "F16", trained()[1])
    assert find(tmp_path) == find(tmp_path / "model.gguf") == tmp_path / "model.gguf"
    options = Options(init_from=str(tmp_path))
    wide = dataclasses.replace(read_config(tmp_path / "model.gguf"), param_dtype="float32")
    assert initial.config(options, vocab=64) == wide
    assert initial.tokenizer(options) == str(tmp_path / "model.gguf")
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(
        ValueError, match=r"several GGUF files: give the path of one of model\.gguf"
    ):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert find(tmp_path) is None


def test_conversion_gives_folders_with_the_same_parameters(tmp_path, make_mesh, capsys):
    source = tmp_path / "model.gguf"
    write_golden(source, "llama-3", "BF16", trained()[1])
    convert.main(["export", str(source), str(tmp_path / "theirs")])
    convert.main(["import", str(source), str(tmp_path / "ours")])
    convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "again")])
    _, params = load(source, make_mesh(data=1))
    for folder in (tmp_path / "theirs", tmp_path / "again"):
        jax.tree.map(np.testing.assert_array_equal, params, load(folder, make_mesh(data=1))[1])
        assert (folder / "tokenizer.json").read_text() == tokenizer_json(File(source))
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
        special = json.loads((folder / "tokenizer_config.json").read_text())
        assert (special["eos_token"], special["chat_template"]) == ("<|im_end|>", "{{ messages }}")
    assert not capsys.readouterr().err


def test_conversion_without_a_tokenizer_says_so(tmp_path, capsys):
    source = tmp_path / "model"
    source.mkdir()
    write_golden(source / "model.gguf", "llama-3", "BF16")
    convert.main(["export", str(source), str(tmp_path / "bare")])
    assert "no tokenizer.json is written: " in capsys.readouterr().err
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    with pytest.raises(SystemExit, match=r"has a tokenizer of kind 'None'.*name their folder"):
        generate.main([str(source), "text"])
    (source / "tokenizer.json").write_text("{}")
    convert.main(["export", str(source), str(tmp_path / "whole")])
    assert not capsys.readouterr().err
    assert (tmp_path / "whole" / "tokenizer.json").read_text() == "{}"


def test_command_continues_tokens_of_a_file(tmp_path, capsys, monkeypatch, fast_jit):
    monkeypatch.setattr(generate.jaxhet, "jit", fast_jit)
    golden = expected("qwen3")
    write_golden(tmp_path / "model.gguf", "qwen3", "F32")
    text = ",".join(map(str, golden["tokens"][0, :PROMPT]))
    generate.main([str(tmp_path / "model.gguf"), text, "--tokens", "--number", "4"])
    assert capsys.readouterr().out.strip() == ",".join(map(str, golden["continuation"][:4]))


@pytest.mark.slow
def test_run_starts_from_a_file(tmp_path, monkeypatch, make_mesh, fast_jit):
    monkeypatch.setattr(loop.jaxhet, "jit", fast_jit)
    source = tmp_path / "model.gguf"
    write_golden(source, "llama-3", "F32", trained()[1])
    (tmp_path / "text.txt").write_text("she sells sea shells by the sea shore, " * 20)
    options = {"init-from": source, "data": tmp_path / "text.txt", "run-dir": tmp_path / "run"}
    options |= {"steps": 1, "learning-rate": 0, "batch": 4, "seq": 8}
    pretrain.main([f"--{name}={value}" for name, value in options.items()])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore((tmp_path / "run" / "checkpoints" / "1" / "state").absolute())
    _, params = load(source, make_mesh(data=1))
    jax.tree.map(np.testing.assert_array_equal, saved["params"], params)


@needs_smollm2
@pytest.mark.slow
def test_published_model_writes_and_predicts_text(capsys):
    """SmolLM2-135M-Instruct: 2.864 nats on Python 3.12's language reference; chance is 10.8."""
    generate.main([str(SMOLLM2), "The capital of France is", "--number", "12"])
    assert "Paris." in capsys.readouterr().out
    perplexity.main([str(SMOLLM2), "--tokens=513", "--batch=1"])
    nats, *_, tokens, _, _ = capsys.readouterr().out.split()
    assert tokens == "512"
    assert 2.5 < float(nats) < 3.3
