"""Each fix of what makes batches, done as it says: the same call then passes."""

import importlib
import itertools
import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas
import pytest
import torch
from helpers.fixes import Fixes
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import tpukit
from tpukit import Augment, Buckets, pe
from tpukit.essentials.data import Batches, remember
from tpukit.training import StreamBatches


def batches_of(dataset, **options):
    kind = StreamBatches if "steps" in options else Batches
    return kind(dataset, **options)


core = types.SimpleNamespace(batches=batches_of)
fixes = Fixes(
    "essentials/data/*.py",
    "training/augment.py",
    "training/buckets.py",
    "training/streams.py",
    names={"core": core, "tpukit": tpukit, "torch": torch},
)
IMAGES, LABELS = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 2)


class Texts:
    """Samples of several lengths, as mappings."""

    def __init__(self, sizes=(3, 9, 5, 12)):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return {"ids": torch.ones(self.sizes[index], dtype=torch.int64), "label": 1}


class Stream:
    def __iter__(self):
        return iter(range(100))


def all_of(batches):
    return list(itertools.islice(batches, 4))


# Sources


def test_the_fixes_work_for_joined_sources_of_other_names(tmp_path):
    def packed(folder, classes):
        items = [(np.full((8, 8, 3), k, np.uint8), k % 2) for k in range(4)]
        return tpukit.pack(items, tmp_path / folder, classes=classes, progress="off")

    one = packed("one", ["cat", "dog"])
    other = packed("other", ["dog", "cat"])
    with fixes("sources: the joined datasets number their classes or labels differently") as fix:
        core.batches(torch.utils.data.ConcatDataset([one, other]), batch_size=2)
    again = packed("again", fix.code(r"(?<=classes=)[\w.]+", first=one))
    core.batches(torch.utils.data.ConcatDataset([one, again]), batch_size=2)


# Augment


def test_the_fixes_work_for_images_and_labels_of_another_form():
    images = IMAGES.permute(0, 2, 3, 1)
    with fixes("augment: augment takes (N, C, H, W) tensors, got {}") as fix:
        Augment()(images, LABELS)
    Augment()(fix.code(r"(?<=pass ).*", images=images), LABELS)

    images = IMAGES.long()
    with fixes("augment: augment takes uint8 in [0, 255] or floats in [0, 1], got {}") as fix:
        Augment()(images, LABELS)
    Augment()(fix.code(r"images\.to\(.*?\)", images=images), LABELS)
    Augment()(fix.code(r"images / \d+", images=images), LABELS)

    augment = Augment(flip=1.0, swap_labels=((0, 1),))
    with fixes("augment: with swap_labels={}, the shape of the labels must be ({}, {}), got {} {}"):
        augment(IMAGES, torch.zeros(2).long())
    augment(IMAGES, LABELS)

    masks = torch.zeros(2, 8, 8, dtype=torch.uint8)
    for fill, kind in ((-100, torch.uint8), (255, torch.int8), (255, torch.bool)):
        with fixes("augment: fill={} is no class number of {} masks: it would become {}") as fix:
            Augment(fill=fill)(IMAGES, masks.to(kind))
        changed = fix.code(r"(?<=pass ).*?(?=, or)", masks=masks.to(kind))
        Augment(fill=fill)(IMAGES, changed)
    Augment(fill=255)(IMAGES, masks)


def test_the_fixes_work_for_options_of_augment():
    for fill in (256, -257, 1.0, True):
        with fixes("augment: fill must be a whole number, -256 to 255, got {}") as fix:
            Augment(fill=fill)
    numbers = re.findall(r"\bfill=(\d+)", fix.text)
    assert len(numbers) == 2
    for number in numbers:
        Augment(fill=int(number))

    with fixes("augment: swap_labels must be pairs of labels, got {}") as fix:
        Augment(swap_labels=(0, 1))
    Augment(swap_labels=fix.code(r"(?<=swap_labels=).*?(?=, with)", one=0, other=1))

    with fixes("augment: swap_labels={} has a label twice"):
        Augment(swap_labels=((0, 1), (1, 2)))
    Augment(swap_labels=((0, 1), (2, 3)))

    with fixes("augment: swap_labels={}, but there is no label {}; names={}"):
        Augment(swap_labels=(("left", "right"),))
    Augment(swap_labels=((0, 1),))
    Augment(swap_labels=(("left", "right"),), names=("left", "right"))

    with fixes("augment: {} must be 0 (off) to {}, got {}") as fix:
        Augment(degrees=90)
    assert "for up to 10 degrees to either side" in fix
    Augment(degrees=fix.code(r"(?<=degrees=).*?(?=, for)"))

    with fixes(
        "augment: scale must be (smallest, largest) from 0.5 to 1.5, or None (off), got {}"
    ) as fix:
        Augment(scale=0.1)
    Augment(scale=fix.code(r"(?<=scale=).*"))

    images = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    with fixes(
        "augment: augment cannot interpolate pixels of two bytes: it would mix low and high ..."
    ):
        Augment()(images, torch.zeros(2))
    Augment()((pe.hounsfield(images) + 1024) / 4096, torch.zeros(2))


