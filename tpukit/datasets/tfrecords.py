"""Read TFRecord files of images and labels, with every byte checked, without TensorFlow.

A file is a sequence of records without a header or an end mark:

    length      8 bytes, little endian
    checksum    4 bytes, of the length
    payload     `length` bytes, a tf.train.Example: a dict of features
    checksum    4 bytes, of the payload
"""

# tpukit has its own reader, because the packages that need no TensorFlow do not detect all damage.
# Of 136 files with one flipped bit, tfrecord 1.14.6 and tfrecord-dataset 0.2.0 read 120 without an
# error. tfrecords 0.3.1 reports all 136, but it accepts a file that is empty or that ends inside a
# length, its errors name no record, and it does not support gzip.

import functools
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tpukit.datasets.resumable import fact
from tpukit.essentials.display import InvalidValueError, PathNotFoundError, SystemFailureError

_CHECKSUM = 4  # bytes
_HEAD = 8 + _CHECKSUM  # bytes: the length and its checksum
_EXACT = 2**24  # float32 is exact for every integer up to this one


def read_tfrecords(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    image: str = "image",
    labels: Iterable[str] = ("target",),
) -> "TFRecords":
    """Read `(image bytes, labels)` of each tf.train.Example in TFRecord files, for `pack`.

    TFRecord files do not store the number of their records: a file that was truncated between two
    records looks like a complete file. Any other damage raises an error. Files compressed with gzip
    are supported.

    Args:
        files: one file, or several in the order in which to read them.
        image: the feature with the encoded image, usually a JPEG.
        labels: the features with the labels, integers or floats; all their values become labels.
            () for data without labels. For Kaggle's flowers, `labels=("class",)`. Or one feature
            with the name of the class, such as `labels="image/class/text"`: `pack(..., classes=)`
            turns names into numbers.

    Returns:
        An iterable of `(bytes, (L,) float32 ndarray)` or `(bytes, word)`; each loop over it reads
        the files from the start.

    Raises:
        FileNotFoundError: a file does not exist.
        OSError: in the loop, a file is damaged, or is not a TFRecord file.
        ValueError: `files` is empty; or, in the loop, a record lacks a feature, or the feature has
            another type.
    """
    names = (files,) if isinstance(files, str | os.PathLike) else tuple(files)
    if not names:
        raise InvalidValueError(
            "read_tfrecords got no files",
            fix="check the pattern, as in sorted(Path(folder).glob('*.tfrec'))",
        )
    if isinstance(labels, str):
        labels = (labels,)
    for name in names:
        if not os.path.isfile(name):
            kind = "is no file" if os.path.exists(name) else "does not exist"
            raise PathNotFoundError(
                f"{name} {kind}",
                fix="pass the paths of the files themselves: sorted(Path(folder).glob('*.tfrec'))",
            )
    return TFRecords(tuple(Path(name) for name in names), image, labels=tuple(labels))


@dataclass(frozen=True)
class TFRecords:
    """The records of some files, made by `read_tfrecords`.

    Iteration yields (bytes of the image, labels). The labels are (L,) float32, or a word as str.
    """

    files: tuple[Path, ...]
    image: str
    labels: tuple[str, ...]

    def facts(self) -> dict:
        """Return the files and features, by which `pack` recognises the same records."""
        files = [f"{file.name} {file.stat().st_size}" for file in self.files]
        ends = f"{files[0]} to {files[-1]}"  # name and size of the first and the last
        summary = f"{len(files)} TFRecord files, {ends} bytes"
        features = f"{self.image}, {', '.join(self.labels)}"
        return {
            "files": fact(summary, "\0".join(files).encode()),
            "features": fact(features, repr((self.image, self.labels)).encode()),
        }

    def column(self, name: str) -> list:
        """Read all files, and return the value of one feature per record, a word or number.

        `pack(..., groups="patient_id")` calls this method.

        Raises:
            OSError: a file is damaged.
            ValueError: a record lacks the feature, or has several values.
        """
        column = []
        for file in self.files:
            for number, record in enumerate(records(file)):
                where = f"record {number} of {file}"
                column.append(_group(_features(record, where), name, where))
        return column

    def __iter__(self) -> Iterator[tuple]:
        import numpy

        first_form = None  # "a word" or "3 label values", which all records must share
        for file in self.files:
            for number, record in enumerate(records(file)):
                where = f"record {number} of {file}"
                features = _features(record, where)
                values = []
                for name in self.labels:
                    values += _values(features, name, where)
                has_word = any(isinstance(value, str) for value in values)
                if has_word and len(values) > 1:
                    raise InvalidValueError(
                        f"{where} has several labels, one of which is a word",
                        found=_listed(features),
                        fix="pass either the feature with the word, or features with numbers: "
                        "read_tfrecords(files, labels=(...))",
                    )
                form = "a word" if has_word else f"{len(values)} label values"
                if first_form is not None and form != first_form:
                    raise InvalidValueError(
                        f"{where} has {form} where earlier records have {first_form}",
                        found=_listed(features),
                        fix="choose features that have the same number of values in all records: "
                        "labels=(...)",
                    )
                first_form = form
                image = _image(features, self.image, where)
                yield image, values[0] if has_word else numpy.array(values, "float32")


