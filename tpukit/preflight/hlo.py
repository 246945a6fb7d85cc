"""Read HLO modules, the programs that torch_xla sends to the compiler and that libtpu returns.

An HLO module is a protobuf message. A message is a sequence of fields, each with a number:

    module         3 computation, 3 computation, ..., 6 id of the entry computation
    computation    2 instruction, 2 instruction, ..., 5 id of the computation
    instruction    1 name, 2 opcode, 3 shape, 7 metadata, ...

This module reads the wire format itself. `google.protobuf` moves fields that it does not know to
the end of a message (seen with version 7.36). `without_sources` must not change their order,
because the key of a compiled program in the cache is a digest of these bytes (`program_key.c`).

The numbers of the fields are those of xla/service/hlo.proto and xla/xla_data.proto (OpenXLA), which
never reuses a number.
"""

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# HloModuleProtoWithConfig, in which libtpu returns a module.
_WRAPPED_MODULE = 1

# HloModuleProto.
_COMPUTATION = 3
_ENTRY_ID = 6
_STACK_FRAMES = 17

# HloComputationProto.
_INSTRUCTION = 2
_COMPUTATION_ID = 5

# HloInstructionProto.
_NAME = 1
_OPCODE = 2
_SHAPE = 3
_METADATA = 7
_WINDOW = 15
_CONVOLUTION_AXES = 16
_DOT_AXES = 30
_ID = 35
_OPERANDS = 36
_CALLED = 38
_BACKEND_CONFIG = 43
_FEATURE_GROUPS = 50
_BATCH_GROUPS = 61

# Window and WindowDimension.
_WINDOW_DIMENSIONS = 1
_WINDOW_SIZE = 1
_STRIDE = 2
_PADDING_LOW = 3
_WINDOW_DILATION = 5
_INPUT_DILATION = 6

# ConvolutionDimensionNumbers and DotDimensionNumbers.
_INPUT_BATCH = 7
_INPUT_FEATURE = 8
_OUTPUT_FEATURE = 10
_INPUT_SPATIAL = 11
_OUTPUT_SPATIAL = 12
_LEFT_SUMMED = 1

# OpMetadata.
_OP_TYPE = 1
_OP_NAME = 2
_SOURCE_FILE = 3
_SOURCE_LINE = 4

# ShapeProto.
_ELEMENT_TYPE = 2
_DIMENSIONS = 3
_TUPLE_SHAPE = 4
_LAYOUT = 5
_IS_DYNAMIC = 6

# LayoutProto and TileProto.
_MINOR_TO_MAJOR = 1
_TILE = 6
_MEMORY_SPACE = 8
_TILE_DIMENSIONS = 1

# Kinds of fields in the wire format, and the bytes of those that have a fixed length.
_VARINT = 0
_LENGTH_DELIMITED = 2
_FIXED_LENGTHS = {1: 8, 5: 4}


# Operations that read and write no data.
_WITHOUT_TRAFFIC = ("bitcast", "constant", "get-tuple-element", "parameter", "tuple")

