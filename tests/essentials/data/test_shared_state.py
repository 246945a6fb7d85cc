"""What forks would share or have a copy of is found in a dataset, and each fix works when it is done."""

import concurrent.futures
import functools
import os
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from tpukit import WorkerError, launch
from tpukit.essentials.data import Batches


class Numbers(torch.utils.data.Dataset):
    def __init__(self, held=None, opens=None):
        self.held, self.opens = held, opens

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if self.opens:
            with open(self.opens, "rb") as file:
                file.seek(index)
                return torch.tensor(file.read(1)[0])
        return torch.tensor(index)


def read(core, dataset, workers=0):
    return sorted(
        number
        for batch in core.batches(dataset, batch_size=4, workers=workers)
        for number in batch.tolist()
    )


def run(dataset, workers=0, cores=2):
    return launch(read, dataset, workers, cores=cores, backend="cpu", progress="off")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(range(32)))
    with zipfile.ZipFile(tmp_path / "zip", "w") as packed:
        packed.writestr("numbers", bytes(range(32)))
    return tmp_path / "numbers"


class Transformed:
    """A class of the user around a dataset, as many write it."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.part[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_open_file_is_found_wherever_the_dataset_holds_it_and_the_fix_works(file, workers):
    with open(file, "rb") as opened, zipfile.ZipFile(file.with_name("zip")) as packed:
        for dataset in (
            Numbers(opened),
            Subset(Numbers({"of": opened}), range(32)),
            Numbers(packed),
            Transformed(Transformed(Subset(Subset(Numbers({"of": packed}), range(32)), range(32)))),
        ):
            with pytest.raises(
                WorkerError, match=r"dataset holds an open file(.|\n)*with open\(self.path"
            ):
                run(dataset, workers, cores=1 if workers else 2)
    results = run(
        Numbers(opens=file), workers, cores=1 if workers else 2
    ).results  # as the fix says
    assert sorted(number for result in results for number in result) == list(range(32))


@pytest.mark.parametrize("module", ["sqlite3", "h5py", "lmdb"])
def test_a_handle_of_a_library_is_found_until_it_is_closed(tmp_path, module):
    library = pytest.importorskip(module)
    if module == "h5py":
        opened = library.File(tmp_path / "data", "w")
        opened["images"] = range(8)
        handles = [opened, opened["images"]]
    else:
        opened = (
            library.connect(tmp_path / "data")
            if module == "sqlite3"
            else library.open(str(tmp_path / "data"))
        )
        handles = [opened, opened.cursor() if module == "sqlite3" else opened.begin()]
    for handle in handles:
        with pytest.raises(ValueError, match="dataset holds an open file"):
            Batches(Numbers(handle), batch_size=4, workers=2)
    opened.close()
    if module == "h5py":
        Batches(Numbers(opened), batch_size=4, workers=2)


def test_what_one_process_alone_reads_is_its_own(file):
    with open(file, "rb") as opened:
        assert run(Numbers(opened), cores=1).results == [list(range(32))]


def test_a_file_that_a_worker_has_opened_itself_is_its_own(file):
    def work(core):
        with open(file, "rb") as opened:
            return read(core, Numbers(opened))

    assert launch(work, cores=2, backend="cpu", progress="off").results


GENERATORS = {
    "random": lambda: random.Random(0),
    "numpy": lambda: np.random.default_rng(0),
    "RandomState": lambda: np.random.RandomState(0),
    "torch": torch.Generator,
}


class Noisy(Numbers):
    """Draws a number for each sample from a generator of its own."""

    def __getitem__(self, index):
        return torch.tensor(index + draw(self))

    @property
    def generator(self):
        return self.held


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_datasets_own_is_refused(kind):
    with pytest.raises(
        WorkerError,
        match="dataset holds a random generator(.|\n)*default_rng\\(\\(seed, index\\)\\)",
    ):
        run(Noisy(GENERATORS[kind]()))


class Synthetic(Numbers):
    """Its samples, and their order, are from a generator that stays an attribute."""

    def __init__(self):
        super().__init__()
        self.rng = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        self.order = torch.randperm(32, generator=self.generator).tolist()
        self.rng.shuffle(self.order)

    def __getitem__(self, index):
        return super().__getitem__(self.order[index])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_no_sample_needs_is_no_reason_to_refuse(workers):
    results = run(Synthetic(), workers).results
    assert sorted([*results[0], *results[1]]) == list(range(32))


@pytest.mark.parametrize("call", [np.random.normal, random.random, torch.default_generator.seed])
def test_functions_of_the_modules_are_no_generators_of_the_dataset(call):
    Batches(Numbers(call), batch_size=4, workers=2)


class Draws:
    """Datasets that draw in ways that are hard to see in their code."""

    class ByText(Numbers):
        def __getitem__(self, index):
            return torch.tensor(index + draw(getattr(self, "he" + "ld")))

    class ByAMethod(Numbers):
        def __init__(self, generator):
            super().__init__()
            self.held = generator.random

        def __getitem__(self, index):
            return torch.tensor(index + self.held())

    class InABaseClass(Noisy):
        def __getitem__(self, index):
            return super().__getitem__(index)

    class InAFunction(Numbers):
        def __getitem__(self, index):
            return torch.tensor(index + sum(draw_from_held(self) for _ in range(2)))

    class InACachedMethod(Numbers):
        @functools.lru_cache  # noqa: B019
        def __getitem__(self, index):
            return torch.tensor(index + self.held.random())


def draw_from_held(dataset):
    return dataset.held.random()


@pytest.mark.parametrize("name", [name for name in vars(Draws) if not name.startswith("_")])
def test_a_generator_that_samples_draw_from_is_refused_however_they_find_it(name):
    dataset = getattr(Draws, name)(np.random.default_rng(0))
    with pytest.raises(ValueError, match="dataset holds a random generator"):
        Batches(dataset, batch_size=4, workers=2)


class OwnGenerator:
    """A transform with a generator, as albumentations has."""

    def __init__(self, generator):
        self.generator = generator


class SharedGenerator:
    """A transform whose class has one for all, as MONAI's Randomizable."""

    generator = np.random.RandomState(0)