class _Position(NamedTuple):
    """The position of a record, for messages."""

    file: str | os.PathLike
    number: int
    offset: int  # the byte of the file at which the record begins


def records(file: str | os.PathLike) -> Iterator[bytes]:
    """Yield the payload of every record in a TFRecord file.

    Raises:
        OSError: the file is empty, is truncated, or a checksum does not match.
    """
    with open(file, "rb") as plain:
        # Compressed files often have the same ending as others, so their first bytes decide.
        start = plain.read(_HEAD)
        plain.seek(0)
        stream = gzip.GzipFile(fileobj=plain) if _is_gzip(start) else plain
        with stream:
            number = 0
            offset = 0
            while True:
                data = _read_record(stream, _Position(file, number, offset))
                if data is None and number == 0:
                    raise _damaged(f"{file} is empty", "0 bytes")
                if data is None:
                    return
                yield data
                number += 1
                offset += _HEAD + len(data) + _CHECKSUM


def _is_gzip(start: bytes) -> bool:
    """Return whether a file with these first bytes is compressed with gzip.

    The length of a record of about 550 KB has the same first bytes as a gzip file. But in a
    TFRecord file the length is followed by its checksum, and in a gzip file it is not.
    """
    return start[:3] == b"\x1f\x8b\x08" and not _fits(start[:8], start[8:])


def _read_record(stream: BinaryIO, position: _Position) -> bytes | None:
    """Return the payload of the next record, checked; None at the end of the file."""
    file = position.file
    number = position.number
    try:
        head = stream.read(_HEAD)
        if not head:
            return None
        length = _length(head, position)
        data = stream.read(length)
        check = stream.read(_CHECKSUM)
    # All the errors of Python's gzip for a stream that is damaged or ends early.
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"{file} is damaged: its gzip stream breaks off in record {number}"
        raise _damaged(problem, str(error)) from error
    begin = position.offset + _HEAD
    found = len(data) + len(check)
    expected = length + _CHECKSUM
    if found < expected:
        evidence = f"{found:,} of {expected:,} bytes after byte {begin:,}"
        raise _damaged(f"{file} is cut short in record {number}", evidence)
    if not _fits(data, check):
        evidence = f"the checksum of its {length:,} bytes from byte {begin:,} on does not match"
        raise _damaged(f"record {number} of {file} is damaged", evidence)
    return data


def _length(head: bytes, position: _Position) -> int:
    """Return the length of a record's payload from the record's first 12 bytes, checked."""
    file, number, offset = position
    if len(head) < _HEAD:
        evidence = f"{len(head)} bytes at byte {offset:,}, where its length and a checksum take 12"
        raise _damaged(f"{file} is cut short in record {number}", evidence)
    if _fits(head[:8], head[8:]):
        return int.from_bytes(head[:8], "little")
    # A wrong checksum in the first record may also mean that the file is of another kind.
    if number > 0:
        problem = f"{file} is damaged where record {number} begins, at byte {offset:,}"
        raise _damaged(problem, "the checksum of the record's length does not match")
    evidence = f"{head!r} is not the start of a record: the checksum of the length does not match"
    raise _damaged(f"{file} is no TFRecord file, or is damaged at its start", evidence)


def _fits(data: bytes, check: bytes) -> bool:
    """Return whether four bytes are the masked CRC-32C of the data.

    TFRecord uses the mask of LevelDB's log format, because a CRC of data that contains its own CRC
    would be weak.
    """
    import google_crc32c

    crc = google_crc32c.value(data)
    rotated = crc >> 15 | crc << 17
    masked = (rotated + 0xA282EAD8) & 0xFFFFFFFF
    return masked.to_bytes(4, "little") == check


