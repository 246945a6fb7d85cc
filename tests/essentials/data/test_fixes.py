"""Each fix of what makes batches, done as it says: the same call then passes."""

import itertools
import types

import pytest
import torch
from fixes import Fixes
from torch.utils.data import DataLoader, TensorDataset

import tpukit
from tpukit import Augment, Buckets
from tpukit.essentials.data import Batches
from tpukit.train import StreamBatches

fixes = Fixes("essentials/data/*.py", *(f"train/{name}.py" for name in ("augment", "buckets", "streams")))
core = types.SimpleNamespace(
    batches=lambda dataset, **options: (StreamBatches if "steps" in options else Batches)(dataset, **options)
)
KNOWN = {"core": core, "tpukit": tpukit, "torch": torch}
IMAGES, LABELS = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 2)


def does(code, **known):
    """Do a line of a fix."""
    return eval(code, KNOWN | known)


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


@fixes("augment: augment takes (N, C, H, W) tensors, got {}")
def _(folder):
    images = IMAGES.permute(0, 2, 3, 1)
    return (
        lambda: Augment()(images, LABELS),
        lambda fix: Augment()(does(fix.rpartition("pass ")[2], images=images), LABELS),
    )


@fixes("augment: augment takes uint8 in [0, 255] or floats in [0, 1], got {}")
def _(folder):
    images = IMAGES.long()
    return (
        lambda: Augment()(images, LABELS),
        lambda fix: Augment()(does(fix.partition(", if")[0].removeprefix("pass "), images=images), LABELS),
    )


@fixes("augment: outside is a class number, -256 to 255, got {}")
def _(folder):
    return lambda: Augment(outside=300), lambda fix: [Augment(outside=int(one)) for one in fix.split(", or ")]


@fixes("augment: swap is pairs of labels, got {}")
def _(folder):
    def mended(fix):
        Augment(swap=does(fix.partition(", with")[0].removeprefix("swap="), one=0, other=1))

    return lambda: Augment(swap=(0, 1)), mended


@fixes("augment: swap={} has a label twice")
def _(folder):
    return lambda: Augment(swap=((0, 1), (1, 2))), lambda fix: Augment(swap=((0, 1), (2, 3)))


@fixes("augment: swap={} has no column for {}; names={}")
def _(folder):
    def mended(fix):
        Augment(swap=((0, 1),))
        Augment(swap=(("left", "right"),), names=("left", "right"))

    return lambda: Augment(swap=(("left", "right"),)), mended


@fixes("augment: with swap={}, labels are (N, L), here ({}, {}), got {} {}")
def _(folder):
    augment = Augment(flip=1.0, swap=((0, 1),))
    return lambda: augment(IMAGES, torch.zeros(2).long()), lambda fix: augment(IMAGES, LABELS)


@fixes("augment: {} is 0 (off) to {}, got {}")
def _(folder):
    def mended(fix):
        assert "degrees to either side, for instance 10" in fix
        Augment(rotate=10)

    return lambda: Augment(rotate=90), mended


@fixes("batches: a {} can only be read in order, so its samples cannot be dealt out by number")
def _(folder):
    stream = Stream()
    return (
        lambda: core.batches(stream, batch_size=4),
        lambda fix: all_of(does(fix.rpartition(":")[0], dataset=stream)),
    )


@fixes("batches: the dataset is empty: its length is 0")
def _(folder):
    return lambda: core.batches([], batch_size=1), lambda fix: all_of(core.batches([1, 2], batch_size=1))


@fixes("batches: the images of records and caches have one size")
def _(folder):
    class Source:
        shape, labels = (8, 8, 3), torch.zeros(4).numpy()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.take([index])[0]

        def take(self, indices, out=None):
            out[:] = 0
            return out

    return (
        lambda: core.batches(Source(), batch_size=2, buckets=Buckets((8,))),
        lambda fix: all_of(core.batches(Source(), batch_size=2)),
    )