class WithItems(OwnGenerator):
    """Its parts are items, as those of albumentations' Compose."""

    __module__ = "numpy.random"  # any library

    def __len__(self):
        return 1

    def __getitem__(self, place):
        return self.generator


TRANSFORM_OF_THE_NOTEBOOK = WithItems(np.random.default_rng(0))


def draw(transform):
    generator = transform.generator
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random() if hasattr(generator, "random") else generator.rand()


class Drawn(Numbers):
    """The index of each sample, and a number that its transform has drawn."""

    def __getitem__(self, index):
        return torch.tensor([index, draw(self.held)], dtype=torch.float64)


class DrawnFromTheNotebook(Numbers):
    """The same with a transform that is a variable of the notebook."""

    def __getitem__(self, index):
        number = draw(TRANSFORM_OF_THE_NOTEBOOK)
        return torch.tensor([index, number], dtype=torch.float64)


def two_epochs(core, dataset, workers):
    batches = core.batches(dataset, batch_size=4, workers=workers)
    return [core.gather(torch.cat(list(batches))).tolist() for _ in range(2)]


TRANSFORMS = {kind: lambda make=make: OwnGenerator(make()) for kind, make in GENERATORS.items()}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transforms_own_generator_draws_other_numbers_for_each_batch_and_again_the_same(workers):
    transforms = [make() for make in TRANSFORMS.values()] + [SharedGenerator()]

    datasets = [Drawn(transform) for transform in transforms]
    datasets += [DrawnFromTheNotebook(), Subset(DrawnFromTheNotebook(), range(32))]
    datasets.append(Subset(Drawn(WithItems(np.random.default_rng(0))), range(32)))

    def work(core):
        return [two_epochs(core, dataset, workers) for dataset in datasets]

    first, second = (
        launch(work, cores=2, backend="cpu", progress="off", seed=3).results[0] for _ in range(2)
    )
    assert first == second
    for epochs in first:
        rows = [row for epoch in epochs for row in epoch]
        assert sorted(index for index, _ in rows) == sorted([*range(32), *range(32)])
        assert len({number for _, number in rows}) == 64


@pytest.mark.parametrize("workers", [0, 2])
def test_albumentations_augments_each_batch_in_its_own_way(workers):
    library = pytest.importorskip("albumentations")
    transform = library.Compose([library.RandomBrightnessContrast(p=1)])
    image = np.full((4, 4, 3), 128, np.uint8)

    class Images(Numbers):
        def __getitem__(self, index):
            pixels = self.held(image=image)["image"]
            return torch.tensor([index, *pixels.ravel()], dtype=torch.float64)

    run = launch(two_epochs, Images(transform), workers, cores=2, backend="cpu", progress="off")
    rows = [tuple(row[1:]) for epoch in run.results[0] for row in epoch]
    assert len(set(rows)) > 40  # of 64 brightnesses and contrasts


def test_threads_do_not_come_into_a_fork():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert run(Numbers(pool), cores=1)  # none was started
        pool.submit(int).result()
        with pytest.raises(WorkerError, match="dataset holds a pool of threads"):
            run(Numbers(pool), cores=1)


def test_a_dataset_that_the_function_takes_from_the_notebook_is_looked_at_too(file):
    with open(file, "rb") as opened:
        dataset = Numbers(opened)
        with pytest.raises(WorkerError, match="dataset holds an open file"):
            launch(lambda core: read(core, dataset), cores=2, backend="cpu", progress="off")


