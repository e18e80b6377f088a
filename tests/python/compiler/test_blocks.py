"""All-to-alls on CPU: what XLA cuts into blocks and joins again is exchanged as it is."""

import pytest

from tests.python.compiler.hlo_text import decomposed, opcodes

_COPIES = ("concatenate", "fusion")
_GROUPS = "channel_id=1, replica_groups={{0,1}}"


def _all_to_all(
    cut: int = 0,
    join: int = 0,
    element_type: str = "f32",
    wide: str = "",
    order: tuple[int, int] = (0, 1),
    starts: tuple[int, int] | None = None,
) -> str:
    """XLA's form of an all-to-all of [4,6], cut and joined along dimensions; as one of `wide`."""
    block = [2, 6] if cut == 0 else [4, 3]
    whole = [size * 2 if dim == join else size for dim, size in enumerate(block)]
    shape, moved = f"{element_type}{block}", f"{wide or element_type}{block}"
    first = "wide" if wide else "cut"
    last = "narrow" if wide else "get"
    lines = [f"p = {element_type}[4,6] parameter(0)"]
    for number, start in enumerate(starts or (0, block[cut])):
        bounds = ["[0:4]", "[0:6]"]
        bounds[cut] = f"[{start}:{start + block[cut]}]"
        lines.append(f"cut.{number} = {shape} slice(p), slice={{{', '.join(bounds)}}}")
        if wide:
            lines.append(f"wide.{number} = {moved} convert(cut.{number})")
    lines.append(f"r = ({moved}, {moved}) all-to-all({first}.0, {first}.1), {_GROUPS}")
    for number in (0, 1):
        lines.append(f"get.{number} = {moved} get-tuple-element(r), index={number}")
        if wide:
            lines.append(f"narrow.{number} = {shape} convert(get.{number})")
    parts = ", ".join(f"{last}.{number}" for number in order)
    lines.append(f"ROOT o = {element_type}{whole} concatenate({parts}), dimensions={{{join}}}")
    return decomposed("\n".join(lines).replace(", 6]", ",6]").replace(", 3]", ",3]"))


def _copies(text: str) -> list[str]:
    return [opcode for opcode in opcodes(text) if opcode in _COPIES]


@pytest.mark.parametrize(
    ("cut", "join", "copies"),
    [(0, 0, []), (1, 0, ["fusion"]), (0, 1, ["fusion"]), (1, 1, ["fusion", "fusion"])],
)
def test_array_is_exchanged_as_it_is(cut: int, join: int, copies: list[str]):
    text = _all_to_all(cut, join)
    assert _copies(text) == copies  # along another dimension than the first, a transposition
    assert "all_to_all all-to-all flat of 2 f32[24] {{0,1}}" in text


@pytest.mark.parametrize("element_type", ["bf16", "f8e4m3fn"])
def test_array_of_a_small_type_is_exchanged_in_that_type(element_type: str):
    text = _all_to_all(element_type=element_type, wide="f32")
    assert f"all_to_all all-to-all flat of 2 {element_type}[24] {{{{0,1}}}}" in text


@pytest.mark.parametrize("starts", [(0, 1), (2, 0)], ids=["not all", "in another order"])
def test_other_blocks_are_put_together(starts: tuple[int, int]):
    assert "concatenate" in _copies(_all_to_all(starts=starts))


def test_results_in_another_order_are_put_together():
    assert "concatenate" in _copies(_all_to_all(order=(1, 0)))