@fixes("batches: the state is of a dataset of {} samples, this one has {}")
def _(folder):
    state = core.batches(range(8), batch_size=2).state_dict()

    def mended(fix):
        core.batches(range(8), batch_size=2).load_state_dict(state)
        all_of(core.batches(range(6), batch_size=2))

    return lambda: core.batches(range(6), batch_size=2).load_state_dict(state), mended


@fixes("batches: the state is of a stream, this dataset has a length")
def _(folder):
    state = core.batches(Stream(), steps=3, batch_size=2).state_dict()
    return (
        lambda: core.batches(range(8), batch_size=2).load_state_dict(state),
        lambda fix: core.batches(Stream(), steps=3, batch_size=2).load_state_dict(state),
    )


@fixes("batches: the state is {} samples into an epoch that was divided in another way")
def _(folder):
    def begun(**options):
        batches = core.batches(range(16), **options)
        next(iter(batches))
        return batches.state_dict()

    def mended(fix):
        core.batches(range(16), batch_size=2).load_state_dict(begun(batch_size=2))
        shuffled = begun(batch_size=2, shuffle=True)
        core.batches(range(16), batch_size=4, world_size=2, shuffle=True).load_state_dict(shuffled)

    return lambda: core.batches(range(16), batch_size=4).load_state_dict(begun(batch_size=2)), mended


@fixes("batches: {} samples do not fill one batch of {} on each of {} cores")
def _(folder):
    def call(**changed):
        return core.batches(range(6), **{"batch_size": 8, "world_size": 2, "drop_last": True} | changed)

    def mended(fix):
        for option in fix.split(", or "):
            all_of(call(**does(f"dict({option})")))

    return call, mended


def padded(dataset=None, **options):
    buckets = Buckets(**{"lengths": (4, 16), "pad": {"ids": 0}} | options)
    return all_of(core.batches(dataset or Texts(), batch_size=2, buckets=buckets))


@fixes("buckets: buckets are lengths in ascending order, at least 1, got {}")
def _(folder):
    return lambda: Buckets((8, 4)), lambda fix: Buckets(does(fix.removeprefix("buckets=")))


@fixes("buckets: pad fills {} up with {}, which {} does not hold: it would be {}")
def _(folder):
    class Bytes(Texts):
        kind = torch.uint8

        def __getitem__(self, index):
            return {"ids": torch.ones(self.sizes[index], dtype=self.kind)}

    def mended(fix):
        padded(Bytes(), pad={"ids": 255})
        dataset = Bytes()
        dataset.kind = does(fix.rpartition(" ")[2])
        padded(dataset, pad={"ids": -100})

    return lambda: padded(Bytes(), pad={"ids": -100}), mended


@fixes("buckets: sample {} does not fit into a batch of length {}: it has length {}")
def _(folder):
    def mended(fix):
        padded(sizes=[3, 9, 5, 12])
        padded(truncate=True, lengths=(2,))  # a dataset that cuts to one length

    return lambda: padded(sizes=[3, 3, 3, 3]), mended


@fixes("buckets: sample {} has length {}, and the largest bucket is {}{}")
def _(folder):
    def mended(fix):
        padded(lengths=does(fix.partition(", or cut")[0].removeprefix("buckets=")))
        cutting = does(fix.rpartition(": ")[2])
        padded(lengths=cutting.lengths, truncate=cutting.truncate)

    return lambda: padded(lengths=(4, 8)), mended


@fixes("buckets: sample {}, {}, has no axis {} to be padded along: its shape is {}")
def _(folder):
    class Matrices(Texts):
        def __getitem__(self, index):
            return {"ids": torch.ones(2, self.sizes[index]), "label": torch.ones(3)}

    def mended(fix):
        padded(Matrices(), axis=1, pad={"ids": 0})
        padded(Matrices(), axis=-1, pad={"ids": 0, "label": 0})

    return lambda: padded(Matrices(), axis=1, pad={"ids": 0, "label": 0}), mended


