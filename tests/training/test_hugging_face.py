import pytest
import torch
from torch import nn

from tpukit.essentials.launcher.launcher import WorkerError, launch
from tpukit.training.streams import StreamBatches


def hugging_face_stream():
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[float(number)] for number in range(16)], "text": list("abcdefghijklmnop")}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)


def test_cores_that_cut_their_own_shards_of_a_stream_are_refused():
    # core.batches divides what it gets, so each core would train on half of its half.
    stream = hugging_face_stream()

    def work(core, is_cut):
        part = stream.shard(core.world_size, core.rank) if is_cut else stream
        train = core.batches(part.with_format("torch"), steps=2, batch_size=2)
        model = core.model(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for batch in train:
            optimizer.zero_grad()
            model(batch["x"]).mean().backward()
            core.optimizer_step(optimizer)
            seen += batch["text"]
        return seen

    options = {"cores": 2, "backend": "cpu", "progress": "off"}
    whole = launch(work, False, **options).results
    assert len(set(sum(whole, []))) == 8
    with pytest.raises(WorkerError, match="different datasets(.|\n)*shards of the whole stream"):
        launch(work, True, **options)


@pytest.mark.parametrize("change", ["none", "filtered", "joined"])
def test_the_facts_of_a_stream_name_its_shards_in_any_order(change):
    datasets = pytest.importorskip("datasets")

    def facts(stream):
        if change == "filtered":
            stream = stream.map(lambda row: row).filter(lambda row: True)
        elif change == "joined":
            stream = datasets.interleave_datasets([stream, stream])
        return StreamBatches(stream, steps=1, batch_size=1).facts()

    stream = hugging_face_stream()
    assert facts(stream) == facts(stream.shuffle(buffer_size=4))
    parts = [facts(stream.shard(4, index)) for index in range(4)]
    assert all(part not in parts[:index] for index, part in enumerate(parts))


def test_the_facts_of_a_stream_of_files_name_the_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    files = [str(tmp_path / f"{number}.csv") for number in range(4)]
    for file in files:
        with open(file, "w") as written:
            written.write("x\n1\n")
    folder = str(tmp_path / "cache")
    options = {"data_files": files, "split": "train", "streaming": True, "cache_dir": folder}
    stream = datasets.load_dataset("csv", **options)
    first, second = (
        StreamBatches(stream.shard(2, index), steps=1, batch_size=1).facts() for index in range(2)
    )
    different = {name: first[name] for name in first if first[name] != second[name]}
    assert list(different) == ["shards of the whole stream"]
    assert "0.csv" in different["shards of the whole stream"]


@pytest.mark.parametrize("shards", [[0, 1], [(0, 1), (2, 3)], [["a", "b"], ["a"]], ["a", "b"]])
def test_the_facts_of_a_stream_of_a_generator_name_its_arguments(shards):
    datasets = pytest.importorskip("datasets")

    def read(parts):
        yield from ({"part": str(part)} for part in parts)

    stream = datasets.IterableDataset.from_generator(read, gen_kwargs={"parts": shards})
    first, second = (
        StreamBatches(stream.shard(2, index), steps=1, batch_size=1).facts() for index in range(2)
    )
    assert first != second