# Batches


def test_the_fix_works_for_samples_with_a_mask():
    def sample(name):
        return {"image": torch.zeros(3), name: torch.ones(2, 2)}

    with fixes(
        'feeds: mask=True adds the entry "mask" to a batch, and the samples have ...'
    ) as fix:
        all_of(core.batches([sample("mask")] * 3, batch_size=2, mask=True))
    named = fix.code(r'(?<=for example to )"\w+"')
    (batch, _) = all_of(core.batches([sample(named)] * 3, batch_size=2, mask=True))
    assert (batch[named].shape, batch["mask"].tolist()) == ((2, 2, 2), [True, True])
    all_of(core.batches([sample("mask")] * 3, batch_size=2, mask=False))


def test_the_fixes_work_for_datasets():
    stream = Stream()
    with fixes("batches: a {} can only be read in order, so samples cannot be chosen ...") as fix:
        core.batches(stream, batch_size=4)
    all_of(fix.code(r"(?<=: ).*", dataset=stream))

    with fixes("batches: the dataset is empty: its length is 0"):
        core.batches([], batch_size=1)
    all_of(core.batches([1, 2], batch_size=1))

    class Source:
        shape, labels = (8, 8, 3), torch.zeros(4).numpy()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.take([index])[0]

        def take(self, indices, out=None):
            out[:] = 0
            return out

    with fixes("batches: buckets= is not supported for PackedImages and CachedImages, whose ..."):
        core.batches(Source(), batch_size=2, buckets=Buckets((8,)))
    all_of(core.batches(Source(), batch_size=2))


def test_the_fixes_work_for_states():
    state = core.batches(range(8), batch_size=2).state_dict()
    with fixes(
        "batches: the saved state belongs to a dataset of {} samples, but this dataset has {}"
    ):
        core.batches(range(6), batch_size=2).load_state_dict(state)
    core.batches(range(8), batch_size=2).load_state_dict(state)
    all_of(core.batches(range(6), batch_size=2))

    with fixes("batches: the saved state belongs to another {}") as fix:
        core.batches(range(8, 16), batch_size=2).load_state_dict(state)
    assert "pass the dataset that the state was saved with" in fix
    core.batches(range(8), batch_size=2).load_state_dict(state)
    all_of(core.batches(range(8, 16), batch_size=2))

    stream = {"steps": 3, "batch_size": 2}
    with fixes("streams: the saved state belongs to a map-style dataset, but this dataset is ..."):
        core.batches(Stream(), **stream).load_state_dict(state)
    state = core.batches(Stream(), **stream).state_dict()
    with fixes(
        "batches: the saved state belongs to an iterable dataset, but this dataset is map-style"
    ):
        core.batches(range(8), batch_size=2).load_state_dict(state)
    core.batches(Stream(), **stream).load_state_dict(state)

    def begun(**options):
        batches = core.batches(range(16), **options)
        next(iter(batches))
        return batches.state_dict()

    with fixes(
        "batches: the saved state is {} samples after the start of an epoch, and this run would "
        "divide the epoch in another way"
    ):
        core.batches(range(16), batch_size=4).load_state_dict(begun(batch_size=2))
    core.batches(range(16), batch_size=2).load_state_dict(begun(batch_size=2))
    shuffled = core.batches(range(16), batch_size=4, world_size=2, shuffle=True)
    shuffled.load_state_dict(begun(batch_size=2, shuffle=True))