@fixes("buckets: sizes has the length of every sample: {} numbers, got {}")
def _(folder):
    def mended(fix):
        padded(sizes=does(fix.removeprefix("sizes="), dataset=[range(size) for size in Texts().sizes]))

    return lambda: padded(sizes=[3]), mended


@fixes("buckets: which parts of a sample vary in length has to be said, and what fills them up")
def _(folder):
    def mended(fix):
        made = does(fix.partition(", without")[0])
        padded(pad=made.pad, lengths=made.lengths)

    return lambda: padded(pad=None), mended


def shared(kind, held, mend):
    @fixes("shared_state: the dataset holds {}, and forks do not have one each")
    def _(folder):
        class Holding(Texts):
            def __getitem__(self, index):
                return index

        dataset = Holding()
        dataset.held = held(folder)

        def call():
            batches = all_of(core.batches(dataset, batch_size=2, workers=1))
            assert len(batches) == 2

        def mended(fix):
            getattr(dataset.held, "close", bool)()
            dataset.held = None
            Holding.__getitem__ = lambda self, index: mend(folder, index)
            call()

        return call, mended


def _file(folder):
    (folder / "data").write_bytes(bytes(8))
    return (folder / "data").open("rb")


def _opened(folder, index):
    with open(folder / "data", "rb") as file:
        file.seek(index)
        return file.read(1)[0]


def _pool(folder):
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return pool


def _drawn(folder, index):
    import numpy

    return numpy.random.default_rng((0, index)).random()


def _generator(folder):
    import numpy

    return numpy.random.default_rng()


shared("an open file", _file, _opened)
shared("a random generator", _generator, _drawn)
shared("a pool of threads", _pool, lambda folder, index: index)


@fixes("sources: a {} holds columns, and a dataset gives samples: dataset[0], dataset[1]")
def _(folder):
    import pandas

    table, tensors = pandas.DataFrame({"x": [1.0, 2.0], "y": [0, 1]}), {"x": torch.zeros(2, 3), "y": torch.zeros(2)}

    def mended(fix):
        of_table, of_dict = (
            part.replace("torch.tensor(...)", "torch.tensor(table.y.to_numpy())") for part in fix.split("; ")
        )
        made = does(of_table.removeprefix("of a table, "), table=table, inputs=["x"])
        all_of(core.batches(made, batch_size=2))
        made = does("torch.utils.data." + of_dict.removeprefix("of a dict of tensors, "), tensors=tensors)
        all_of(core.batches(made, batch_size=2))
        with pytest.raises(TypeError, match="holds columns"):
            core.batches(table, batch_size=2)

    return lambda: core.batches(tensors, batch_size=2), mended


@fixes("sources: a {} holds batches already, and core.batches makes each core's own of samples")
def _(folder):
    sampler = torch.utils.data.WeightedRandomSampler([0.0, 1.0], 8)
    loader = DataLoader(TensorDataset(torch.arange(2)), batch_size=4, sampler=sampler)

    def mended(fix):
        drawn = does(fix.rpartition("not used: ")[2], loader=loader)
        assert all(batch[0].tolist() == [1] * 4 for batch in all_of(core.batches(drawn, batch_size=4)))

    return lambda: core.batches(loader, batch_size=4), mended


@fixes("sources: a {} holds batches already, and core.batches makes each core's own of samples")
def _(folder):
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8)), batch_size=4, shuffle=True, drop_last=True)
    return lambda: core.batches(loader, batch_size=4), lambda fix: all_of(
        does(fix.partition(", samples")[0], loader=loader)
    )


@fixes("streams: a webdataset pipeline divides its shards among processes by itself, but knows nothing of these cores")
def _(folder):
    pipeline = type("WebDataset", (Stream,), {"__module__": "webdataset.compat"})
    made = []

    class Wds:
        @staticmethod
        def WebDataset(urls, nodesplitter, workersplitter):  # noqa: N802
            made.extend(urls)
            return Stream()

    def mended(fix):
        call = fix.partition(": ")[2].replace("...,", ",", 1).replace("steps=...", "steps=2").replace("=...", "=2")
        all_of(does(call, wds=Wds, urls=["a.tar", "b.tar"]))
        assert made == ["a.tar", "b.tar"]

    return lambda: core.batches(pipeline(), steps=2, batch_size=2), mended


