"""Read TFRecord files of images and labels, every byte checked, without TensorFlow."""

# Our own reader, because the packages that need no TensorFlow miss damage that the tests hold. Of 136 files with one
# flipped bit, tfrecord 1.14.6 and tfrecord-dataset 0.2.0 read 120 without an error. tfrecords 0.3.1 reads none of them,
# but takes a file that is empty or cut in a length for a whole one, names no record, and does not notice gzip.

import functools
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, SystemFailed, WrongValue
from tpukit.packs.resumable import fact


def read_tfrecords(
    files: str | os.PathLike | Iterable[str | os.PathLike], *, image: str = "image", labels: Iterable[str] = ("target",)
) -> "TFRecords":
    """Read `(image bytes, labels)` of each tf.train.Example in TFRecord files, for `pack`.

    Nothing in a TFRecord file says how many records it holds: one that was cut short between two records cannot be
    distinguished from a whole one. Every other damage raises. Files compressed with gzip are read, too.

    Args:
        files: one file, or several in the order in which to read them.
        image: the feature with the image's bytes as they were encoded, usually a JPEG.
        labels: the features with the labels, integers or floats, all values of each; () for data without labels.
            Kaggle's flowers: `labels=("class",)`.

    Returns:
        An iterable of `(bytes, (L,) float32 ndarray)`; each loop over it reads the files from the start.

    Raises:
        FileNotFoundError: a file is not there.
        OSError: in the loop, a file is damaged, or is no TFRecord file.
        ValueError: there are no files; or, in the loop, a record has no such feature, or one of another type.
    """
    names = (files,) if isinstance(files, str | os.PathLike) else tuple(files)
    if not names:
        raise WrongValue(
            "read_tfrecords got no files", fix="check the pattern, as in sorted(Path(folder).glob('*.tfrec'))"
        )
    if isinstance(labels, str):
        labels = (labels,)
    for name in names:
        if not os.path.isfile(name):
            kind = "is no file" if os.path.exists(name) else "does not exist"
            raise NoSuchFile(
                f"{name} {kind}", fix="pass the paths of the files themselves: sorted(Path(folder).glob('*.tfrec'))"
            )
    return TFRecords(tuple(Path(name) for name in names), image, tuple(labels))


@dataclass(frozen=True)
class TFRecords:
    """The records of some files, as `read_tfrecords` makes it; iterate for `(bytes, (L,) float32 ndarray)`."""

    files: tuple[Path, ...]
    image: str
    labels: tuple[str, ...]

    def facts(self) -> dict:
        """Return what tells these records from others, for the plan of a pack: names and sizes, and the features."""
        files = [f"{file.name} {file.stat().st_size}" for file in self.files]
        return {
            "files": fact(f"{len(files)} TFRecord files, {files[0]} to {files[-1]} bytes", "\0".join(files).encode()),
            "features": fact(f"{self.image}, {', '.join(self.labels)}", repr((self.image, self.labels)).encode()),
        }

    def __iter__(self) -> Iterator[tuple]:
        import numpy

        width = None
        for file in self.files:
            for number, record in enumerate(records(file)):
                where = f"record {number} of {file}"
                features = _features(record, where)
                values = [value for name in self.labels for value in _numbers(features, name, where)]
                if width is not None and len(values) != width:
                    raise WrongValue(
                        f"{where} has {len(values)} label values where those before have {width}",
                        found=_shown(features),
                        fix="name features of one length: labels=(...)",
                    )
                width = len(values)
                yield _image(features, self.image, where), numpy.array(values, "float32")


def records(file: str | os.PathLike) -> Iterator[bytes]:
    """Yield the payload of every record in a TFRecord file; OSError where one of its two checksums does not fit."""
    with open(file, "rb") as plain:
        # A record of some 550 KB may begin like gzip: then its checksum fits, which gzip's does not.
        start = plain.read(12)
        plain.seek(0)
        zipped = start[:3] == b"\x1f\x8b\x08" and not _fits(start[:8], start[8:])
        if not start:
            raise _damaged(f"{file} is empty", "0 bytes")
        number, offset = 0, 0
        with gzip.GzipFile(fileobj=plain) if zipped else plain as stream:
            while True:
                try:
                    head = stream.read(12)
                    if not head:
                        return
                    length = _length(head, file, number, offset)
                    data, check = stream.read(length), stream.read(4)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    what = f"{file} is damaged: its gzip stream breaks off in record {number}"
                    raise _damaged(what, str(error)) from error
                found, begin = len(data) + len(check), offset + 12
                if found < length + 4:
                    what = f"{file} is cut short in record {number}"
                    raise _damaged(what, f"{found:,} of {length + 4:,} bytes after byte {begin:,}")
                if not _fits(data, check):
                    what = f"record {number} of {file} is damaged"
                    raise _damaged(what, f"the checksum of its {length:,} bytes from byte {begin:,} on does not fit")
                yield data
                number, offset = number + 1, offset + length + 16