def test_a_stream_is_looked_at_as_well(file):
    class Lines(torch.utils.data.IterableDataset):
        def __init__(self, opened):
            self.opened = opened

        def __iter__(self):
            self.opened.seek(0)
            return (torch.tensor(byte) for byte in self.opened.read())

    def work(core, dataset):
        return [batch.tolist() for batch in core.batches(dataset, steps=2, batch_size=4)]

    with open(file, "rb") as opened, pytest.raises(WorkerError, match="dataset holds an open file"):
        launch(work, Lines(opened), cores=2, backend="cpu", progress="off")


# Names of the notebook, which functions use

FILE_OF_THE_NOTEBOOK = GENERATOR_OF_THE_NOTEBOOK = LOG_OF_THE_NOTEBOOK = None


def noise():
    return GENERATOR_OF_THE_NOTEBOOK.random()


class NamesAFile(Numbers):
    def __getitem__(self, index):
        FILE_OF_THE_NOTEBOOK.seek(index)
        return torch.tensor(FILE_OF_THE_NOTEBOOK.read(1)[0])


class CallsAFunction(Numbers):
    def __getitem__(self, index):
        return self.read(index)

    def read(self, index):
        return torch.tensor(index + noise())


class ReadsAlone(Numbers):
    """Uses the notebook's file and generator only where no sample is read, and writes a log."""

    def __getitem__(self, index):
        LOG_OF_THE_NOTEBOOK.write(f"{index}\n")
        return torch.tensor(index)

    def describe(self):
        return FILE_OF_THE_NOTEBOOK.read(), noise()


def with_noise(dataset, generator):
    """A dataset whose transform is a function with a generator in its closure."""
    dataset.transform = lambda number: number + generator.random()
    return dataset


@pytest.fixture
def notebook(file, monkeypatch):
    with open(file, "rb") as opened, open(file.with_name("log"), "w") as log:
        monkeypatch.setitem(globals(), "FILE_OF_THE_NOTEBOOK", opened)
        monkeypatch.setitem(globals(), "GENERATOR_OF_THE_NOTEBOOK", np.random.default_rng(0))
        monkeypatch.setitem(globals(), "LOG_OF_THE_NOTEBOOK", log)
        yield


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (NamesAFile, "NamesAFile.__getitem__, which uses FILE_OF_THE_NOTEBOOK"),
        (CallsAFunction, "read, which uses noise, which uses GENERATOR_OF_THE_NOTEBOOK"),
        (
            lambda: with_noise(Numbers(), np.random.default_rng(0)),
            "Numbers.transform, which uses generator",
        ),
        (lambda: Subset(NamesAFile(), range(32)), "Subset.dataset.__getitem__, which uses FILE"),
    ],
    ids=["a file", "a function's generator", "a transform's closure", "in a Subset"],
)
def test_what_a_dataset_uses_of_the_notebook_is_found(notebook, make, place, workers):
    with pytest.raises(WorkerError, match="dataset holds") as caught:
        run(make(), workers)
    assert place in caught.value.found


def test_what_no_sample_needs_is_no_reason_to_refuse(notebook):
    assert run(ReadsAlone()).results


def test_a_worker_function_that_names_a_generator_is_told_that_all_cores_draw_the_same(capfd):
    generator = np.random.default_rng(0)
    drawn = launch(lambda core: generator.random(), cores=2, backend="cpu", progress="off").results
    assert drawn[0] == drawn[1]
    assert "which uses generator: a random generator of the notebook" in capfd.readouterr().out
    launch(
        lambda core: np.random.default_rng((0, core.rank)).random(),
        cores=2,
        backend="cpu",
        progress="off",
    )
    assert "of the notebook" not in capfd.readouterr().out


IN_A_SHELL = """
from IPython.core.interactiveshell import InteractiveShell

import tpukit

shell = InteractiveShell.instance()
get_ipython = shell.get_ipython
is_alive = shell.history_manager.save_thread.is_alive()  # IPython ends it when the process forks
run = tpukit.launch(lambda core: get_ipython() is None, cores=2, backend="cpu", progress="off")
print(is_alive, run.results)
"""


def test_a_worker_function_may_ask_for_the_shell_whose_history_has_a_thread(tmp_path):
    pytest.importorskip("IPython")
    environ = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-c", IN_A_SHELL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert "True [False, False]" in done.stdout, done.stdout + done.stderr


def test_a_summary_writer_of_the_notebook_is_refused_and_the_fix_works(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with (
        tensorboard.SummaryWriter(tmp_path / "notebook") as writer,
        pytest.raises(ValueError, match="uses threads of the notebook") as caught,
    ):
        launch(lambda core: writer.add_scalar("loss", 1.0), cores=2, backend="cpu")
    assert "if core.is_main" in caught.value.fix

    def work(core):
        if core.is_main:
            with tensorboard.SummaryWriter(tmp_path / "core") as own:
                own.add_scalar("loss", 1.0)

    launch(work, cores=2, backend="cpu", progress="off")
    assert list((tmp_path / "core").iterdir())
