"""TFRecord files, written without TensorFlow and without the reader that is tested."""

import struct

import google_crc32c
from google.protobuf.internal import encoder as wire


def masked(data: bytes) -> bytes:
    value = google_crc32c.value(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32)


def framed(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + masked(length) + payload + masked(payload)


def varint(value: int) -> bytes:
    out = []
    wire._VarintEncoder()(out.append, value % 2**64)
    return b"".join(out)


def field(number: int, data: bytes) -> bytes:
    return wire.TagBytes(number, 2) + varint(len(data)) + data


def feature(value) -> bytes:
    values = value if isinstance(value, list) else [value]
    if all(isinstance(each, bytes) for each in values):
        return field(1, b"".join(field(1, each) for each in values))
    if all(isinstance(each, float) for each in values):
        return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
    return field(3, field(1, b"".join(varint(each) for each in values)))


def example(**features) -> bytes:
    entries = b""
    for name, value in features.items():
        entries += field(1, field(1, name.encode()) + field(2, feature(value)))
    return field(1, entries)


def write(file, *payloads: bytes):
    file.write_bytes(b"".join(map(framed, payloads)))
    return file
