"""Descriptions of values: equal if a program computes the same with them, in every process.

An object is described by its class and its content. An object that can't be described is *held*:
the process remembers the object itself, because all objects of its class have the same words.
"""

import enum
import functools
import gc
import math
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.core import Tracer
from jax.extend import core

from jaxhet._traced import functions
from jaxhet._traced.functions import digest

_MOST_IDS_SHOWN = 16
_LOCATION = re.compile(
    r"^#loc.*\n| ?loc\((?:#loc\d*|unknown|\"[^\"]*\")\)", re.MULTILINE
)  # in MLIR
_BUILT_IN_CODE = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_NAMES_OF_PLACES = (types.TracebackType, types.FrameType)  # for readers
_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinMethodType,
    type,
    tuple,
    dict,
    functools.partial,
)


class Held(NamedTuple):
    """An object of a program that exists in this process only.

    Attributes:
      what: Description of the object, which may be incomplete.
      place: Where the program has it.
      words: Words that are equal for equal objects only; None if there are none.
      get: Returns the object; None if it was deleted.
    """

    what: str
    place: str
    words: str | None
    get: Callable[[], Any]

    def is_same(self, other: "Held") -> bool:
        """Whether both stand for one object, or for equal ones."""
        if self.words is not None and self.words == other.words:
            return True
        mine = self.get()
        return mine is not None and mine is other.get()


def first_difference(one: Sequence[Held], other: Sequence[Held]) -> Held | None:
    """The first object of `other` that differs from the one in its place, or None."""
    for mine, theirs in zip(one, other, strict=False):
        if not mine.is_same(theirs):
            return theirs
    return None if len(one) == len(other) else [*one, *other][-1]


def number_text(value: Any) -> str:
    """A number in words, without its type."""
    if isinstance(value, float):
        value = np.asarray(value) if not math.isfinite(value) else value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array_text(value, is_typed=False)
    return repr(value)


def _array_text(value: Any, is_typed: bool = True) -> str:
    """Type, shape and value of a constant, or the digest of a long value."""
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{kind} {_array_text(jax.random.key_data(value))}"
        value = np.asarray(value)
    if value.size == 1 and _is_finite(value):
        return f"{kind} {value.item()!r}" if is_typed else f"{value.item()!r}"
    return f"{kind} {digest(np.ascontiguousarray(value).tobytes())}"


def _is_finite(value: Any) -> bool:
    if value.dtype.kind in "SUMm" or value.dtype.names:
        return False  # not a number
    return bool(np.all(np.isfinite(value.astype(complex))))


def _ids_text(devices: Any) -> str:
    ids = [device.id for device in devices]
    return f"{len(ids)} devices {digest(str(ids))}" if len(ids) > _MOST_IDS_SHOWN else str(ids)


def _spec_text(spec: jax.sharding.PartitionSpec) -> str:
    """A spec in words. Its sets of axes have one order in all processes."""
    return re.sub(r"\{(.*?)\}", lambda m: f"{{{', '.join(sorted(m[1].split(', ')))}}}", str(spec))


# Types whose text describes a value completely.
_PLAIN: dict[type, Callable[[Any], str]] = {
    bool: repr,
    int: repr,
    str: repr,
    type(None): repr,
    type(...): repr,
    type(NotImplemented): repr,
    complex: lambda value: _array_text(np.asarray(value)),
    float: number_text,
    bytes: lambda value: f"{len(value)} bytes {digest(value)}",
    range: repr,
    jax.sharding.PartitionSpec: _spec_text,
}


