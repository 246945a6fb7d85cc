"""Shards: array_record files in which every record begins with its row of the index.

    record    row in the source, group, labels | bytes of the image

A reader compares the beginning of each record with the index, so it detects a record in the wrong
place.
"""

import errno
import functools
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import NotInstalledError, SystemFailureError

# group_size:1 stores one record per chunk, each with a hash. Uncompressed, because JPEGs do not
# become smaller, and compressed pixels are read at half the speed.
_WRITER = "group_size:1,uncompressed"
# For random access: no read-ahead beyond the requested records.
_READER = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER = 16384  # bytes per open file
_UNLIMITED = 2**20  # the most open shards of a process, if the system sets no limit


def row_type(labels: int):
    """Return the dtype of the index row that a shard stores before each image.

    Its fields are "row" (in the source), "group" (the number of the image's group) and "labels".

    Args:
        labels: the number of labels per image.
    """
    import numpy

    return numpy.dtype([("row", "<i8"), ("group", "<i4"), ("labels", "<f4", (labels,))])


def load_array_record():
    """Import array_record and return its module.

    Raises:
        ModuleNotFoundError: array_record is not installed.
    """
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise NotInstalledError(
            "a pack is made of array_record files, and array_record is not installed",
            found=error,
            fix="%pip install array_record, then run this cell again; on Windows use WSL, because "
            "array_record does not support Windows",
        ) from error
    return array_record_module


def write_shard(file: Path, records: Iterable[bytes]) -> None:
    """Write records into a new shard on disk. Equal records give a file with equal bytes.

    Raises:
        OSError: the shard could not be written; `errno` is ENOSPC if the disk is full.
    """
    array_record = load_array_record()
    try:
        writer = array_record.ArrayRecordWriter(str(file), _WRITER)
        for record in records:
            writer.write(record)
            if not writer.ok():  # a failed writer ignores all further records until `close`
                break
        writer.close()
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    except RuntimeError as error:
        is_full = os.strerror(errno.ENOSPC) in str(error)
        number = errno.ENOSPC if is_full else errno.EIO
        raise OSError(number, f"{file.name} could not be written: {error}") from error


class _Place(NamedTuple):
    """The shard that contains a record."""

    shard: int  # the index of the shard
    first: int  # the number of the shard's first record, counted over all shards