def test_the_fixes_work_for_numbers_of_batches():
    def six(**changed):
        options = {"batch_size": 8, "world_size": 2, "drop_last": True}
        return core.batches(range(6), **options | changed)

    with fixes("batches: {} samples do not fill one batch of {} on each of {} cores") as fix:
        six()
    for option in fix.text.split(", or "):
        all_of(six(**fix.run(f"dict({option})")))

    for dataset, options in ((Stream(), {"steps": 2}), (range(8), {})):
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            core.batches(dataset, batch_size=0, **options)

    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        core.batches(range(8), batch_size=2, threads=0)
    with pytest.raises(ValueError, match="workers must be at least 0, got -1"):
        core.batches(range(8), batch_size=2, workers=-1)


def test_the_fixes_work_for_weights_of_samples():
    labels = torch.tensor([0, 0, 0, 1])
    class_sizes = labels.bincount()

    def drawn(weights, **options):
        return all_of(core.batches(range(4), weights=weights, batch_size=2, **options))

    for words, wrong in (
        ("sampler: weights must be one number per sample, got a {}", "abcd"),
        ("sampler: weights must be one number per sample, ({},), got {}", [1.0, 1.0]),
        ("sampler: weights must be finite, 0 or more, and not all 0", [1, 1, 1, -1]),
        ("sampler: weights must be finite, 0 or more, and not all 0", [0, 0, 0, 0]),
        ("sampler: weights must be finite, 0 or more, and not all 0", [1, 1, 1, torch.nan]),
    ):
        with fixes(words) as fix:
            drawn(wrong)
    drawn(fix.code(r"(?<=weights=).*?(?=, to draw)", class_sizes=class_sizes, labels=labels))

    with fixes("batches: weights= and buckets= cannot be combined: weights repeat some ...") as fix:
        drawn([1, 1, 1, 1], buckets=Buckets((4,)))
    assert "leave out buckets=, and pad all samples to one length" in fix
    drawn([1, 1, 1, 1])


# Buckets


def padded(dataset=None, **options):
    buckets = Buckets(**{"lengths": (4, 16), "pad": {"ids": 0}} | options)
    return all_of(core.batches(dataset or Texts(), batch_size=2, buckets=buckets))


class Bytes(Texts):
    kind = torch.uint8

    def __getitem__(self, index):
        return {"ids": torch.ones(self.sizes[index], dtype=self.kind)}


class Matrices(Texts):
    def __getitem__(self, index):
        return {"ids": torch.ones(2, self.sizes[index]), "label": torch.ones(3)}


def test_the_fixes_work_for_what_fills_samples_up():
    for pad in ({"words": 0}, None):
        with fixes(
            "buckets: pad= must name the parts of a sample that vary in length, and their ..."
        ) as fix:
            padded(pad=pad)
    made = fix.code(r"(?<=length: ).*")
    padded(pad=made.pad, lengths=made.lengths)

    dataset = Bytes()
    with fixes(
        "buckets: pad= gives {} the fill value {}, which {} cannot represent: it would become {}"
    ) as fix:
        padded(dataset, pad={"ids": -100})
    padded(dataset, pad={"ids": 255})
    dataset.kind = fix.code(r"\S+$")
    padded(dataset, pad={"ids": -100})

    with fixes("buckets: the part {} of sample {} has no axis {} to pad: its shape is {}"):
        padded(Matrices(), axis=1, pad={"ids": 0, "label": 0})
    padded(Matrices(), axis=1, pad={"ids": 0})
    padded(Matrices(), axis=-1, pad={"ids": 0, "label": 0})


def test_the_fixes_work_for_lengths():
    for lengths in ((), (0, 4), (8, 4)):
        with fixes(
            "buckets: buckets must be lengths in ascending order, at least 1, got {}"
        ) as fix:
            Buckets(lengths)
    Buckets(fix.code(r"(?<=buckets=).*"))

    with fixes("buckets: sample {} has length {}, and the largest bucket is {}{}") as fix:
        padded(lengths=(4, 8))
    padded(lengths=fix.code(r"(?<=buckets=).*?(?=, or cut)"))
    cutting = fix.run(fix.text.rpartition(": ")[2])
    padded(lengths=cutting.lengths, truncate=cutting.truncate)

    with fixes("buckets: sizes must hold the length of every sample: {} numbers, got {}") as fix:
        padded(sizes=[3])
    padded(sizes=fix.code(r"(?<=sizes=).*", dataset=[range(size) for size in Texts().sizes]))

    with fixes("buckets: sample {} does not fit into a batch of length {}: it has length {}"):
        padded(sizes=[3, 3, 3, 3])
    padded(sizes=[3, 9, 5, 12])
    padded(truncate=True, lengths=(2,))  # a dataset that cuts to one length


