import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import convert, generate
from models.extras import perplexity
from models.huggingface import load, save
from tests.python.models.golden_models import (
    GOLDEN,
    WIDE,
    assert_same_bits,
    each_family,
    expected,
    tensors,
    whole,
)
from tests.python.models.load_memory import STATUS
from tests.support.commands import python

QUICK = ("llama-2", "qwen2.5", "qwen3-moe")
EACH_FAMILY = each_family(*QUICK)


@EACH_FAMILY
def test_logits_are_those_of_transformers(family, make_mesh, fast_jit):
    golden = expected(family)
    config, params = load(GOLDEN / family, make_mesh(data=1), **WIDE)
    ours = whole(config, params, golden["tokens"], fast_jit)
    np.testing.assert_allclose(ours, golden["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", QUICK)
def test_model_loads_and_computes_in_float64(family, make_mesh, fast_jit, x64):
    golden = expected(family)
    wide = {"dtype": "float64", "param_dtype": "float64"}
    config, params = load(GOLDEN / family, make_mesh(data=1), **wide)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}
    ours = whole(config, params, golden["tokens"], fast_jit)
    assert ours.dtype == jnp.float64
    np.testing.assert_allclose(ours, golden["logits"], atol=1e-4, rtol=0)


@EACH_FAMILY
def test_bfloat16_is_as_near_as_that_of_transformers(family, make_mesh, fast_jit):
    golden = expected(family)
    config, params = load(GOLDEN / family, make_mesh(data=1))
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    error = np.abs(whole(config, params, golden["tokens"], fast_jit) - golden["logits"]).max()
    assert 0 < error <= 2 * float(golden["bfloat16_error"][0])


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen2", {"model": 2}),
        ("qwen3-moe", {"expert": 2, "model": 2}),
        ("llama-2", {"fsdp": 2, "model": 2}),
    ],
)
def test_model_lies_and_computes_on_a_mesh(family, axes, make_mesh, fast_jit):
    golden, mesh = expected(family), make_mesh(**axes)
    with jax.set_mesh(mesh):
        config, params = load(GOLDEN / family, mesh, **WIDE)
        tokens = jnp.tile(golden["tokens"], (2, 1))
        ours = whole(config, params, tokens, fast_jit)
    np.testing.assert_allclose(ours[1:], golden["logits"], atol=1e-4, rtol=0)
    assert not params["blocks"]["attention"]["query"]["kernel"].is_fully_replicated


@EACH_FAMILY
def test_import_and_export_give_the_same_bits(family, tmp_path):
    shutil.copytree(GOLDEN / family, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    convert.main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])
    assert_same_bits(tmp_path / "theirs", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "ours" / "model.safetensors.index.json").exists()
    with pytest.raises(SystemExit, match="back is there already: give the name of a new folder"):
        convert.main(["export", str(tmp_path / "ours"), str(tmp_path / "back")])


def test_types_are_converted_on_the_way_in(tmp_path, make_mesh):
    _, wide = load(GOLDEN / "qwen3", make_mesh(data=1), param_dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    _, narrow = load(GOLDEN / "qwen3", make_mesh(data=1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), wide, narrow)


def test_files_hold_at_most_what_was_asked(tmp_path, make_mesh):
    config, params = load(GOLDEN / "llama-3", make_mesh(data=1))
    save(tmp_path, config, params, file_bytes=5000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for path in files:
        assert sum(x.nbytes for x in load_file(path).values()) <= 5000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(tmp_path).values())
    assert_same_bits(GOLDEN / "llama-3", tmp_path)
    load(tmp_path, make_mesh(data=1))


LARGEST = 4 * 65536 * 256


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder of 240 MB in float32, with 67 MB in each of its two largest tensors."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"vocab_size": 65536, "hidden_size": 256, "intermediate_size": 4096, "head_dim": 64}
    config = json.loads((GOLDEN / "llama-3" / "config.json").read_text()) | sizes
    config |= {"num_hidden_layers": 8, "dtype": "float32"}
    heads = 64 * config["num_attention_heads"]
    keys = 64 * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (256,),
        "post_attention_layernorm": (256,),
        "self_attn.q_proj": (heads, 256),
        "self_attn.k_proj": (keys, 256),
        "self_attn.v_proj": (keys, 256),
        "self_attn.o_proj": (256, heads),
        "mlp.gate_proj": (4096, 256),
        "mlp.up_proj": (4096, 256),
        "mlp.down_proj": (256, 4096),
    }
    shapes = {f"model.layers.{i}.{k}.weight": v for i in range(8) for k, v in layer.items()}
    shapes |= {"model.embed_tokens.weight": (65536, 256), "lm_head.weight": (65536, 256)}
    shapes["model.norm.weight"] = (256,)
    save_file({k: np.ones(v, np.float32) for k, v in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    (folder / "model.safetensors").unlink()


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc/self/status")
def test_memory_of_a_load_is_below_two_of_the_largest_tensor(large):
    """Measured by the system, including the memory of CPU devices beside the parameters."""
    # Freed memory is returned at once, so that it can't hide later allocations.
    command = ("-m", "tests.python.models.load_memory", large)
    ended = python(*command, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
    parameters, growth = map(int, ended.stdout.split())
    assert parameters > 4 * 2 * 65536 * 256  # heads and norms have replicas
    assert growth > parameters  # they are among what was measured
    assert growth - parameters < 2 * LARGEST, (growth - parameters) / LARGEST


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"model.odd": np.zeros(1)}), "model.odd is not of this model"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(3)}),
            r"model.norm.weight has shape \(3,\) and not \(16,\).*Take the files of one model",
        ),
    ],
)
def test_tensors_of_another_model_are_named(change, words, tmp_path, make_mesh):
    values = tensors(GOLDEN / "llama-3")
    change(values)
    save_file(values, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "llama-3" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=words):
        load(tmp_path, make_mesh(data=1))