class Describer:
    """Describes a value and all that it holds.

    Args:
      body: Gives a jaxpr in words, and the objects that it holds.
      place: Tells where the program has the value.
      is_private: Whether values belong to this process alone, so that the words have only code.

    Attributes:
      held: The objects that the words do not describe.
    """

    def __init__(
        self,
        body: Callable[[core.Jaxpr], tuple[str, Sequence[Held]]],
        place: Callable[[], str] = str,
        is_private: bool = False,
    ):
        self.held: list[Held] = []
        self._body = body
        self._place = place
        self._is_private = is_private
        self._numbers: dict[int, int] = {}  # by identity, of values that were met
        self._met: list[Any] = []  # which keeps them alive

    def text(self, value: Any) -> str:
        """A value in words; a value that occurred before is named by its number."""
        if self._is_private and not isinstance(value, _CODE):
            return self._hold_own(value)
        if (plain := _PLAIN.get(type(value))) is not None:
            return plain(value)
        if type(value) is tuple:
            return "(" + ", ".join(map(self.text, value)) + ")"
        known = self._of_jax(value)
        if known is None:
            known = self._simple_text(value)
        return self._compound_text(value) if known is None else known

    def _of_jax(self, value: Any) -> str | None:
        """Describes values of JAX's own types; None for other values."""
        if isinstance(value, Tracer):  # an operand holds the value, too
            return f"traced {value.aval.str_short(short_dtypes=True)}"
        if isinstance(value, jax.Array):
            if value.is_fully_addressable:
                return _array_text(value)
            kind = f"{value.dtype}{list(value.shape)} {self.text(value.sharding)}"
            return self._hold(value, kind, None)  # nobody has all of its values
        if isinstance(value, core.Primitive):
            return value.name
        if isinstance(value, core.Jaxpr):  # deep in a parameter, as Pallas has them
            words, held = self._body(value)
            self.held += held
            return f"body {words}"
        if isinstance(value, jax.sharding.Sharding):
            return self._sharding_text(value)
        if isinstance(value, jax.sharding.AbstractMesh):  # which knows the kind of device
            return f"mesh {dict(value.shape)}"
        if isinstance(value, jax.sharding.Mesh):
            ids = _ids_text([] if value.empty else value.devices.flat)
            return f"mesh {dict(value.shape)} of {ids}"
        if isinstance(value, jax.Device):  # each island has others
            return "a device"
        if isinstance(value, jax.tree_util.PyTreeDef):
            return self._tree_text(value)
        if hasattr(value, "str_short") and functions.is_of_library(type(value)):
            return str(value)  # a type
        return None

    def _simple_text(self, value: Any) -> str | None:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return _array_text(value)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return _array_text(value)
        if isinstance(value, np.dtype):
            metadata = f" {self.text(value.metadata)}" if value.metadata else ""
            return f"{value.descr if value.names else value}{metadata}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, _NAMES_OF_PLACES) or _is_debug_info(value):
            return "a place in the source"
        if isinstance(value, _BUILT_IN_CODE) or functions.is_of_library(value):
            return _library_name(value)
        kind = type(value)
        if functions.is_of_library(kind) and functions.is_all_in_attributes(kind):
            return None if functions.attributes(value) else _library_name(kind)
        return None

    def _sharding_text(self, value: jax.sharding.Sharding) -> str:
        if isinstance(value, jax.sharding.NamedSharding):
            return f"{_spec_text(value.spec)} on {self.text(value.mesh)}"
        if isinstance(value, jax.sharding.SingleDeviceSharding):  # each process has another device
            return "on one device"
        # Order of devices and XLA's sharding of other shardings: JAX has no public names for them.
        devices = getattr(value, "_device_assignment", None) or ()
        of_xla = getattr(value, "_hlo_sharding", "")
        held = self._parts_text(functions.attributes(value))
        words = f"{type(value).__qualname__} {of_xla}{held} {value.memory_kind}"
        return f"{words} on {_ids_text(devices)}"

    def _tree_text(self, tree: Any) -> str:
        if (node := tree.node_data()) is None:
            return "*"
        kind, data = node
        children = ", ".join(map(self._tree_text, tree.children()))
        return f"{self.text(kind)} {self.text(data)}({children})"

    def _compound_text(self, value: Any) -> str:
        if (number := self._numbers.get(id(value))) is not None:
            return f"value {number}"
        self._numbers[id(value)] = len(self._numbers)
        self._met.append(value)
        if isinstance(value, types.FunctionType):
            return self._function_text(value)
        if isinstance(value, type):
            return self._class_text(value)
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, types.BuiltinMethodType):
            return f"{value.__qualname__} of {self.text(value.__self__)}"
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords, value.__dict__)
            return f"{self.text(type(value))}{self.text(parts)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self.text(value.__func__)}"
        if isinstance(value, property):
            return f"property{self.text((value.fget, value.fset, value.fdel))}"
        if isinstance(value, dict | types.MappingProxyType):
            return self._with_class(value, self._parts_text(value))
        if isinstance(value, set | frozenset):
            return self._with_class(value, "{" + ", ".join(self._sorted_texts(value)) + "}")
        if isinstance(value, list | tuple):
            return self._with_class(value, self._sequence_text(value))
        return self._object_text(value)

    def _parts_text(self, parts: Mapping[Any, Any]) -> str:
        texts = (
            f"{key if type(key) is str else self.text(key)}: {self.text(value)}"
            for key, value in parts.items()
        )
        return "{" + ", ".join(texts) + "}"

    def _sequence_text(self, value: Sequence[Any]) -> str:
        fields = getattr(type(value), "_fields", None)
        if fields is not None:
            return self._parts_text(dict(zip(fields, value, strict=True)))
        return "(" + ", ".join(map(self.text, value)) + ")"

    def _sorted_texts(self, values: Any) -> list[str]:
        """Words that do not depend on the order in which a set gives its elements."""
        texts, before = [], dict(self._numbers)
        for value in values:
            self._numbers = dict(before)
            texts.append(self.text(value))
        return sorted(texts)

    def _with_class(self, value: Any, words: str) -> str:
        """Words of a container, and of the attributes that a user's subclass adds."""
        if type(value) in (dict, set, frozenset, list, tuple, types.MappingProxyType):
            return words
        held = functions.attributes(value)
        added = self._parts_text(held) if held else ""
        return f"{self.text(type(value))}{added}{words}"

    def _class_text(self, cls: type) -> str:
        parts = (cls.__bases__, type(cls), functions.own_attributes(cls))
        return f"class {cls.__module__}.{cls.__qualname__} {self.text(parts)}"

    def _function_text(self, function: types.FunctionType) -> str:
        words = [f"{function.__module__}.{function.__qualname__}"]
        words.append(functions.code_text(function.__code__))
        parts = (
            function.__defaults__,
            function.__kwdefaults__,
            functions.read_by(function),
            function.__dict__,
        )
        return " ".join([*words, *(self.text(part) for part in parts if part)])

    def _object_text(self, value: Any) -> str:
        kind = type(value)
        if isinstance(value, np.ndarray) and kind is np.ndarray:  # holds addresses of objects
            return f"array{list(value.shape)} {self.text(value.tolist())}"
        if isinstance(value, np.ufunc):  # one of `np.frompyfunc` holds a function
            return f"ufunc {value.__name__} {value.types} {self.text(gc.get_referents(value))}"
        if isinstance(value, np.vectorize):  # which keeps what it made, too
            parts = (value.pyfunc, value.otypes, value.signature, value.excluded)  # type: ignore[attr-defined]
            return f"vectorize{self.text(parts)}"
        if isinstance(value, enum.Enum):
            return f"{self.text(kind)}.{value.name} {self.text(value.value)}"
        if isinstance(value, memoryview):
            return f"view {value.format} {value.shape} {self.text(value.tobytes())}"
        held = functions.attributes(value)
        if isinstance(value, export.Exported):
            held["mlir_module_serialized"] = _LOCATION.sub("", value.mlir_module())
        words = f"{self.text(kind)}{self._parts_text(held) if held else ''}"
        if functions.is_all_in_attributes(kind):
            return words
        wrapped = getattr(value, "__wrapped__", None)
        if callable(wrapped):
            return f"{words} of {self.text(wrapped)}"
        reduced = _reduced(value)
        if reduced is not None:
            return f"{words} {self.text(reduced)}"
        text = str(value)
        if kind.__module__.partition(".")[0] in ("jax", "jaxlib") and "0x" not in text:
            return f"{words} {text}"
        return self._hold(value, f"{words} {self.text(_seen(value))}", None)

    def _hold_own(self, value: Any) -> str:
        """Records a value that belongs to this process."""
        kind = type(value)
        is_plain = kind in _PLAIN or isinstance(value, np.ndarray | np.generic | enum.Enum)
        words = Describer(self._body).text(value) if is_plain else None
        return self._hold(value, f"a {kind.__qualname__}", words)

    def _hold(self, value: Any, text: str, words: str | None) -> str:
        try:
            get: Callable[[], Any] = weakref.ref(value)
        except TypeError:

            def get() -> Any:
                return value

        what = f"{type(value).__module__}.{type(value).__qualname__}"
        self.held.append(Held(what, self._place(), words, get))
        return text


def _library_name(value: Any) -> str:
    module = getattr(value, "__module__", None) or getattr(value, "__objclass__", "")
    name = value.__qualname__
    return name if str(module).partition(".")[0] in ("jax", "builtins") else f"{module}.{name}"


def _is_debug_info(value: Any) -> bool:
    return type(value).__name__ == "DebugInfo" and type(value).__module__.startswith("jax.")


def _seen(value: Any) -> Any:
    """The visible parts of an object that can't be described as a whole."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lineno, dict(frame.f_locals))
    return gc.get_referents(value) if type(value).__module__ == "itertools" else None


def _reduced(value: Any) -> Any:
    """The parts that pickle would keep of an object, or None if it can't."""
    if type(value).__module__ == "itertools":  # pickling iterators is deprecated and warns
        return None
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # an object's own code may raise anything
        return None
    if isinstance(reduced, str):  # the name of a global
        return None
    items = (None if part is None else list(part) for part in reduced[3:5])
    return (*reduced[:3], *items)