# Samples


def pool_of(folder):
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


def file_in(folder):
    (folder / "data").write_bytes(bytes(8))
    return (folder / "data").open("rb")


def byte_of(folder, index):
    with open(folder / "data", "rb") as file:
        file.seek(index)
        return file.read(1)[0]


# Objects that a dataset may not hold in its processes, and how a sample is made without them.
HELD = {
    "an open file": (file_in, byte_of),
    "a generator": (
        lambda folder: np.random.default_rng(),
        lambda folder, index: np.random.default_rng((0, index)).random(),
    ),
    "a pool of threads": (pool_of, lambda folder, index: index),
}


@pytest.mark.parametrize("kind", HELD)
def test_the_fixes_work_for_objects_that_forks_share(kind, tmp_path):
    held, sample = HELD[kind]

    class Holding(Texts):
        def __getitem__(self, index):
            return index if self.held else sample(tmp_path, index)

    dataset = Holding()
    dataset.held = held(tmp_path)
    with fixes("shared_state: the dataset holds {}, which forked processes cannot share"):
        all_of(core.batches(dataset, batch_size=2, workers=1))
    getattr(dataset.held, "close", bool)()
    dataset.held = None
    assert len(all_of(core.batches(dataset, batch_size=2, workers=1))) == 2


class Writer:
    """Writes in a thread of its own, as TensorBoard's SummaryWriter does."""

    def __init__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._stop.wait, daemon=True)
        self._thread.start()

    def close(self):
        self._stop.set()
        self._thread.join()


def test_the_fix_works_for_threads_of_the_notebook(tmp_path):
    writer = Writer()
    with fixes("shared_state: the worker function uses threads of the notebook, ...") as fix:
        remember(lambda core: writer, ())
    writer.close()
    loggers = fix.code(r"(?<=loggers=).*(?=\))".replace("runs", str(tmp_path)))
    assert callable(loggers)

    def work(core):
        if core.is_main:
            Writer().close()

    remember(work, ())


def test_the_fixes_work_for_columns_and_batches_in_place_of_samples():
    tensors = {"x": torch.zeros(2, 3), "y": torch.zeros(2)}
    table = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    for source in (table, tensors):
        with fixes("sources: a {} holds columns, but core.batches needs samples: ...") as fix:
            core.batches(source, batch_size=2)
    of_table, of_dict = fix.text.split("; ")
    of_table = of_table.replace("torch.tensor(...)", "torch.tensor(table.y.to_numpy())")
    of_table = fix.run(of_table.removeprefix("for a table, "), table=table, inputs=["x"])
    of_dict = of_dict.removeprefix("for a dict of tensors, ")
    of_dict = fix.run(f"torch.utils.data.{of_dict}", tensors=tensors)
    for dataset in (of_table, of_dict):
        all_of(core.batches(dataset, batch_size=2))

    two = TensorDataset(torch.arange(2))
    sampler = torch.utils.data.WeightedRandomSampler([0.0, 1.0], 8)
    loader = DataLoader(two, batch_size=4, sampler=sampler)
    with fixes("sources: a {} makes batches already, but core.batches needs samples, ...") as fix:
        core.batches(loader, batch_size=4)
    weights = fix.code(r"(?<=weights=).*", loader=loader)
    drawn = all_of(core.batches(loader.dataset, weights=weights, batch_size=4))
    assert all(batch[0].tolist() == [1] * 4 for batch in drawn)

    sampler = torch.utils.data.SubsetRandomSampler([1])
    loader = DataLoader(two, batch_size=4, sampler=sampler)
    with fixes("sources: a {} makes batches already, but core.batches needs samples, ...") as fix:
        core.batches(loader, batch_size=4)
    part = fix.run(fix.text.rpartition("SubsetRandomSampler: ")[2], loader=loader)
    assert all(batch[0].tolist() == [1] * 4 for batch in all_of(core.batches(part, batch_size=4)))

    dataset = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
    loader = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
    with fixes("sources: a {} makes batches already, but core.batches needs samples, ...") as fix:
        core.batches(loader, batch_size=4)
    all_of(fix.code(r"^.*?(?=, where)", loader=loader))