def _damaged(problem: str, found: str) -> OSError:
    return SystemFailureError(
        problem,
        found=found,
        fix="copy or download this file again, or leave it out",
    )


def _features(record: bytes, where: str):
    """Parse a record; return its features, a mapping from names to tf.train.Feature."""
    from google.protobuf.message import DecodeError

    try:
        return _example().FromString(record).features.feature
    except DecodeError as error:
        raise InvalidValueError(
            f"{where} is not a tf.train.Example",
            found=f"{len(record):,} bytes that begin {record[:12]!r}",
            fix="leave this file out; only examples with an image and its labels can be packed",
        ) from error


class _Feature(NamedTuple):
    """A feature of a record: its kind, and its values."""

    kind: str  # "bytes_list", "float_list" or "int64_list"
    values: list


def _feature(features, name: str, where: str, *, call: str) -> _Feature:
    """Return a feature; raise if the record lacks it."""
    kind = features[name].WhichOneof("kind") if name in features else None
    if kind is None:
        raise InvalidValueError(
            f"{where} has no feature {name!r}",
            found=_listed(features),
            fix=f"{call} with one of these names",
        )
    return _Feature(kind, getattr(features[name], kind).value)


def _image(features, name: str, where: str) -> bytes:
    kind, values = _feature(features, name, where, call="read_tfrecords(files, image=...)")
    if kind != "bytes_list" or len(values) != 1 or not values[0]:
        raise InvalidValueError(
            f"feature {name!r} of {where} holds no image: one string of bytes is needed",
            found=_listed(features),
            fix="read_tfrecords(files, image=...) with the feature that holds the encoded image",
        )
    return values[0]


def _values(features, name: str, where: str) -> list:
    """Return the values of a label, numbers or words; ValueError for integers above 2**24."""
    kind, values = _feature(features, name, where, call="read_tfrecords(files, labels=(...))")
    if kind == "bytes_list":
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise InvalidValueError(
                f"feature {name!r} of {where} holds bytes, and labels are numbers or words",
                found=_listed(features),
                fix="read_tfrecords(files, labels=(...)) with features of numbers or words",
            ) from error
    # float32 would change a larger integer, which is usually an identifier.
    if kind == "int64_list" and any(abs(value) > _EXACT for value in values):
        raise InvalidValueError(
            f"feature {name!r} of {where} is too large for a label, which is a float32",
            found=f"{max(values, key=abs)}, beyond 2**24",
            fix=f"leave {name!r} out of labels=(...)",
        )
    return list(values)


def _group(features, name: str, where: str) -> str | int | float:
    """Return the group of an image, a single word or number."""
    _, values = _feature(features, name, where, call="pack(..., groups=...)")
    try:
        (value,) = values
        return value.decode() if isinstance(value, bytes) else value
    except ValueError as error:  # several values, or bytes that are not UTF-8
        raise InvalidValueError(
            f"feature {name!r} of {where} must have exactly one word or number, because it names "
            "the group of the image",
            found=_listed(features),
            fix="pack(..., groups=...) with another feature",
        ) from error


def _listed(features) -> str:
    """List features with their kind and number of values: `class: int64 (1), image: bytes (1)`."""
    parts = []
    for name in sorted(features):
        kind = features[name].WhichOneof("kind")
        if kind is None:
            parts.append(f"{name}: nothing (0)")
        else:
            count = len(getattr(features[name], kind).value)
            parts.append(f"{name}: {kind.removesuffix('_list')} ({count})")
    return ", ".join(parts) or "no feature at all"


# tf.train.Example as a FileDescriptorProto in protobuf's text format. Only the field numbers and
# types matter for parsing. Source: tensorflow/core/example/example.proto and feature.proto.
_EXAMPLE = """
name: "example.proto" package: "tf" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1
    type: TYPE_MESSAGE type_name: ".tf.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2
    type: TYPE_MESSAGE type_name: ".tf.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3
    type: TYPE_MESSAGE type_name: ".tf.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED
    type: TYPE_MESSAGE type_name: ".tf.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tf.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tf.Features" } }
"""


@functools.cache
def _example() -> type:
    """Make the message class of tf.train.Example in a new descriptor pool.

    In the default pool the name would clash with TensorFlow's own messages.
    """
    from google.protobuf import descriptor_pb2, message_factory, text_format

    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    return message_factory.GetMessages([file])["tf.Example"]
