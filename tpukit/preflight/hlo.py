"""HLO modules as protobuf: read without protobuf's own packages, and rewritten without what does not matter.

Numbers of fields are those of xla/service/hlo.proto and xla/xla_data.proto (OpenXLA), which never reuses one.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_COMPUTATION, _ENTRY_ID, _STACK_FRAMES = 3, 6, 17
_INSTRUCTION, _COMPUTATION_ID = 2, 5
_METADATA, _OP_TYPE, _OP_NAME, _SOURCE_FILE, _SOURCE_LINE = 7, 1, 2, 3, 4
_MINOR_TO_MAJOR, _TILES, _MEMORY_SPACE = 1, 6, 8
_WITH_CONFIG_MODULE = 1  # of HloModuleProtoWithConfig, which libtpu answers with

# PrimitiveType: its name and bytes.
_TYPES = {
    **{1: ("pred", 1), 2: ("s8", 1), 3: ("s16", 2), 4: ("s32", 4), 5: ("s64", 8), 6: ("u8", 1), 7: ("u16", 2)},
    **{8: ("u32", 4), 9: ("u64", 8), 10: ("f16", 2), 11: ("f32", 4), 12: ("f64", 8), 15: ("c64", 8), 16: ("bf16", 2)},
    **{18: ("c128", 16), 17: ("token", 0)},
}


@dataclass(frozen=True)
class Array:
    """One array: its type, such as "bf16", and dimensions; how it lies in memory.

    Attributes:
        tiles: the tile that the two minor dimensions are padded to, innermost last; empty where nothing is padded.
        minor_to_major: dimensions from the fastest in memory to the slowest.
        in_hbm: False where it lies in the core's own fast memory.
        is_dynamic: a dimension has only an upper bound.
    """

    type: str
    dimensions: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[int, ...] = ()
    in_hbm: bool = True
    is_dynamic: bool = False
    width: int = 4

    def __str__(self) -> str:
        return f"{self.type}[{','.join(map(str, self.dimensions))}]"

    @property
    def bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.dimensions) * self.width

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in memory, with every tile full."""
        order = self.minor_to_major or tuple(reversed(range(len(self.dimensions))))
        sizes = [self.dimensions[place] for place in order]
        for place, tile in enumerate(reversed(self.tiles)):
            if place < len(sizes):
                sizes[place] = -(-sizes[place] // tile) * tile
        full = math.prod(self.tiles[: max(0, len(self.tiles) - len(sizes))])  # tiles of more axes than it has
        return math.prod(sizes) * full * self.width


@dataclass(frozen=True)
class Operation:
    """One instruction of a program.

    Attributes:
        name: within the program.
        opcode: such as "fusion" or "convolution".
        arrays: what it returns.
        scope: the last part of its op_name that `scopes` wrote, such as "call12"; "" for none.
        op_type: torch's operation, such as "aten::convolution"; "" if unknown.
        source: "file:line" that torch_xla saw, "" if unknown.
        cycles: the compiler's estimate; None where it gives none.
        called: the numbers of the computations it runs, as a fusion does.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    scope: str = ""
    op_type: str = ""
    source: str = ""
    cycles: int | None = None
    called: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A module: the operations of each computation by its number, and which of them is the program itself."""

    computations: dict[int, tuple[Operation, ...]]
    entry: int

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the program itself, each of which may run a computation."""
        return self.computations[self.entry]

    def everywhere(self) -> Iterator[Operation]:
        """Yield the operations of all computations."""
        for operations in self.computations.values():
            yield from operations


def read_program(code: bytes) -> Program:
    """Read an HloModuleProto, or libtpu's HloModuleProtoWithConfig around one."""
    first = next(iter(_fields(code)), (0, b""))
    if first[0] == _WITH_CONFIG_MODULE and any(number == _COMPUTATION for number, _ in _try_fields(first[1])):
        code = first[1]
    entry, computations = 0, {}
    for number, value in _fields(code):
        if number == _ENTRY_ID:
            entry = value
        elif number == _COMPUTATION:
            operations, own = [], 0
            for inner, content in _fields(value):
                if inner == _COMPUTATION_ID:
                    own = content
                elif inner == _INSTRUCTION:
                    operations.append(_operation(content))
            computations[own] = tuple(operations)
    return Program(computations, entry)


def without_sources(code: bytes) -> bytes:
    """Return a module whose operations name their scope alone, and no files and lines: what it computes and no more.

    So a graph is the same graph after an edit elsewhere in a notebook.
    """
    code = b"".join(whole for number, _, whole in _spans(code) if number != _STACK_FRAMES)
    return _rewritten(code, _COMPUTATION, lambda one: _rewritten(one, _INSTRUCTION, _without_source))


def _without_source(instruction: bytes) -> bytes:
    def scope_alone(metadata: bytes) -> bytes:
        return b"".join(whole for number, _, whole in _spans(metadata) if number in (_OP_TYPE, _OP_NAME))

    return _rewritten(instruction, _METADATA, scope_alone)


def _rewritten(message: bytes, wanted: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a message with the content of every field of that number changed."""
    out = bytearray()
    for number, value, whole in _spans(message):
        if number == wanted:
            value = change(value)
            whole = _encoded(number << 3 | 2) + _encoded(len(value)) + value
        out += whole
    return bytes(out)


def _operation(instruction: bytes) -> Operation:
    found: dict = {"name": "", "opcode": "", "arrays": (), "called": ()}
    for number, value in _fields(instruction):
        match number:
            case 1:  # name
                found["name"] = _text(value)
            case 2:  # opcode
                found["opcode"] = _text(value)
            case 3:  # shape
                found["arrays"] = tuple(_arrays(value))
            case 7:  # metadata
                found |= _metadata(value)
            case 38:  # called
                found["called"] += tuple(_integers(value))
            case 43:  # backend_config
                found["cycles"] = _cycles(_text(value))
    return Operation(**found)


def _cycles(config: str) -> int | None:
    if '"estimated_cycles"' not in config:
        return None
    found = json.loads(config)
    place = found.get("window_config", found)
    cycles = place.get("estimated_cycles")
    return None if cycles is None else int(cycles)


def _metadata(value: bytes) -> dict[str, str]:
    found = dict(_fields(value))
    scopes = [part for part in _text(found.get(_OP_NAME, b"")).split("/") if part.startswith("call")]
    scope = scopes[-1].partition(".")[0] if scopes else ""
    file = _text(found.get(_SOURCE_FILE, b""))
    op_type = _text(found.get(_OP_TYPE, b"")).replace("__", "::", 1)
    return {"scope": scope, "op_type": op_type, "source": f"{file}:{found.get(_SOURCE_LINE, 0)}" if file else ""}


def _arrays(shape: bytes) -> Iterator[Array]:
    kind, dimensions, dynamic, parts, layout = 0, [], [], [], {}
    for number, value in _fields(shape):
        match number:
            case 2:  # type
                kind = value
            case 3:  # dimensions
                dimensions += _integers(value)
            case 4:  # tuple
                parts.append(value)
            case 5:  # layout
                layout = _layout(value)
            case 6:  # dynamic
                dynamic += _integers(value)
    if parts:
        for part in parts:
            yield from _arrays(part)
    else:
        name, width = _TYPES.get(kind, (f"type {kind}", 4))
        yield Array(name, tuple(dimensions), width=width, is_dynamic=any(dynamic), **layout)


def _layout(value: bytes) -> dict:
    order, tiles, space = [], [], 0
    for number, content in _fields(value):
        if number == _MINOR_TO_MAJOR:
            order += _integers(content)
        elif number == _TILES and not tiles:  # the first; a second, (2, 1) of bfloat16, packs what the first has
            for inner, sizes in _fields(content):
                tiles += _integers(sizes) if inner == 1 else []
        elif number == _MEMORY_SPACE:
            space = content
    return {"minor_to_major": tuple(order), "tiles": tuple(tiles), "in_hbm": space == 0}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of every field: an int, or the bytes of anything else."""
    return ((number, value) for number, value, _ in _spans(message))


def _spans(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yield (number, value, all its bytes) of every field."""
    at, end = 0, len(message)
    while at < end:
        start = at
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                size, at = _varint(message, at)
            if size is None or at + size > end:
                raise ValueError("these bytes are no protobuf")
            value, at = message[at : at + size], at + size
        yield tag >> 3, value, message[start:at]


def _try_fields(message: int | bytes) -> Iterable[tuple[int, int | bytes]]:
    try:
        return list(_fields(message)) if isinstance(message, bytes) else []
    except (ValueError, IndexError):
        return []


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _integers(value: int | bytes) -> list[int]:
    """Return a repeated integer's numbers, packed or not."""
    if isinstance(value, int):
        return [value]
    numbers, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        numbers.append(number)
    return numbers


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