def test_head_of_a_tied_model_must_be_the_embedding(tmp_path, make_mesh):
    values = tensors(GOLDEN / "llama-3.2")
    shutil.copy(GOLDEN / "llama-3.2" / "config.json", tmp_path)

    def read(head) -> tuple:
        save_file({**values, "lm_head.weight": head}, tmp_path / "model.safetensors")
        return load(tmp_path, make_mesh(model=2))

    embedding = values["model.embed_tokens.weight"]
    _, expected_params = load(GOLDEN / "llama-3.2", make_mesh(model=2))
    jax.tree.map(np.testing.assert_array_equal, read(embedding)[1], expected_params)
    other = embedding.copy()
    other[-1, -1] += 1
    for head in (other, embedding[:-1]):
        with pytest.raises(
            ValueError, match=r"head.weight is not model.* tie_word_embeddings: set"
        ):
            read(head)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: f.mkdir(), "model has no config.json: give a folder with config.json and"),
        (
            lambda f: (f / "checkpoints").mkdir(parents=True),
            "it is a run of models.pretrain: convert it with",
        ),
        (lambda f: (f / "config.json").mkdir(parents=True), "Is a directory: '.*config.json'"),
        (lambda f: _change(f, "config.json", b"{"), "config.json is no JSON file: Expecting prop"),
        (
            lambda f: _change(f, "model.safetensors", b"version https://git-lfs.github.com"),
            r"model.safetensors is no complete safetensors file \(.*\): download it again",
        ),
        (lambda f: _change(f, "model.safetensors"), "has no model.safetensors and no model.safet"),
        (
            lambda f: _change(f, "model.safetensors.index.json", b"]"),
            "model.safetensors.index.json is no JSON file",
        ),
    ],
)
def test_folder_without_a_model_is_one_line_that_says_what_to_do(make, words, tmp_path):
    make(tmp_path / "model")
    for command, *others in ((generate, "1", "--tokens"), (perplexity,)):
        with pytest.raises(SystemExit, match=f"python -m models.*: .*{words}"):
            command.main([str(tmp_path / "model"), *others])


def test_checkpoint_of_convert_says_what_to_do(make_mesh, tmp_path):
    convert.import_model(GOLDEN / "qwen2", tmp_path / "ours", make_mesh(data=1))
    with pytest.raises(SystemExit, match=r"ours has no model\.safetensors.*: it is a checkpoint"):
        generate.main([str(tmp_path / "ours"), "1,2", "--tokens"])
    with pytest.raises(SystemExit, match=r"nothing has no config\.json: give a folder with config"):
        generate.main([str(tmp_path / "nothing"), "text"])
    with pytest.raises(SystemExit, match=r"`python -m models.convert export .*ours FOLDER`, and"):
        perplexity.main([str(tmp_path / "ours")])


def _change(folder, name, contents=None):
    """A copy of a small model in which a file has other contents, or is missing."""
    shutil.copytree(GOLDEN / "qwen2", folder)
    (folder / name).unlink(missing_ok=True)
    if contents is not None:
        (folder / name).write_bytes(contents)