class Shards:
    """The records of several files as one sequence.

    A `Shards` can be pickled, and used after a fork: each process opens the files itself.

    Args:
        files: the shards, in the order of their records.
        counts: the number of records in each file.
        rows: (N,) array with the dtype of `row_type`. Record i must begin with the bytes of row i.
        at_once: True to read the requested records of a file with one native call, which reads
            from a slow drive in parallel. False to read one record per call, as a forked process
            always does. If the files are in memory, False takes less than half of the processor
            time (11 instead of 28 us for 18 KB).
    """

    def __init__(self, files: list[Path], counts: list[int], rows, *, at_once: bool):
        import numpy

        self.files = files
        self.rows = rows
        self.at_once = at_once
        self._ends = numpy.cumsum(counts)
        self._readers = defaultdict(OrderedDict)  # by process id, then by shard, oldest first

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_readers": defaultdict(OrderedDict)}

    def read(self, numbers) -> list[bytes]:
        """Return the records with these numbers. A record is an index row, then the image's bytes.

        Args:
            numbers: (n,) int in any order. The records of all shards are numbered 0 to N - 1.

        Raises:
            OSError: a record is damaged, or does not begin with its index row. The message names
                the record.
        """
        import numpy

        numbers = numpy.asarray(numbers, numpy.int64).reshape(-1)
        count = len(numbers)
        if not count:
            return []
        # Sort the numbers to read each shard once, then put the records into the asked order.
        order = numpy.argsort(numbers, kind="stable")
        shard = numpy.searchsorted(self._ends, numbers[order], side="right")
        records = [b""] * count
        starts_of_shards = numpy.flatnonzero(numpy.diff(shard)) + 1
        for part in numpy.split(order, starts_of_shards):
            found = self._read_from_one(numbers[part])
            for place, record in zip(part.tolist(), found, strict=True):
                records[place] = record
        return records

    def _read_from_one(self, numbers) -> list[bytes]:
        """Return records of one shard, checked against the index."""
        place = self._place(numbers[0])
        places = (numbers - place.first).tolist()
        try:
            reader = self._reader(place.shard)
            if self.at_once and _home() == os.getpid():
                records = reader.read(places)
            else:
                records = [reader.read(number, number + 1)[0] for number in places]
        except (RuntimeError, IndexError) as error:
            if len(numbers) == 1:
                raise self._damaged(numbers[0], str(error)) from error
            # One of them is damaged. Read them one by one, so that the message can name it.
            return [self._read_from_one(numbers[[k]])[0] for k in range(len(numbers))]
        width = self.rows.dtype.itemsize
        begins = b"".join([record[:width] for record in records])
        # One comparison for all records, because this runs for every batch.
        if begins != self.rows[numbers].tobytes():
            raise self._misplaced(numbers, records)
        return records

    def _reader(self, shard: int):
        """Return an open reader of a shard.

        If more than `_most_open` readers are open, close the reader that was opened first.
        A forked process opens its own readers, because threads of the parent process may have used
        the parent's readers at the fork.
        """
        readers = self._readers[os.getpid()]
        reader = readers.get(shard)
        if reader is None:
            reader = _open(self.files[shard])
            readers[shard] = reader
        if len(readers) > _most_open():
            readers.popitem(last=False)
        return reader

    def _place(self, number) -> _Place:
        shard = int(self._ends.searchsorted(number, side="right"))
        if shard == 0:
            return _Place(0, first=0)
        return _Place(shard, first=int(self._ends[shard - 1]))

    def _misplaced(self, numbers, records: list[bytes]) -> OSError:
        """Return the error for the first record that does not begin with its index row."""
        # An exchanged shard is noticed because its records begin with other rows.
        width = self.rows.dtype.itemsize
        for number, record in zip(numbers, records, strict=True):
            if record[:width] != self.rows[number].tobytes():
                break
        problem = (
            "the file has another record there"
            if record
            else "the file has no record there any more"
        )
        return self._damaged(number, problem)

    def _damaged(self, number, found: str) -> OSError:
        """Return the error for a record that cannot be read."""
        place = self._place(number)
        file = self.files[place.shard]
        # array_record has only texts for its errors. A file that could not be opened for lack of
        # descriptors is not damaged, and the user must not delete it.
        too_many_open = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))
        if any(text in found for text in too_many_open):
            allow = "resource.setrlimit, ulimit -n"
            return SystemFailureError(
                f"{file} cannot be opened",
                found=f"{os.strerror(errno.EMFILE)}; the file is undamaged",
                fix=f"close files that this process has open, or raise the limit: {allow}",
                errno=errno.EMFILE,
            )
        again = "or pack the images again into a new folder"
        until_then = f"until then, leave image {number} out"
        return SystemFailureError(
            f"record {number - place.first} of {file} cannot be read",
            found=found,
            fix=f"copy this file again from an undamaged source, {again}; {until_then}",
        )


def _open(file: Path):
    """Open a reader; raise RuntimeError with the reason if the file is damaged."""
    array_record = load_array_record()
    _home()
    reader = array_record.ArrayRecordReader(str(file), _READER, file_reader_buffer_size=_BUFFER)
    if not reader.ok():
        reader.read([0])  # raises the reason
    return reader


@functools.cache
def _most_open() -> int:
    """Return the most shards that a process keeps open: a quarter of its limit on open files.

    The process needs the rest for other files, some of which it inherits from its parent.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 512
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _UNLIMITED
    return max(1, limit // 4)


@functools.cache
def _home() -> int:
    """Return the id of the process that opened the first reader, also in its forked children.

    array_record starts threads in this process to read several records at once. A child that is
    forked while they run may inherit locked locks. If such a child reads several records at once,
    it can hang: 10 of 400 children did (array_record 0.8.6). Reading one record per call starts no
    thread, and 0 of 1,300 children hung. So only the first process reads several records at once.
    """
    return os.getpid()
