"""Shards: array_record files in which every record begins with its own row of the index, and so proves which it is."""

import errno
import functools
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tpukit.essentials.show import NotInstalled, SystemFailed

# One record a chunk, each with its own hash. JPEGs do not compress, and compressed pixels read at half the speed.
_WRITER = "group_size:1,uncompressed"
_READER = "readahead_buffer_size:0,max_parallelism:0"  # random access: read nothing that was not asked for


def row_type(labels: int):
    """Return the dtype of a row of the index: row in the source, number of the group, labels."""
    import numpy

    return numpy.dtype([("row", "<i8"), ("group", "<i4"), ("labels", "<f4", (labels,))])


def load_array_record():
    """Return array_record's module, or raise an error that says how to install it."""
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise NotInstalled(
            "a pack is made of array_record files, and array_record is not installed",
            found=error,
            fix="%pip install array_record, then run this cell again; there is none for Windows",
        ) from error
    return array_record_module


def write_shard(file: Path, records: Iterable[bytes]) -> None:
    """Write a shard, all of it on the disk when this returns; the same records give the same bytes.

    Raises:
        OSError: it could not be written; a full disk says so.
    """
    array_record = load_array_record()
    try:
        writer = array_record.ArrayRecordWriter(str(file), _WRITER)
        for record in records:
            writer.write(record)
            if not writer.ok():  # it would take all the others and say so at the end
                break
        writer.close()
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    except RuntimeError as error:
        number = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else errno.EIO
        raise OSError(number, f"{file.name} could not be written: {error}") from error


class Shards:
    """The records of several files as one sequence; to be pickled and forked, as each process opens files of its own.

    Args:
        files: in the order of their records.
        counts: records in each.
        rows: (N,) of `row_type`, what each record has to begin with.
        at_once: read with one native call for each file touched, whose threads ask a slow drive for many records
            together. From memory, one by one is faster and takes half the processor time (11 against 28 us for 18 KB).
    """

    def __init__(self, files: list[Path], counts: list[int], rows, *, at_once: bool):
        import numpy

        self.files, self.rows, self.at_once = files, rows, at_once
        self._ends = numpy.cumsum(counts)
        self._readers = defaultdict(OrderedDict)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_readers": defaultdict(OrderedDict)}

    def read(self, numbers) -> list[bytes]:
        """Return whole records, their row in front; OSError names one that is damaged, or lies in another's place."""
        import numpy

        numbers = numpy.asarray(numbers, numpy.int64).reshape(-1)
        if not len(numbers):
            return []
        order = numpy.argsort(numbers, kind="stable")
        shard = numpy.searchsorted(self._ends, numbers[order], side="right")
        records = [b""] * len(numbers)
        for part in numpy.split(order, numpy.flatnonzero(numpy.diff(shard)) + 1):
            for place, record in zip(part.tolist(), self._read_from_one(numbers[part]), strict=True):
                records[place] = record
        return records

    def _read_from_one(self, numbers) -> list[bytes]:
        shard, first = self._place(numbers[0])
        width = self.rows.dtype.itemsize
        readers = self._readers[os.getpid()]  # those of a parent are left alone: its threads may have been reading
        places = (numbers - first).tolist()
        try:
            reader = readers.get(shard)
            if reader is None:
                reader = readers[shard] = _open(self.files[shard])
            if len(readers) > _most_open():
                readers.popitem(last=False)
            if self.at_once and _home() == os.getpid():
                records = reader.read(places)
            else:
                records = [reader.read(place, place + 1)[0] for place in places]
        except (RuntimeError, IndexError) as error:
            if len(numbers) == 1:
                raise self._damaged(numbers[0], str(error)) from error
            # One of them is damaged: find it, so that the message can name it.
            return [self._read_from_one(numbers[k : k + 1])[0] for k in range(len(numbers))]
        begins = b"".join([record[:width] for record in records])
        if begins != self.rows[numbers].tobytes():
            wrong = next(k for k, n in enumerate(numbers) if records[k][:width] != self.rows[n].tobytes())
            why = "another record lies there" if records[wrong] else "nothing lies there any more"
            raise self._damaged(numbers[wrong], why)
        return records

    def _place(self, number) -> tuple[int, int]:
        """Return which shard a record is in, and the number of that shard's first record."""
        shard = int(self._ends.searchsorted(number, side="right"))
        return shard, int(self._ends[shard - 1]) if shard else 0

    def _damaged(self, number, why: str) -> OSError:
        shard, first = self._place(number)
        if os.strerror(errno.EMFILE) in why or os.strerror(errno.ENFILE) in why:
            return SystemFailed(
                f"{self.files[shard]} cannot be opened",
                found=f"{os.strerror(errno.EMFILE)}, the file is as it was",
                fix="close what this process has open, or allow more: resource.setrlimit, ulimit -n",
                errno=errno.EMFILE,
            )
        return SystemFailed(
            f"record {number - first} of {self.files[shard]} cannot be read",
            found=why,
            fix="copy this file again from where it is whole, or pack the images again into a new folder; "
            f"until then leave image {number} out",
        )


def _open(file: Path):
    """Open a reader; RuntimeError says what is wrong with the file."""
    array_record = load_array_record()
    _home()
    reader = array_record.ArrayRecordReader(str(file), _READER, file_reader_buffer_size=16384)
    if not reader.ok():
        reader.read([0])  # raises, and says why
    return reader


@functools.cache
def _most_open() -> int:
    """Return how many shards a process keeps open: a quarter of the files it may, as it and its parent have others."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit // 4) if limit != resource.RLIM_INFINITY else 2**20


@functools.cache
def _home() -> int:
    """Return the process where a reader was first opened; its forks inherit the answer.

    There array_record started the threads with which it reads several records at once. A child forked meanwhile
    inherits their locks, perhaps held, and hangs when it does the same: 10 of 400 children did (array_record 0.8.6).
    Reading one record at a time needs no thread: 0 of 1,300 hung.
    """
    return os.getpid()
