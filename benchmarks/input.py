"""Measure how fast batches reach the step, with tpukit and with other pipelines.

The others are those of the tutorial of 2020, webdataset, Grain, SPDL and torch's DataLoader.

All pipelines deliver the same 6,000 images, of 13 KB and 256 x 256 in Kaggle's layout, in random
order, as batches of 128 at 128 x 128. Every round measures all of them, in a new order, because the
load on a machine changes. The figures are ratios within a round, and their median. Files are in the
page cache throughout. Start-up is not measured: processes are forked and queues filled before the
clock starts, and are not empty after.

- The tutorial's pipeline, 1 by definition: labels and folders from the table by `iloc`, `glob` for
  the position before the name, the image over float64 and through Pillow twice, float32 batches.
  One process, as it trained with.
- The cache, with one thread and with two, and what bounds it: the same bytes copied in order, by
  one thread.
- JPEG records, in one process and in two, and what bounds them: the decoder alone, on bytes that
  lie in memory.
- webdataset, Grain and torch's DataLoader, each set up as its documentation says, with two
  processes, and with the decoder that the records use, which is faster than the one they would
  bring.
- SPDL, the same with two threads, which is how it works. Its own reader of media needs FFmpeg.
- TorchCodec does not take part. 0.17.0 does not load beside torch 2.9: "Could not load this
  library: libtorchcodec_image.so". 0.9.1, made for torch 2.9, does not load without FFmpeg.
- A step of ResNet-18 on two CPU processes with batches of the cache, against the same step with one
  resident batch.
- The memory of a worker that has read the whole cache.
- DICOM slices, read, seen through windows and resized, against pydicom alone: see dicom_slices.py.
- The labels of the whole competition, 1,790,594 rows: read and checked, divided into folds, looked
  at and laid out as `pack` does before the first image; in a separate process, on one processor.
  `--only labels` measures just that.
"""

import argparse
import contextlib
import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dicom_slices import measure_dicom

SIZE = 128
BATCH = 128
# a series is 10 drawn slices, each in 24 places
SERIES = 25
SLICES = 240
PICTURES = 10
SPEEDS = (
    "cache_1_thread",
    "cache_2_threads",
    "jpeg_per_core",
    "jpeg_2_processes",
    "webdataset",
    "grain",
    "spdl",
    "dataloader",
)
LIBRARIES = ("webdataset", "grain", "spdl", "dataloader")
# of the competition
ROWS = 1_790_594
STUDIES = 7_279
# times an image comes in an epoch: a real epoch is longer than a round, and does not end in it
LONG = 20


def main() -> None:
    """Measure everything, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="of everything, about 15 s each")
    parser.add_argument(
        "--data", type=Path, default=Path(tempfile.gettempdir(), "tpukit-benchmark"), help="is kept"
    )
    parser.add_argument("--only", choices=["dicom", "labels"], help="measure this alone")
    # the process that `labels` starts
    parser.add_argument("--labels-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.labels_in:
        read_all_labels(options.labels_in)
    elif options.only == "labels":
        print(json.dumps(labels(options.data)))
    elif options.only == "dicom":
        print(json.dumps(measure_dicom(options.data, options.rounds)))
    else:
        measure_everything(options.data, options.rounds)


def measure_everything(folder: Path, rounds: int) -> None:
    """Measure in turn, and print the table and the line of JSON."""
    import torch

    # as in tpukit's workers; the tutorial's pipeline is no faster with more
    torch.set_num_threads(1)
    data = prepare(folder)
    describe(data)
    contestants = {
        "tutorial": Contestant("the tutorial's pipeline", tutorial),
        "cache_1_thread": Contestant("cache, 1 thread", lambda data: from_cache(data, threads=1)),
        "cache_2_threads": Contestant("cache, 2 threads", lambda data: from_cache(data, threads=2)),
        "memcpy": Contestant("  the same bytes copied in order", memory_copy),
        "jpeg_per_core": Contestant("JPEG records, 1 process", from_records),
        "decoder": Contestant("  the decoder alone", decoder_alone),
        "jpeg_2_processes": Contestant("JPEG records, 2 processes", from_records_in_processes),
        "webdataset": Contestant("webdataset, 2 processes", with_webdataset, "webdataset"),
        "grain": Contestant("Grain, 2 processes", with_grain, "grain"),
        "spdl": Contestant("SPDL, 2 threads", with_spdl, "spdl"),
        "dataloader": Contestant("torch DataLoader, 2 processes", with_dataloader),
    }
    contestants = {name: one for name, one in contestants.items() if is_installed(one.needs)}
    # first, in a process that has done nothing yet: later it was not the same twice
    extra, window = worker_extra(data)
    speeds = [run_round(contestants, data, number) for number in range(rounds)]
    steps = step_ratios(data, rounds)
    report(
        contestants, speeds, steps, extra, window, measure_dicom(folder, rounds) | labels(folder)
    )


@dataclass(frozen=True)
class Data:
    """The same images as Kaggle's files and train.csv, records, a cache, and tar shards."""

    folder: Path
    table: object
    records: object
    cache: object
    shards: list[str]


