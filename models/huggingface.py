"""Models of Hugging Face: folders of `config.json` and safetensors files, read and written.

Tensors are read one at a time. Each device gets its part of a tensor, and stores it in the
parameter. The host holds one part.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.configs import Config
from models.extras.families import WEIGHTS, Weight, config_from, config_to, tensor_names
from models.llama import Llama
from models.sharding import parameter_shardings, path_name

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Folders of parameters: in a run of `models.pretrain`, and in a checkpoint of `models.convert`.
CHECKPOINTS, PARAMS = "checkpoints", "params"

# Some folders hold the head of a model whose head is the embedding.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS_COMPARED = 1024  # rows of two tensors that the host holds at a time

Params = dict[str, Any]
_FORMAT = {"format": "pt"}
_BY_NAME = {weight.ours: weight for weight in WEIGHTS}


class Tensors(contextlib.ExitStack):
    """The tensors in a folder's safetensors files, by name. A context manager.

    A file is mapped, not read: what `read` returns is all that the host holds.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        files = [WHOLE]
        if (folder / INDEX).exists():
            files = sorted(set(_read_json(folder / INDEX)["weight_map"].values()))
        elif not (folder / WHOLE).exists():
            raise ValueError(f"{folder} has no {WHOLE} and no {INDEX}: {_hint(folder)}.")
        self._files: dict[str, Any] = {}
        for name in files:
            file = self._open(folder / name)
            self._files |= dict.fromkeys(file.keys(), file)

    def _open(self, path: Path) -> Any:
        try:
            return self.enter_context(safe_open(path, "np"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no complete safetensors file ({error}): download it again."
            ) from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, without `inv_freq`, a copy of `rope_theta` in older files."""
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not name.endswith(".rotary_emb.inv_freq")
        }

    def read(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor."""
        return self._files[name].get_slice(name)[where]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Conversion of a tensor to a part of a parameter, by `Weight.axes` and the parameter's shape.

    `shape` is the tensor's shape in the file, and `split` the same with axes in parentheses as
    separate axes. `order` names the axis of `split` for each axis of the parameter.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    groups: tuple[int, ...]

    @classmethod
    def of(cls, weight: Weight, shape: tuple[int, ...]) -> Self:
        """The layout of a weight whose parameter has the shape."""
        left, right = weight.axes.split(" -> ")
        sizes = dict(zip(right.split(), shape[weight.numbers :], strict=True))
        groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", left)]
        names = [name for group in groups for name in group]
        return cls(
            shape=tuple(math.prod(sizes[name] for name in group) for group in groups),
            split=tuple(sizes[name] for name in names),
            order=tuple(names.index(name) for name in right.split()),
            groups=tuple(len(group) for group in groups),
        )

    def in_file(self, where: tuple[slice, ...]) -> tuple[slice, ...]:
        """The same part of the file's shape; only the first axis of a group may be cut."""
        axes = iter(zip(where, self.split, strict=True))
        slices = []
        for count in self.groups:
            (first, size), *others = (next(axes) for _ in range(count))
            start, stop, _ = first.indices(size)
            inner = math.prod(size for _, size in others)
            slices.append(slice(start * inner, stop * inner))
        return tuple(slices)


def config_json(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder.

    Raises:
      ValueError: There is no model. The text says what to do.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"{folder} has no {CONFIG}: {_hint(folder)}.")
    return _read_json(folder / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}.") from None


def _hint(folder: Path) -> str:
    """Advice about a path that is no folder of Hugging Face's."""
    if (folder / CHECKPOINTS).is_dir() or folder.parent.name == CHECKPOINTS:
        kind = "run of models.pretrain"
    elif (folder / PARAMS).is_dir():
        kind = "checkpoint of models.convert"
    else:
        return "give a folder with config.json and safetensors files"
    command = f"python -m models.convert export {folder} FOLDER"
    return f"it is a {kind}: convert it with `{command}`, and give FOLDER"


def read_config(folder: Path) -> Config:
    """The config of the model in a folder; ValueError if it is not one that the layers compute."""
    return config_from(config_json(folder))


def load(folder: Path, mesh: jax.sharding.Mesh, **changes: Any) -> tuple[Config, Params]:
    """The config and the parameters of a folder.

    Args:
      folder: Hugging Face's folder.
      mesh: Mesh that the parameters are loaded on.
      **changes: Fields of the config to change. Parameters have the type `param_dtype`; by default
        the folder's.

    Raises:
      ValueError: the model can't be represented, or its tensors do not fit its config.
    """
    config = dataclasses.replace(read_config(folder), **changes)
    shapes = parameter_shapes(config)
    with Tensors(folder) as tensors:
        found = tensors.shapes()
        if config.tied:
            _leave_head_out(tensors, found)
        _check(found, shapes)
        read = jax.tree_util.tree_map_with_path(
            lambda path, leaf, sharding: _load(tensors, path_name(path), leaf, sharding),
            shapes,
            parameter_shardings(shapes, mesh),
        )
    return config, read


def parameter_shapes(config: Config) -> Params:
    """The parameters of a model as shapes and types, by name."""
    state = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))), nnx.Param)
    return nnx.to_pure_dict(state)