def resized(image):
    from torchvision.transforms import v2

    return v2.PILToTensor()(v2.Resize((224, 224))(image))


# Samples that do not stack, a mended sample of each, and words of the fix.
UNLIKE = {
    "images of two sizes": (
        [Image.new("RGB", (side, side)) for side in (8, 9)],
        resized,
        "torchvision.transforms.v2.Resize((224, 224)) and PILToTensor()",
    ),
    "flipped arrays": (
        [torch.zeros(2).numpy()[::-1]] * 2,
        lambda sample: sample.copy(),
        "for flipped arrays, call .copy()",
    ),
    "None": (
        [(torch.zeros(2), 1), None],
        lambda sample: sample or (torch.zeros(2), 0),
        "never None",
    ),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_the_fixes_work_for_samples_that_cannot_be_stacked(kind):
    samples, mend, words = UNLIKE[kind]
    with fixes("collating: the samples of a batch cannot be stacked") as fix:
        all_of(core.batches(samples, batch_size=2))
    assert words in fix
    all_of(core.batches([mend(sample) for sample in samples], batch_size=2))


# Streams


def test_the_fixes_work_for_streams():
    with fixes("streams: a {} can be read only once, but a stream ...") as fix:
        core.batches(iter(range(9)), steps=2, batch_size=2)
    call = fix.text.partition(": ")[2]
    all_of(fix.run(call.replace(": ...", ": range(9)").replace("=...", "=2")))

    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        core.batches(Stream(), steps=0, batch_size=2)

    with fixes("streams: steps= is for a dataset that can only be read in order, but ..."):
        core.batches(range(8), steps=2, batch_size=2)
    all_of(core.batches(range(8), batch_size=2))

    for options in ({"shuffle": True}, {"mask": True}, {"buckets": (4,)}, {"weights": [1]}):
        with fixes("streams: shuffle, mask, weights and buckets are not supported for a stream"):
            core.batches(Stream(), steps=2, batch_size=2, **options)
    all_of(core.batches(Stream(), steps=2, batch_size=2))


def test_the_fixes_work_for_shares_of_a_stream():
    def read(shards=1, workers=2):
        def share(number, of):
            return [sample for shard in range(number, shards, of) for sample in range(8)]

        return all_of(core.batches(share, steps=2, batch_size=2, workers=workers))

    for options in ({}, {"shards": 0, "workers": 0}):
        with fixes("streams: share {} of {} of the stream holds no sample, so a core would ..."):
            read(**options)
    read(workers=1)
    read(shards=2)

    pipeline = type("WebDataset", (Stream,), {"__module__": "webdataset.compat"})
    made = []

    class Wds:
        @staticmethod
        def WebDataset(urls, nodesplitter, workersplitter):  # noqa: N802
            made.extend(urls)
            return Stream()

    datasets = pytest.importorskip("datasets")
    numbers = datasets.Dataset.from_dict({"number": list(range(12))})
    stream = numbers.to_iterable_dataset(num_shards=2)
    split_dataset_by_node = importlib.import_module("datasets.distributed").split_dataset_by_node
    options = {"steps": 3, "batch_size": 2}
    with fixes("streams: the stream is a core's share already, and ...") as fix:
        batches_of(split_dataset_by_node(stream, 0, 2), rank=0, world_size=2, **options)
    names = {"stream": stream, "split_dataset_by_node": split_dataset_by_node}
    opened = fix.code(r"lambda share, shares: \w+\(.*?\)", **names)
    for whole in (stream, opened):
        seen = []
        for rank in range(2):
            for batch in all_of(batches_of(whole, rank=rank, world_size=2, **options)):
                seen += batch["number"].tolist()
        assert sorted(seen) == list(range(12))

    with fixes("streams: a webdataset pipeline divides its shards among processes by ...") as fix:
        core.batches(pipeline(), steps=2, batch_size=2)
    call = fix.text.partition(": ")[2].replace("...,", ",", 1)
    call = call.replace("steps=...", "steps=2").replace("=...", "=2")
    all_of(fix.run(call, wds=Wds, urls=["a.tar", "b.tar"]))
    assert made == ["a.tar", "b.tar"]


def test_every_fix_has_its_test():
    assert fixes.tested(__file__) == fixes.source()