def prepare(folder: Path) -> Data:
    """Make in a folder all that is measured, or take what an earlier call left there."""
    from tpukit.datasets.image_cache import build_image_cache
    from tpukit.datasets.packing import pack
    from tpukit.pe import LABELS, index_images, read_labels

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "train.csv").is_file():
        print(f"making {SERIES * SLICES:,} images in {folder}; once, some minutes", flush=True)
        draw(folder)
    table = index_images(read_labels(folder), folder / "train-jpegs")
    records = pack(table, folder / "records", labels=list(LABELS), groups="StudyInstanceUID")
    cache = build_image_cache(records, folder / "cache", size=SIZE)
    return Data(folder, table, records, cache, write_tar(folder / "tar", table))


def draw(folder: Path) -> None:
    """Write drawn slices, smoothed to 13 KB, in 24 places each, and then their train.csv."""
    import numpy
    import pandas
    from PIL import Image, ImageFilter

    from tpukit.pe import index_images, phantom, read_labels

    drawn = phantom(folder / "phantom", studies=SERIES, slices=PICTURES, seed=0)
    into = folder / "train-jpegs"
    shutil.rmtree(into, ignore_errors=True)
    rows = []
    for row in index_images(read_labels(drawn), drawn / "train-jpegs").to_dict("records"):
        # As noisy as drawn they would be 20 KB; those of the competition are 13.
        pixels = numpy.asarray(Image.open(row["path"]).filter(ImageFilter.GaussianBlur(1.3)))
        series = into / row["StudyInstanceUID"] / row["SeriesInstanceUID"]
        series.mkdir(parents=True, exist_ok=True)
        for place in range(SLICES // PICTURES):
            position = row["position"] * (SLICES // PICTURES) + place
            name = hashlib.sha256(f"{row['SOPInstanceUID']} {place}".encode()).hexdigest()[:12]
            moved = numpy.roll(pixels, (place % 5 - 2, place // 5 - 2), axis=(0, 1))
            Image.fromarray(moved).save(series / f"{position:03d}_{name}.jpg", quality=90)
            rows.append({**row, "SOPInstanceUID": name})
    table = pandas.DataFrame(rows).drop(columns=["path", "position"])
    table.to_csv(folder / "unfinished.csv", index=False)
    (folder / "unfinished.csv").rename(folder / "train.csv")


def write_tar(folder: Path, table) -> list[str]:
    """Write the shards for webdataset once, with 1,000 images each in random order."""
    if not is_installed("webdataset"):
        return []
    import webdataset

    if not folder.is_dir():
        work = folder.with_name("unfinished-tar")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        with webdataset.ShardWriter(str(work / "%05d.tar"), maxcount=1000, verbose=0) as writer:
            shuffled = table.sample(frac=1, random_state=0)
            for number, (path, labels) in enumerate(
                zip(shuffled["path"], label_values(shuffled), strict=True)
            ):
                writer.write(
                    {"__key__": f"{number:06d}", "jpg": Path(path).read_bytes(), "npy": labels}
                )
        work.rename(folder)
    return sorted(map(str, folder.glob("*.tar")))


def label_values(table):
    """Return the ten labels of every row, (N, 10) float32."""
    from tpukit.pe import LABELS

    return table[list(LABELS)].to_numpy("float32")


def tutorial(data: Data) -> Iterator:
    """Yield the tutorial's batches, (128, 3, 128, 128) float32, with its steps in its order."""
    import numpy
    import pandas
    from torch.utils.data import default_collate

    table = pandas.read_csv(data.folder / "train.csv")
    for order in orders(len(table)):
        for samples in numpy.split(order, range(BATCH, len(order), BATCH))[:-1]:
            yield default_collate(
                [tutorial_item(table, data.folder / "train-jpegs", sample) for sample in samples]
            )


def tutorial_item(table, folder: Path, sample: int) -> tuple:
    """Return one image and its labels as the tutorial's `__getitem__` does."""
    import torch
    from torchvision import transforms

    from tpukit.pe import LABELS

    where = "/".join(table.iloc[sample][["StudyInstanceUID", "SeriesInstanceUID"]])
    name = glob.glob(
        os.path.join(folder, where + "/*" + table.iloc[sample]["SOPInstanceUID"] + ".jpg")
    )[0]
    image = read_image()(name) / 255.0
    image = torch.tensor(image, dtype=torch.float).permute(2, 0, 1)
    steps = transforms.Compose(
        [transforms.ToPILImage(), transforms.Resize((SIZE, SIZE)), transforms.ToTensor()]
    )
    labels = table.iloc[sample][list(LABELS)].values.astype("int")
    return steps(image), torch.tensor(labels, dtype=torch.float)


def read_image() -> Callable:
    """Return a function that reads a file, of OpenCV, or of Pillow, which was 4 % slower."""
    if is_installed("cv2"):
        import cv2

        return lambda name: cv2.cvtColor(cv2.imread(name), cv2.COLOR_BGR2RGB)
    import numpy
    from PIL import Image

    return lambda name: numpy.asarray(Image.open(name).convert("RGB"))


def from_cache(data: Data, threads: int) -> Iterator:
    """Yield (128, 3, 128, 128) uint8 views of reused buffers, gathered ahead by threads."""
    return batches_of(data.cache, threads=threads)


def memory_copy(data: Data) -> Iterator:
    """Yield batches copied from the cache's pages in order, into buffers that are used in turn."""
    import numpy

    images = data.cache.images
    buffers = itertools.cycle([numpy.empty((BATCH, SIZE, SIZE, 3), numpy.uint8) for _ in range(3)])
    for first in itertools.cycle(range(0, len(images) - BATCH + 1, BATCH)):
        buffer = next(buffers)
        numpy.copyto(buffer, images[first : first + BATCH])
        yield buffer


def from_records(data: Data) -> Iterator:
    """Yield batches that this process reads, checks and decodes, in one thread."""
    import numpy

    records = reopened(data)
    buffers = itertools.cycle([numpy.empty((BATCH, SIZE, SIZE, 3), numpy.uint8) for _ in range(3)])
    for order in orders(len(records)):
        for samples in numpy.split(order, range(BATCH, len(order), BATCH))[:-1]:
            yield records.take(samples, out=next(buffers)), records.labels[samples]


def decoder_alone(data: Data) -> Iterator:
    """Yield lists of images from the JPEG decoder, scaled as the records scale them."""
    import numpy
    import simplejpeg

    contents = data.records.read(numpy.arange(len(data.records)))
    for order in orders(len(contents)):
        for samples in numpy.split(order, range(BATCH, len(order), BATCH))[:-1]:
            jpegs = [contents[sample] for sample in samples]
            yield [
                simplejpeg.decode_jpeg(jpeg, "RGB", min_height=SIZE, min_width=SIZE)
                for jpeg in jpegs
            ]


def from_records_in_processes(data: Data) -> Iterator:
    """Yield batches that two processes decode."""
    return batches_of(reopened(data), workers=2)


def batches_of(source, **options) -> Iterator:
    """Yield tpukit's batches of a source, every image many times in an epoch."""
    import numpy
    from torch.utils.data import Subset

    from tpukit.essentials.data.batches import Batches

    repeated = Subset(source, numpy.tile(numpy.arange(len(source)), LONG))
    batches = Batches(repeated, batch_size=BATCH, shuffle=True, drop_last=True, **options)
    for _ in itertools.count():
        yield from batches


def with_webdataset(data: Data) -> Iterator:
    """Yield webdataset's batches; its loader's processes shuffle, decode and batch the samples."""
    import webdataset

    dataset = (
        webdataset.WebDataset(data.shards, resampled=True, shardshuffle=False)
        .shuffle(1000)
        .to_tuple("jpg", "npy")
    )
    dataset = dataset.map_tuple(decode_fast, read_npy).batched(BATCH, partial=False)
    yield from webdataset.WebLoader(dataset, num_workers=2, batch_size=None)


def with_grain(data: Data) -> Iterator:
    """Yield Grain's batches of the very array_record files that the records are."""
    import grain

    source = grain.sources.ArrayRecordDataSource(
        sorted(map(str, data.records.folder.glob("*.array_record")))
    )
    dataset = (
        grain.MapDataset.source(source).shuffle(seed=0).repeat().map(parse_record).batch(BATCH)
    )
    # No threads inside the processes, as Grain advises where the data are in memory already.
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    with contextlib.closing(
        iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    ) as batches:
        yield from batches


def with_spdl(data: Data) -> Iterator:
    """Yield SPDL's batches of the files; its threads read and decode, another one joins them."""
    import numpy
    from spdl.dataloader import DataLoader

    files = Files(data.table["path"].tolist(), list(label_values(data.table)))

    def joined(items: list[tuple]) -> tuple:
        images, labels = zip(*items, strict=True)
        return numpy.stack(images), numpy.stack(labels)

    samples = itertools.chain.from_iterable(orders(len(files)))
    yield from DataLoader(
        samples,
        preprocessor=files.__getitem__,
        batch_size=BATCH,
        drop_last=True,
        aggregator=joined,
        num_threads=2,
    )


def with_dataloader(data: Data) -> Iterator:
    """Yield the batches of torch's loader over the files, with a read and a decode per image."""
    from torch.utils.data import DataLoader

    files = Files(data.table["path"].tolist() * LONG, list(label_values(data.table)) * LONG)
    yield from DataLoader(files, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=2)


@dataclass(frozen=True)
class Files:
    """A map-style dataset of image files, as torch's documentation shows one."""

    paths: list[str]
    labels: list

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple:
        return decode_fast(Path(self.paths[index]).read_bytes()), self.labels[index]


def decode_fast(jpeg: bytes):
    """Decode an image as the records do."""
    from tpukit.datasets.decoding import decode

    return decode(jpeg, SIZE, exact=False)


def read_npy(content: bytes):
    """Read an array in numpy's own format."""
    import io

    import numpy

    return numpy.load(io.BytesIO(content))


def parse_record(record: bytes) -> tuple:
    """Take one of the records' own records apart: its row of the index, then the JPEG."""
    import numpy

    from tpukit.datasets.array_records import row_type
    from tpukit.pe import LABELS

    row = row_type(len(LABELS))
    return decode_fast(record[row.itemsize :]), numpy.frombuffer(record, row, 1)["labels"][0]


def reopened(data: Data):
    """Open the records at the size that is delivered, as the JPEG decoder scales them."""
    from tpukit.datasets.packed_images import PackedImages

    return PackedImages(data.records.folder, size=SIZE)


def orders(count: int) -> Iterator:
    """Yield one random order after another."""
    import numpy

    random = numpy.random.default_rng(0)
    while True:
        yield random.permutation(count)


@dataclass(frozen=True)
class Contestant:
    """Who takes part: the name in the table, what yields its batches, and the package it needs."""

    name: str
    batches: Callable[[Data], Iterator]
    needs: str | None = None


@dataclass(frozen=True)
class Speed:
    """Images per second of wall time, and per second of processor time of all processes."""

    wall: float
    cpu: float


def run_round(contestants: dict[str, Contestant], data: Data, number: int) -> dict[str, Speed]:
    """Measure every contestant once, beginning with another one in each round."""
    names = list(contestants)
    began = time.perf_counter()
    start = 3 * number % len(names)
    speeds = {
        name: measure(contestants[name].batches(data)) for name in names[start:] + names[:start]
    }
    print(f"round {number + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    return speeds


def measure(batches: Iterator, seconds: float = 0.8) -> Speed:
    """Take batches for a while, after the first ones, in which processes start and queues fill."""
    with contextlib.closing(batches):
        take(batches, seconds / 4, 1)
        if children():
            take(batches, seconds / 4, 8)  # what lay ready in queues is gone
        cpu = processor_seconds()
        wall = time.perf_counter()
        images = take(batches, seconds, 2) * BATCH
        wall = time.perf_counter() - wall
        return Speed(images / wall, images / (processor_seconds() - cpu))


def take(batches: Iterator, seconds: float, least: int) -> int:
    """Take batches for some seconds, and at least so many; return how many."""
    end = time.perf_counter() + seconds
    taken = 0
    while taken < least or time.perf_counter() < end:
        next(batches)
        taken += 1
    return taken


def processor_seconds() -> float:
    """Return the processor time that this process and its living children have used."""
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children())


def children() -> list:
    """Return the living processes that this one has started."""
    import psutil

    return psutil.Process().children(recursive=True)


def step_ratios(data: Data, rounds: int) -> list[float]:
    """Return per round the time of a step with the cache over one with a resident batch."""
    from tpukit.essentials.launcher.launcher import launch

    results = launch(train, data.cache, rounds, cores=2, backend="cpu", progress="off").results
    return [max(core[number] for core in results) for number in range(rounds)]


def train(core, cache, rounds: int, batch_size: int = 32) -> list[float]:
    """Train ResNet-18 at 64 pixels, four steps of each kind per round; return the ratios."""
    import torch
    from torchvision.models import resnet18

    from tpukit.pe import normalize

    model = core.model(resnet18(num_classes=len(cache.names)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = core.batches(cache, batch_size=batch_size, shuffle=True, drop_last=True)
    real = itertools.chain.from_iterable(itertools.repeat(batches))
    resident = itertools.repeat(tuple(tensor.clone() for tensor in next(real)))

    def seconds(kind: Iterator) -> float:
        began = time.perf_counter()
        images, labels = next(kind)
        with core.step():
            # Every other pixel of every other row: delivered are four times the bytes that are
            # trained on.
            logits = model(normalize(images[:, :, ::2, ::2]))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
            core.optimizer_step(optimizer)
        return time.perf_counter() - began

    ratios = []
    for _ in range(rounds + 1):
        # Back and forth, so that a machine that slows down in between slows both.
        spent = {real: 0.0, resident: 0.0}
        for kind in (real, resident, resident, real) * 2:
            spent[kind] += seconds(kind)
        ratios.append(spent[real] / spent[resident])
    return ratios[1:]  # the first warms up


def worker_extra(data: Data) -> tuple[float, float]:
    """Return the MB of a worker that has read the whole cache, and the limit of its window."""
    from tpukit.essentials.launcher.launcher import launch

    results = launch(read_all, data.cache, cores=2, backend="cpu", progress="off").results
    # two ahead, one in the making, one in the step
    return max(results), BATCH * SIZE * SIZE * 3 * 4 / 1e6


def read_all(core, cache) -> float:
    """Read every batch of the cache once; return by how many MB the worker's unique set grew.

    One image was read before, so the modules, the thread and its heap are there and are not taken
    for the cache's.
    """
    import psutil
    from torch.utils.data import Subset

    from tpukit.essentials.data.batches import Batches

    process = psutil.Process()
    for images, _ in Batches(Subset(cache, [0]), batch_size=1):
        images.sum()
    before = process.memory_full_info().uss
    # by name: it keeps its buffers till then
    batches = Batches(cache, batch_size=BATCH, shuffle=True, drop_last=True)
    for images, _ in batches:
        images.sum()
    # the other has read it all, too: a page that one process alone maps would count as its own
    core.barrier()
    grown = (process.memory_full_info().uss - before) / 1e6
    core.barrier()
    return grown


def labels(folder: Path) -> dict[str, float]:
    """Print and return the seconds of the table on one processor, and its peak memory in GB."""
    if not (folder / "labels" / "train.csv").is_file():
        draw_labels(folder / "labels")
    command = [sys.executable, __file__, "--labels-in", str(folder / "labels")]
    found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["parts"].items())
    print(f"\n{ROWS:,} rows of labels on one processor: {parts}")
    print(f"{'  in all, seconds':60}{found['labels_seconds']:>10,.3g}   target <= 12")
    print(
        f"{'  the most memory of the process, GB':60}{found['labels_gb']:>10,.3g}   target <= 1.5\n"
    )
    return {name: value for name, value in found.items() if name != "parts"}


def draw_labels(folder: Path) -> None:
    """Write a train.csv as long as the competition's, its labels consistent, its names as long."""
    import numpy
    import pandas

    from tpukit.pe.labels import COLUMNS, IDS

    random = numpy.random.default_rng(0)
    study = numpy.sort(random.integers(0, STUDIES, ROWS))
    positive = (numpy.arange(STUDIES) % 3 == 0)[study]
    uid = numpy.array([f"{number:012x}" for number in random.permutation(ROWS)])
    table = pandas.DataFrame({name: numpy.zeros(ROWS, numpy.uint8) for name in COLUMNS})
    table[list(IDS)] = numpy.stack([uid[study], uid[STUDIES + study], uid], axis=1)
    table["pe_present_on_image"] = positive & (
        (random.random(ROWS) < 0.2) | (numpy.diff(study, prepend=-1) > 0)
    )
    for name in ("rv_lv_ratio_lt_1", "leftsided_pe"):
        table[name] = positive
    table["negative_exam_for_pe"] = ~positive
    table[list(COLUMNS[len(IDS) :])] = table[list(COLUMNS[len(IDS) :])].astype(numpy.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "unfinished.csv", index=False)
    (folder / "unfinished.csv").rename(folder / "train.csv")


def read_all_labels(folder: Path) -> None:
    """Prepare the table as a notebook does before the first image; print seconds and memory."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import numpy

    from tpukit.datasets import npy
    from tpukit.datasets.pack_sources import describe_source
    from tpukit.datasets.source_files import Names
    from tpukit.essentials.environment.resources import peak_memory
    from tpukit.pe import LABELS, assign_folds, read_labels

    times = [time.perf_counter()]
    table = read_labels(folder)
    times.append(time.perf_counter())
    table = assign_folds(table)
    times.append(time.perf_counter())
    table["path"] = (
        table["StudyInstanceUID"] + "/" + table["SeriesInstanceUID"] + "/" + table["SOPInstanceUID"]
    )
    times.append(time.perf_counter())
    described = describe_source(table, list(LABELS), "StudyInstanceUID")
    times.append(time.perf_counter())
    order = numpy.random.default_rng(0).permutation(len(described.rows))
    laid_out = npy(described.rows[order]), Names.encode(described.names)
    times.append(time.perf_counter())
    names = ("read", "folds", "paths", "looked at", "laid out")
    parts = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
    del laid_out
    found = {
        "labels_seconds": round(times[-1] - times[0], 2),
        "labels_gb": round(peak_memory() / 1e9, 2),
    }
    print(json.dumps({"parts": parts, **found}))


def is_installed(package: str | None) -> bool:
    """Tell whether a package can be imported, without importing it."""
    import importlib.util

    return package is None or importlib.util.find_spec(package) is not None


def describe(data: Data) -> None:
    """Print what is measured on what."""
    from tpukit.essentials.environment.resources import cpus

    packages = (
        "torch",
        "array_record",
        "simplejpeg",
        "pillow",
        "pandas",
        "webdataset",
        "grain",
        "spdl",
    )
    there = {package.name: package.version for package in importlib.metadata.distributions()}
    sizes = [os.path.getsize(path) for path in data.table["path"]]
    print(f"{len(sizes):,} images of {statistics.mean(sizes) / 1000:.1f} KB; {cpus()} processors")
    print(", ".join(f"{name} {there.get(name, 'not installed')}" for name in packages))
    print(
        f"the tutorial reads with {'OpenCV' if is_installed('cv2') else 'Pillow'}; "
        f"{difference(data)}"
    )


def difference(data: Data, count: int = 64) -> str:
    """Return the distance of cache and records from the tutorial's pixels, in grey levels.

    Raises:
        ValueError: the labels are not the tutorial's, so something else was measured.
    """
    import numpy
    import pandas

    table = pandas.read_csv(data.folder / "train.csv")
    samples = numpy.random.default_rng(0).permutation(len(data.records))[:count]
    items = [
        tutorial_item(table, data.folder / "train-jpegs", row) for row in data.records.rows[samples]
    ]
    images, labels = (numpy.stack(part) for part in zip(*items, strict=True))
    if (labels != data.cache.labels[samples]).any():
        raise ValueError(
            "the cache's labels are not the tutorial's\n"
            f"  fix: delete {data.folder}, it is made again"
        )
    images = (images * 255).round().transpose(0, 2, 3, 1)
    cached, decoded = (
        numpy.abs(part.take(samples) - images) for part in (data.cache, reopened(data))
    )
    return (
        f"the cache's pixels differ from its by {cached.max():.0f}, "
        f"the records' by {decoded.mean():.1f} on average"
    )


def report(
    contestants: dict, rounds: list, steps: list[float], extra: float, window: float, whole: dict
) -> None:
    """Print a line per contestant, some more numbers, and last the JSON."""
    print(
        f"\nmedians of {len(rounds)} rounds, least and most in brackets; "
        "ratios are to the tutorial in the same round\n"
    )
    print(f"{'':34}{'images/s':>27}{'times, wall':>25}{'times, processor':>19}")
    for name, one in contestants.items():
        speeds = [speeds[name].wall for speeds in rounds]
        wall, cpu = (ratios(rounds, name, "tutorial", of) for of in ("wall", "cpu"))
        print(
            f"{one.name:34}{shown(speeds, 0):>27}{shown(wall, 1):>25}"
            f"{statistics.median(cpu):>19,.1f}"
        )
    share = statistics.median(speeds["tutorial"].wall / speeds["tutorial"].cpu for speeds in rounds)
    print(f"\na processor was had {share:.0%} of the time", end="")
    print(
        "; others were busy: what took two threads or processes was held back most\n"
        if share < 0.9
        else "\n"
    )
    found = {name: middle(rounds, name, "tutorial") for name in SPEEDS}
    found["memcpy_fraction"] = middle(rounds, "cache_1_thread", "memcpy")
    found["decoder_fraction"] = middle(rounds, "jpeg_per_core", "decoder")
    threads = middle(rounds, "cache_2_threads", "cache_1_thread")
    processes = middle(rounds, "jpeg_2_processes", "jpeg_per_core")
    fastest = max(found[name] or 0 for name in LIBRARIES)
    found["step_ratio"] = round(statistics.median(steps), 3)
    found["worker_extra_mb"] = round(extra, 1)
    for what, value, target in (
        ("cache, 1 thread, times the tutorial", found["cache_1_thread"], ">= 400"),
        ("cache, 1 thread, of a plain copy", found["memcpy_fraction"], ">= 0.85"),
        ("cache, 2 threads, times 1 thread", threads, ">= 1.7"),
        ("JPEG records, times the tutorial", found["jpeg_per_core"], ">= 15"),
        ("JPEG records, of the decoder alone", found["decoder_fraction"], ">= 0.9"),
        ("JPEG records, 2 processes, times 1", processes, ">= 1.7"),
        (
            "fastest of the libraries, times the tutorial",
            fastest,
            f"<= {found['jpeg_2_processes']}",
        ),
        (
            f"step with real batches, times one without {shown(steps, 2)}",
            found["step_ratio"],
            "<= 1.05",
        ),
        ("MB a worker holds for itself", found["worker_extra_mb"], f"<= {window:.0f}"),
    ):
        print(f"{what:60}{value:>10,.3g}   target {target}")
    print(json.dumps(found | whole))


def ratios(rounds: list, name: str, to: str, of: str = "wall") -> list[float]:
    """Return how many times as fast one contestant was as another, round by round."""
    return [getattr(speeds[name], of) / getattr(speeds[to], of) for speeds in rounds]


def middle(rounds: list, name: str, to: str) -> float | None:
    """Return the median of those ratios, None for who did not take part."""
    return (
        float(f"{statistics.median(ratios(rounds, name, to)):.3g}") if name in rounds[0] else None
    )


def shown(values: list[float], digits: int) -> str:
    """Write a median, with the least and the most."""
    middle, *ends = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} [{ends[0]}..{ends[1]}]"


if __name__ == "__main__":
    main()
