"""What forks would share or have a copy of is found in a dataset, and each fix works when it is done."""

import concurrent.futures
import random
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


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_its_own_is_refused_and_one_of_a_library_is_named_once(kind, capfd):
    with pytest.raises(
        WorkerError,
        match="dataset holds a random generator(.|\n)*default_rng\\(\\(seed, index\\)\\)",
    ):
        run(Numbers(GENERATORS[kind]()))

    class Transform:
        generator = None

    transform = Transform()
    transform.generator = GENERATORS[kind]()
    run(Numbers(transform))
    assert (
        capfd.readouterr().out.count(
            "Numbers.held.generator is a random generator, and each process has a copy"
        )
        == 1
    )


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