@fixes("streams: a {} can be read only once, and a stream starts over where it ends")
def _(folder):
    def mended(fix):
        all_of(does(fix.partition(": ")[2].replace(": ...", ": range(9)").replace("=...", "=2")))

    return lambda: core.batches(iter(range(9)), steps=2, batch_size=2), mended


@fixes("streams: share {} of {} of the stream holds no sample, so a core would have nothing to do")
def _(folder):
    def call(shards=1, workers=2):
        def share(number, of):
            return [sample for shard in range(number, shards, of) for sample in range(8)]

        return all_of(core.batches(share, steps=2, batch_size=2, workers=workers))

    def mended(fix):
        call(workers=1)
        call(shards=2)

    return call, mended


@fixes("streams: steps is the number of batches in an epoch, at least 1, got {}")
def _(folder):
    return (
        lambda: core.batches(Stream(), steps=0, batch_size=2),
        lambda fix: all_of(does(f"core.batches(stream, {fix}, batch_size=2)", stream=Stream())),
    )


@fixes("streams: steps= is for a dataset that can only be read in order, and a {} has numbers")
def _(folder):
    return lambda: core.batches(range(8), steps=2, batch_size=2), lambda fix: all_of(
        core.batches(range(8), batch_size=2)
    )


@fixes("streams: a stream comes in its own order, in full batches of one shape")
def _(folder):
    def call(**options):
        return all_of(core.batches(Stream(), steps=2, batch_size=2, **options))

    return lambda: call(shuffle=True), lambda fix: call()


@fixes("streams: the state is of a dataset with a length, this one is a stream")
def _(folder):
    state = core.batches(range(8), batch_size=2).state_dict()
    return (
        lambda: core.batches(Stream(), steps=3, batch_size=2).load_state_dict(state),
        lambda fix: core.batches(range(8), batch_size=2).load_state_dict(state),
    )


@fixes("batches: batch_size is the number of samples per core and step, at least 1, got {}")
def _(folder):
    return lambda: core.batches(range(8), batch_size=0), lambda fix: all_of(does(f"core.batches(range(8), {fix})"))


@fixes("batches: threads is 1 or more and workers 0 or more, got threads={}, workers={}")
def _(folder):
    return (
        lambda: core.batches(range(8), batch_size=2, threads=0),
        lambda fix: all_of(does(f"core.batches(range(8), batch_size=2, {fix})")),
    )


class Given:
    """Samples as a list has them."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def stacked(samples, mend, words):
    @fixes("collating: the samples of a batch cannot be stacked")
    def _(folder):
        def mended(fix):
            assert words in fix
            all_of(core.batches(Given(list(map(mend, samples))), batch_size=2))

        return lambda: all_of(core.batches(Given(samples), batch_size=2)), mended


def _resized(image):
    from torchvision.transforms import v2

    return v2.PILToTensor()(v2.Resize((224, 224))(image))


def _image(side):
    from PIL import Image

    return Image.new("RGB", (side, side))


stacked([_image(8), _image(9)], _resized, "torchvision.transforms.v2.Resize((224, 224)) and PILToTensor()")
stacked([torch.zeros(2).numpy()[::-1]] * 2, lambda sample: sample.copy(), "flipped arrays with .copy()")
stacked([(torch.zeros(2), 1), None], lambda sample: sample or (torch.zeros(2), 0), "no None")


@pytest.mark.parametrize(("key", "row"), fixes.cases)
def test_the_same_call_passes_when_the_fix_is_done(key, row, tmp_path):
    fixes.check(key, row, tmp_path)


def test_every_fix_has_its_row():
    assert fixes.rows.keys() == fixes.source()