def _named(shapes: Params) -> Iterator[tuple[Weight, Any]]:
    """Each parameter's weight and leaf, in the order of `WEIGHTS`."""
    leaves = {path_name(k): leaf for k, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    return ((weight, leaves[weight.ours]) for weight in WEIGHTS if weight.ours in leaves)


def _leave_head_out(tensors: Tensors, found: dict[str, tuple[int, ...]]) -> None:
    """Removes the head of a model whose head is the embedding; ValueError if it is another one."""
    if not {HEAD, EMBEDDING} <= found.keys():
        return
    num_rows = found[HEAD][0]
    parts = (
        (slice(row, min(row + _ROWS_COMPARED, num_rows)), slice(None))
        for row in range(0, num_rows, _ROWS_COMPARED)
    )
    if found[HEAD] != found[EMBEDDING] or not all(
        tensors.read(HEAD, part).tobytes() == tensors.read(EMBEDDING, part).tobytes()
        for part in parts
    ):
        raise ValueError(
            f"{HEAD} is not {EMBEDDING}, but {CONFIG} has tie_word_embeddings: set that to false "
            "if the model has a head of its own, or take the files of one model."
        )
    del found[HEAD]


def _check(found: Mapping[str, tuple[int, ...]], shapes: Params) -> None:
    """Compares the tensors of a folder with the tensors of a model."""
    expected = {
        name: Layout.of(weight, leaf.shape).shape
        for weight, leaf in _named(shapes)
        for name, _ in tensor_names(weight, leaf.shape)
    }
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not of this model" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {found[name]} and not {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the tensors are not those of {CONFIG}: {'; '.join(problems[:5])}{more}. "
            "Take the files of one model."
        )