# The names of PrimitiveType in order; "" is a value that arrays do not have.
_TYPE_NAMES = (
    *("", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"),
    *("", "", "c64", "bf16", "token", "c128"),
)


@dataclass(frozen=True)
class Array:
    """An array of a program: its type, such as "bf16", its dimensions, and its layout in memory.

    Attributes:
        minor_to_major: the dimensions from the one that changes fastest in memory to the slowest.
        tiles: the sizes of a tile; the last size is for the dimension that changes fastest. A
            dimension is padded to a multiple of its tile size. Empty without padding.
        in_hbm: False if the array is in the core's on-chip memory.
        is_dynamic: True if a dimension has only an upper bound.
        width: the bytes per element.
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
        """The bytes of all elements, without padding."""
        return math.prod(self.dimensions) * self.width

    @property
    def padded_bytes(self) -> int:
        """The bytes in memory with padding: f32[8,64] in tiles of (8, 128) takes 8 * 128 * 4."""
        order = self.minor_to_major or tuple(reversed(range(len(self.dimensions))))
        sizes = [self.dimensions[axis] for axis in order]
        for axis, tile in zip(range(len(sizes)), reversed(self.tiles), strict=False):
            sizes[axis] = math.ceil(sizes[axis] / tile) * tile
        # A tile may have more axes than the array, which is then padded to them.
        axes_of_tile_alone = max(0, len(self.tiles) - len(sizes))
        elements = math.prod(sizes) * math.prod(self.tiles[:axes_of_tile_alone])
        return elements * self.width


@dataclass(frozen=True)
class Operation:
    """An instruction of a program.

    Attributes:
        name: the name, unique in the program.
        opcode: the opcode, such as "fusion" or "convolution".
        arrays: the results.
        scope: the scope that `scopes` wrote into the op_name, such as "call12"; if there are
            several, the innermost; "" if there is none.
        op_type: the operation of torch, such as "aten::convolution"; "" if unknown.
        source: "file:line" of the Python code, as torch_xla recorded it; "" if unknown.
        cycles: the compiler's estimate of cycles; None if there is none.
        called: the numbers of the computations that the operation runs, as a fusion does.
        id: the number of the operation in its computation.
        operands: the ids of the operations whose results this operation reads.
        flops: the FLOPs of the operation if it is a convolution or a dot, without those of
            `called`; else 0.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    scope: str = ""
    op_type: str = ""
    source: str = ""
    cycles: int | None = None
    called: tuple[int, ...] = ()
    id: int = 0
    operands: tuple[int, ...] = ()
    flops: int = 0


@dataclass(frozen=True)
class Program:
    """An HLO module.

    Attributes:
        computations: the operations of each computation, by the computation's number.
        entry: the number of the entry computation, with which the program starts.
    """

    computations: dict[int, tuple[Operation, ...]]
    entry: int

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the entry computation, some of which run other computations."""
        return self.computations[self.entry]

    @functools.cached_property
    def _by_id(self) -> dict[int, Operation]:
        return {operation.id: operation for operation in self.operations}

    def flops(self, operation: Operation) -> int:
        """Return the FLOPs of all convolutions and dots in an operation, also inside a fusion."""
        total = operation.flops
        for number in operation.called:
            for part in self.computations.get(number, ()):
                total += self.flops(part)
        return total

    def hbm_bytes(self, operation: Operation) -> int:
        """Return the bytes in HBM that an operation of `operations` reads and writes.

        The whole of each operand counts, even if the operation reads only a slice of it.
        """
        if operation.opcode in _WITHOUT_TRAFFIC or operation.opcode.endswith("-done"):
            return 0
        arrays = list(operation.arrays)
        if operation.opcode.endswith("-start"):
            arrays = arrays[:1]  # of copy-start: the others are the operand once more, and a flag
        for number in dict.fromkeys(operation.operands):
            arrays += self._by_id[number].arrays
        return sum(array.bytes for array in arrays if array.in_hbm)

    def everywhere(self) -> Iterator[Operation]:
        """Yield the operations of all computations."""
        for operations in self.computations.values():
            yield from operations


def read_program(code: bytes) -> Program:
    """Read a serialised HloModuleProto, alone or inside of libtpu's HloModuleProtoWithConfig.

    Raises:
        ValueError, IndexError: the bytes are not protobuf.
    """
    module = Message(_unwrapped(code))
    computations = {}
    for content in module.every(_COMPUTATION):
        computation = Message(content)
        instructions = list(map(Message, computation.every(_INSTRUCTION)))
        arrays = {}
        for fields in instructions:
            arrays[fields.last(_ID, default=0)] = list(_arrays(fields.last(_SHAPE, default=None)))
        operations = tuple(_operation(fields, arrays) for fields in instructions)
        computations[computation.last(_COMPUTATION_ID, default=0)] = operations
    return Program(computations, entry=module.last(_ENTRY_ID, default=0))


def _unwrapped(code: bytes) -> bytes:
    """Return the HloModuleProto inside an HloModuleProtoWithConfig; return another `code` as it is.

    Field 1 of an HloModuleProtoWithConfig is the module. Field 1 of a plain module is its name,
    which is not a message with computations.
    """
    first = next(_fields(code), None)
    if first is None or first.number != _WRAPPED_MODULE or not isinstance(first.value, bytes):
        return code
    try:
        has_computations = bool(Message(first.value).every(_COMPUTATION))
    except (ValueError, IndexError):
        return code
    return first.value if has_computations else code


def _operation(fields: "Message", arrays: dict[int, list[Array]]) -> Operation:
    """Return an instruction as an `Operation`.

    Args:
        fields: the HloInstructionProto.
        arrays: the results of each instruction of the computation, by the instruction's id.
    """
    number = fields.last(_ID, default=0)
    return Operation(
        name=fields.text(_NAME),
        opcode=fields.text(_OPCODE),
        arrays=tuple(arrays[number]),
        id=number,
        operands=fields.integers(_OPERANDS),
        flops=_flops(fields, arrays),
        cycles=_cycles(fields.text(_BACKEND_CONFIG)),
        called=fields.integers(_CALLED),
        **_origin(fields.last(_METADATA, default=b"")),
    )


def _flops(fields: "Message", arrays: dict[int, list[Array]]) -> int:
    """Return the FLOPs of a convolution or a dot, as XLA's HloCostAnalysis counts them."""
    opcode = fields.text(_OPCODE)
    if opcode not in ("convolution", "dot"):
        return 0
    left, right = (arrays[number][0].dimensions for number in fields.integers(_OPERANDS)[:2])
    (result,) = arrays[fields.last(_ID, default=0)]
    # Each number of the result is a sum of products: a multiplication and an addition per product.
    if opcode == "dot":
        axes = Message(fields.last(_DOT_AXES, default=b""))
        summed = math.prod(left[axis] for axis in axes.integers(_LEFT_SUMMED))
        return 2 * math.prod(result.dimensions) * summed
    # Of a convolution, products with the padding do not count. So the places of the window are
    # counted along each axis.
    axes = Message(fields.last(_CONVOLUTION_AXES, default=b""))
    window = Message(fields.last(_WINDOW, default=b"")).every(_WINDOW_DIMENSIONS)
    places = 1
    spatial = zip(
        window,
        axes.integers(_INPUT_SPATIAL),
        axes.integers(_OUTPUT_SPATIAL),
        strict=True,
    )
    for dimension, input_axis, output_axis in spatial:
        places *= _window_places(dimension, left[input_axis], result.dimensions[output_axis])
    batch = left[axes.last(_INPUT_BATCH, default=0)] // fields.last(_BATCH_GROUPS, default=1)
    inputs = left[axes.last(_INPUT_FEATURE, default=0)] // fields.last(_FEATURE_GROUPS, default=1)
    outputs = result.dimensions[axes.last(_OUTPUT_FEATURE, default=0)]
    return 2 * batch * inputs * outputs * places


def _window_places(dimension: bytes, input_size: int, output_size: int) -> int:
    """Return the number of multiplications of a convolution along one axis.

    The window moves over the input. At each of its positions, every window element that is over an
    input element counts as one multiplication. Padding and the zeros between the elements of a
    dilated input do not count.

    Args:
        dimension: a WindowDimension.
        input_size, output_size: the sizes of input and output along this axis.
    """
    fields = Message(dimension)
    stride = fields.last(_STRIDE, default=1)
    dilation = fields.last(_WINDOW_DILATION, default=1)
    input_dilation = fields.last(_INPUT_DILATION, default=1)
    low = fields.last(_PADDING_LOW, default=0)
    if low >= 2**63:  # protobuf writes a negative number as a 64-bit two's complement
        low -= 2**64
    end = (input_size - 1) * input_dilation + 1
    places = 0
    for element in range(fields.last(_WINDOW_SIZE, default=1)):
        first = element * dilation - low
        reached = range(first, first + stride * output_size, stride)
        places += sum(1 for place in reached if 0 <= place < end and not place % input_dilation)
    return places


def _cycles(config: str) -> int | None:
    """Return the estimate of cycles in an instruction's backend config, a JSON text of libtpu."""
    if '"estimated_cycles"' not in config:
        return None
    found = json.loads(config)
    cycles = found.get("window_config", found).get("estimated_cycles")
    return None if cycles is None else int(cycles)


def _origin(metadata: bytes) -> dict[str, str]:
    """Return the fields scope, op_type and source of an `Operation`, from its OpMetadata."""
    fields = Message(metadata)
    scopes = [part for part in fields.text(_OP_NAME).split("/") if part.startswith("call")]
    innermost = scopes[-1] if scopes else ""
    file = fields.text(_SOURCE_FILE)
    line = fields.last(_SOURCE_LINE, default=0)
    return {
        "scope": innermost.partition(".")[0],
        "op_type": fields.text(_OP_TYPE).replace("__", "::", 1),
        "source": f"{file}:{line}" if file else "",
    }


def _arrays(shape: bytes | None) -> Iterator[Array]:
    """Yield the array of a shape, or all arrays of a tuple, which may contain tuples."""
    if shape is None:
        return
    fields = Message(shape)
    parts = fields.every(_TUPLE_SHAPE)
    for part in parts:
        yield from _arrays(part)
    if parts:
        return
    name = _type_name(fields.last(_ELEMENT_TYPE, default=0))
    layout = Message(fields.last(_LAYOUT, default=b""))
    tiles = [Message(tile).integers(_TILE_DIMENSIONS) for tile in layout.every(_TILE)]
    yield Array(
        name,
        fields.integers(_DIMENSIONS),
        minor_to_major=layout.integers(_MINOR_TO_MAJOR),
        # Only the first tile pads. A second tile, such as (2, 1) for bfloat16, reorders elements
        # inside of the first.
        tiles=tiles[0] if tiles else (),
        in_hbm=layout.last(_MEMORY_SPACE, default=0) == 0,
        is_dynamic=any(fields.integers(_IS_DYNAMIC)),
        width=_width(name),
    )


def _type_name(number: int) -> str:
    name = _TYPE_NAMES[number] if number < len(_TYPE_NAMES) else ""
    return name or f"type {number}"


@functools.cache
def _width(name: str) -> int:
    """Return the bytes of an element; 4 if the type is unknown."""
    if name in ("pred", "token"):
        return int(name == "pred")
    bits = re.fullmatch("[a-z]+([0-9]+)", name)
    return int(bits[1]) // 8 if bits else 4


def without_sources(code: bytes) -> bytes:
    """Return a module without the files and lines of its operations.

    So the digest of a step's graph does not change when other lines of a notebook are edited.
    """
    kept = [field.whole for field in _fields(code) if field.number != _STACK_FRAMES]
    return _rewritten(b"".join(kept), _COMPUTATION, _computation_without_sources)


def _computation_without_sources(computation: bytes) -> bytes:
    return _rewritten(computation, _INSTRUCTION, _instruction_without_source)


def _instruction_without_source(instruction: bytes) -> bytes:
    return _rewritten(instruction, _METADATA, _metadata_without_source)


def _metadata_without_source(metadata: bytes) -> bytes:
    kept = [field.whole for field in _fields(metadata) if field.number in (_OP_TYPE, _OP_NAME)]
    return b"".join(kept)


def _rewritten(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a message after applying `change` to the content of every field with this number."""
    out = bytearray()
    for field in _fields(message):
        if field.number == number:
            content = change(field.value)
            tag = number << 3 | _LENGTH_DELIMITED
            out += _encoded_varint(tag) + _encoded_varint(len(content)) + content
        else:
            out += field.whole
    return bytes(out)


class Message:
    """A protobuf message: the values of each field, by the number of the field.

    Raises:
        ValueError, IndexError: the bytes are not protobuf.
    """

    def __init__(self, code: bytes) -> None:
        self._values: dict[int, list] = defaultdict(list)
        for field in _fields(code):
            self._values[field.number].append(field.value)

    def every(self, number: int) -> list:
        """Return all values of a field, in order."""
        return self._values.get(number, [])

    def last(self, number: int, *, default):
        """Return the value of a field that is not repeated, or `default`.

        If the message has several values, the last counts.
        """
        return self.every(number)[-1] if number in self._values else default

    def text(self, number: int) -> str:
        """Return the value of a text field; "" if the message has none."""
        return self.last(number, default=b"").decode(errors="replace")

    def integers(self, number: int) -> tuple[int, ...]:
        """Return the numbers of a repeated integer field, packed or not."""
        numbers = []
        for value in self.every(number):
            if isinstance(value, int):
                numbers.append(value)
            else:
                numbers += _unpacked(value)
        return tuple(numbers)


class _Field(NamedTuple):
    number: int
    value: int | bytes  # the integer if the field is a varint; else the bytes of its content
    whole: bytes  # all bytes of the field, with its tag


def _fields(message: bytes) -> Iterator[_Field]:
    """Yield the fields of a message: https://protobuf.dev/programming-guides/encoding/"""
    at = 0
    while at < len(message):
        start = at
        # A tag is the number of the field, and three bits for its kind.
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
        else:
            if kind == _LENGTH_DELIMITED:
                length, at = _varint(message, at)
            else:
                length = _FIXED_LENGTHS.get(kind)
            if length is None or at + length > len(message):
                raise ValueError("these bytes are not protobuf")
            value = message[at : at + length]
            at += length
        yield _Field(tag >> 3, value, message[start:at])


def _unpacked(content: bytes) -> list[int]:
    numbers = []
    at = 0
    while at < len(content):
        number, at = _varint(content, at)
        numbers.append(number)
    return numbers


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the integer that begins at the offset `at`, and the offset after its last byte.

    Each byte has 7 bits of the number, the lowest bits first. Bit 7 is set if another byte follows.
    """
    value = 0
    shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _encoded_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