def _length(head: bytes, file, number: int, offset: int) -> int:
    """Return the length of a record from the 12 bytes that it begins with."""
    if len(head) < 12:
        what = f"{file} is cut short in record {number}"
        raise _damaged(what, f"{len(head)} bytes at byte {offset:,}, where its length and a checksum take 12")
    if _fits(head[:8], head[8:]):
        return int.from_bytes(head[:8], "little")
    if number == 0:
        what = f"{file} is no TFRecord file, or is damaged at its start"
        raise _damaged(what, f"{head!r}, which begin no record: the checksum of its length does not fit")
    what = f"{file} is damaged where record {number} begins, at byte {offset:,}"
    raise _damaged(what, "the checksum of its length does not fit")


def _fits(data: bytes, check: bytes) -> bool:
    """Tell whether the four bytes are the masked CRC-32C of the data.

    Masked, which TFRecord has from LevelDB's log: checksums over data that holds checksums would be worth less.
    """
    import google_crc32c

    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked.to_bytes(4, "little") == check


def _damaged(what: str, found: str) -> OSError:
    return SystemFailed(f"{what}", found=found, fix="copy or download this file again, or leave it out")


def _features(record: bytes, where: str):
    """Parse a record and return its features: name to what tf.train.Feature holds."""
    from google.protobuf.message import DecodeError

    try:
        return _example().FromString(record).features.feature
    except DecodeError as error:
        raise WrongValue(
            f"{where} is no tf.train.Example",
            found=f"{len(record):,} bytes that begin {record[:12]!r}",
            fix="leave this file out; only examples with an image and its labels can be packed",
        ) from error


def _feature(features, name: str, where: str, argument: str) -> tuple:
    """Return the kind of a feature ("bytes_list", "float_list", "int64_list") and its values."""
    kind = features[name].WhichOneof("kind") if name in features else None
    if kind is None:
        raise WrongValue(
            f"{where} has no feature {name!r}",
            found=_shown(features),
            fix=f"read_tfrecords(files, {argument}) with a name that is there",
        )
    return kind, getattr(features[name], kind).value


def _image(features, name: str, where: str) -> bytes:
    kind, values = _feature(features, name, where, "image=...")
    if kind != "bytes_list" or len(values) != 1 or not values[0]:
        raise WrongValue(
            f"feature {name!r} of {where} holds no image: one string of bytes is needed",
            found=_shown(features),
            fix="read_tfrecords(files, image=...) with the feature that holds the encoded image",
        )
    return values[0]


def _numbers(features, name: str, where: str) -> list:
    kind, values = _feature(features, name, where, "labels=(...)")
    if kind == "bytes_list":
        raise WrongValue(
            f"feature {name!r} of {where} holds bytes, and labels are numbers",
            found=_shown(features),
            fix="read_tfrecords(files, labels=(...)) with features of integers or floats",
        )
    # Labels are stored as float32, which holds every integer up to here; an identifier would come out as another.
    if kind == "int64_list" and any(abs(value) > 2**24 for value in values):
        raise WrongValue(
            f"feature {name!r} of {where} is too large for a label, which is a float32",
            found=f"{max(values, key=abs)}, beyond 2**24",
            fix=f"leave {name!r} out of labels=(...)",
        )
    return list(values)


def _shown(features) -> str:
    """List features by name with what they hold, as in `class: int64 (1), image: bytes (1)`."""
    kinds = {name: (features[name].WhichOneof("kind") or "nothing") for name in sorted(features)}
    parts = [
        f"{name}: {kind.removesuffix('_list')} ({len(getattr(features[name], kind).value) if '_' in kind else 0})"
        for name, kind in kinds.items()
    ]
    return ", ".join(parts) or "no feature at all"


# tf.train.Example as protobuf describes messages; only the numbers and types matter for reading.
_EXAMPLE = """
name: "example.proto" package: "tf" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".tf.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".tf.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".tf.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tf.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tf.Feature" } } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tf.Features" } }
"""


@functools.cache
def _example() -> type:
    """Make the class of tf.train.Example, in a pool of its own: TensorFlow may bring messages of the same name."""
    from google.protobuf import descriptor_pb2, message_factory, text_format

    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    return message_factory.GetMessages([file])["tf.Example"]