def _load(tensors: Tensors, ours: str, leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A parameter, made of its tensors on its devices."""
    weight = _BY_NAME[ours]
    layout = Layout.of(weight, leaf.shape)
    spec = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))[weight.numbers :]
    by_axis = dict(zip(layout.order, spec, strict=True))
    lies = NamedSharding(sharding.mesh, PartitionSpec(*(by_axis[i] for i in range(len(spec)))))

    def put(whole: jax.Array, tensor: jax.Array, place: jax.Array) -> jax.Array:
        part = tensor.transpose(layout.order).astype(whole.dtype)
        part = part.reshape(*[1] * weight.numbers, *part.shape)
        rest = [jnp.int32(0)] * len(spec)  # the type of `place`, also with JAX_ENABLE_X64
        return jax.lax.dynamic_update_slice(whole, part, (*place, *rest))

    put = jax.jit(put, donate_argnums=0, out_shardings=sharding)
    whole = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=sharding)()
    for name, place in tensor_names(weight, leaf.shape):
        tensor = _place(tensors, name, layout, lies)
        # On CPUs the device may share the host's memory, which must stay until the copy is done.
        whole = jax.block_until_ready(put(whole, tensor, np.array(place, np.int32)))
    return whole


def _place(tensors: Tensors, name: str, layout: Layout, lies: NamedSharding) -> jax.Array:
    """A tensor of shape `layout.split` on its devices; a part that several need is read once.

    The host holds one part at a time.
    """
    places = lies.addressable_devices_indices_map(layout.split)
    groups: dict[str, list[Any]] = {}
    for device, where in places.items():
        groups.setdefault(str(where), []).append(device)
    pieces = {}
    for devices in groups.values():
        where = places[devices[0]]
        assert where is not None  # all devices are addressable ones
        sizes = (len(range(*s.indices(n))) for s, n in zip(where, layout.split, strict=True))
        part = tensors.read(name, layout.in_file(where)).reshape(*sizes)
        copies = jax.block_until_ready([jax.device_put(part, device) for device in devices])
        pieces |= dict(zip(devices, copies, strict=True))
        del part
    ordered = [pieces[device] for device in places]
    return jax.make_array_from_single_device_arrays(layout.split, lies, ordered)


def save(
    folder: Path,
    config: Config,
    params: Params,
    *,
    like: Mapping[str, Any] | None = None,
    file_bytes: int = 0,
) -> None:
    """Writes a folder that `transformers` and `load` open.

    Args:
      folder: folder to write; made if it does not exist.
      config: config of the model.
      params: parameters of the model, completely on devices of this process.
      like: a `config.json` for keys that `Config` lacks, such as the tokens that end a text.
      file_bytes: largest size of a file of tensors, and of what the host holds; a larger tensor has
        a file of its own. 0: the size of the largest tensor.
    """
    ours = config_to(config, like)
    files = _files(list(_tensors(params)), file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    where = {}
    for number, contents in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else WHOLE
        # `transformers` asks who wrote a file; "pt" says that axes are in PyTorch's order.
        save_file({tensor.name: tensor.read() for tensor in contents}, folder / name, _FORMAT)
        where |= {tensor.name: name for tensor in contents}
    if len(files) > 1:
        total = sum(tensor.num_bytes for contents in files for tensor in contents)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    (folder / CONFIG).write_text(json.dumps(ours, indent=2))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor to write; `read` brings it to the host."""

    name: str
    num_bytes: int
    read: Callable[[], np.ndarray]


def _files(tensors: Sequence[_Tensor], file_bytes: int) -> list[list[_Tensor]]:
    """The tensors of each file: at most `file_bytes`, or one."""
    limit = file_bytes or max(tensor.num_bytes for tensor in tensors)
    files: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += tensor.num_bytes
        if files[-1] and size > limit:
            files.append([])
            size = tensor.num_bytes
        files[-1].append(tensor)
    return files


def _tensors(params: Params) -> Iterator[_Tensor]:
    """All tensors of a model, in the order of `WEIGHTS`."""
    for weight, leaf in _named(params):
        layout = Layout.of(weight, leaf.shape)
        take = jax.jit(partial(_take, layout))
        num_bytes = math.prod(layout.shape) * leaf.dtype.itemsize
        for name, place in tensor_names(weight, leaf.shape):
            where = np.array(place, np.int32)
            yield _Tensor(name, num_bytes, lambda f=take, x=leaf, p=where: np.asarray(f(x, p)))


def _take(layout: Layout, parameter: jax.Array, place: jax.Array) -> jax.Array:
    """The tensor at a place in a parameter."""
    for index in place:
        parameter = jax.lax.dynamic_index_in_dim(parameter, index, keepdims=False)
    return parameter.transpose(np.argsort(layout.order)).reshape(layout.shape)
