"""What a model says is kept piece by piece: nothing is computed twice, and other weights begin anew."""

import os

import numpy
import pytest

torch = pytest.importorskip("torch")

from tpukit import launch  # noqa: E402
from tpukit.training import predict_to, read_predictions  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
NUMBERS = torch.arange(22, dtype=torch.float32).reshape(11, 2)


class Twice(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, numbers):
        return {"sums": numbers.sum(1) * self.weight, "rows": numbers}


def work(core, folder, weight, limit=99, backup_dir=None):
    seen = []

    def count(numbers):
        seen.append(len(numbers))
        if len(seen) > limit:
            raise KeyError("cut off")
        return numbers

    model = core.model(Twice(weight))
    numbers = torch.utils.data.TensorDataset(NUMBERS)
    predict_to(
        folder, core, model, numbers, batch_size=2, preprocess=count, piece=4, backup_dir=backup_dir
    )
    return len(seen)


class Far(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1e4))

    def forward(self, numbers):
        return {"scores": numbers * self.weight, "classes": numbers.long() + 4097}


def far(core, folder, scale):
    model = core.model(Far())
    numbers = torch.utils.data.TensorDataset(NUMBERS * scale)
    predict_to(folder, core, model, numbers, batch_size=2)


def run(*arguments):
    return launch(work, *arguments, cores=2, backend="cpu", progress="off").results


def test_a_run_that_was_cut_off_goes_on_with_the_piece_that_is_missing(tmp_path, capsys):
    from tpukit import WorkerError

    with pytest.raises(WorkerError, match="cut off"):
        run(tmp_path, 2.0, 2)
    assert sorted(file.name for file in tmp_path.glob("*.npz")) == [
        "000000000.npz",
        "000000004.npz",
    ]
    with pytest.raises(FileNotFoundError, match="2 of 3 pieces"):
        read_predictions(tmp_path)
    assert run(tmp_path, 2.0) == [1, 1]  # the third piece alone
    assert "2 of 3 pieces of the predictions are found in" in capsys.readouterr().out
    kept = read_predictions(tmp_path)
    assert kept["sums"].tolist() == (NUMBERS.sum(1) * 2).tolist()
    assert (kept["rows"].dtype, kept["rows"].tolist()) == (torch.float16, NUMBERS.tolist())
    assert run(tmp_path, 2.0) == [0, 0]
    assert run(tmp_path, 3.0) == [3, 3]  # of other weights nothing is taken
    assert read_predictions(tmp_path)["sums"].tolist() == (NUMBERS.sum(1) * 3).tolist()


def test_on_a_new_machine_the_pieces_come_from_the_backup_and_trouble_there_ends_nothing(
    tmp_path, capsys
):
    from tpukit import WorkerError

    first, second, third, backup_dir = (
        tmp_path / name for name in ("first", "second", "third", "drive/exams")
    )
    backup_dir.parent.mkdir()
    with pytest.raises(WorkerError, match="cut off"):
        run(first, 2.0, 2, backup_dir)
    assert run(second, 2.0, 99, backup_dir) == [1, 1]
    kept = read_predictions(second)["sums"].tolist()
    assert kept == (NUMBERS.sum(1) * 2).tolist()
    assert read_predictions(backup_dir)["sums"].tolist() == kept
    piece = backup_dir / "000000004.npz"
    piece.write_bytes(piece.read_bytes()[:100])  # the machine ended while a drive took it
    assert run(third, 2.0, 99, backup_dir) == [1, 1]
    (third / "predictions.json").write_text("{")
    assert run(third, 2.0, 99, backup_dir) == [0, 0]
    assert (
        read_predictions(third)["sums"].tolist()
        == read_predictions(backup_dir)["sums"].tolist()
        == kept
    )
    assert run(tmp_path / "other", 3.0, 99, backup_dir) == [3, 3]
    assert read_predictions(backup_dir)["sums"].tolist() == (NUMBERS.sum(1) * 3).tolist()
    capsys.readouterr()
    (tmp_path / "no-folder").write_text("")
    assert run(tmp_path / "last", 2.0, 99, tmp_path / "no-folder") == [3, 3]
    assert capsys.readouterr().out.count("continues") == 1


def test_a_drive_that_is_not_mounted_is_not_made_on_this_machine(tmp_path, capsys):
    drive = tmp_path / "MyDrive"
    assert run(tmp_path / "features", 2.0, 99, drive / "features") == [3, 3]
    assert not drive.exists()
    said = capsys.readouterr().out
    assert said.count("the run continues without it") == 1
    assert f"there is no folder {drive}" in said


def test_numbers_that_half_the_bytes_cannot_hold_are_refused_and_whole_numbers_are_kept_as_they_are(
    tmp_path,
):
    from tpukit import WorkerError

    with pytest.raises(WorkerError, match=r"at most 65504, but .*'scores' goes up to 210000"):
        launch(far, tmp_path, 1, cores=1, backend="cpu", progress="off")
    assert not list(tmp_path.glob("*.npz"))
    launch(far, tmp_path, 0.1, cores=1, backend="cpu", progress="off")
    classes = read_predictions(tmp_path)["classes"]
    assert (classes.dtype, classes[:, 0].tolist()) == (
        torch.int64,
        [int(n * 0.1) + 4097 for n in range(0, 22, 2)],
    )


class Returns(torch.nn.Module):
    def __init__(self, form, dtype=torch.float32):
        super().__init__()
        self.form, self.layer = form, torch.nn.Linear(2, 3, dtype=dtype)

    def forward(self, numbers):
        return self.form(self.layer(numbers.to(self.layer.weight.dtype)))


def save(core, folder, form, dtype=torch.float32, backup_dir=None):
    model = core.model(Returns(form, dtype))
    numbers = torch.utils.data.TensorDataset(NUMBERS)
    predict_to(folder, core, model, numbers, batch_size=2, backup_dir=backup_dir)


def saved(*arguments):
    launch(save, *arguments, cores=1, backend="cpu", progress="off")


def test_a_model_with_bfloat16_weights_has_a_checksum_as_well(tmp_path):
    saved(tmp_path, lambda scores: scores, torch.bfloat16)
    assert read_predictions(tmp_path).shape == (11, 3)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (lambda scores: (scores, scores), "tuple"),
        (lambda scores: {"scores": scores, "more": (scores,)}, "tuple"),
        (lambda scores: {"scores": scores, "loss": scores.mean()}, "NoneType"),
    ],
)
def test_outputs_that_are_neither_a_tensor_nor_a_dict_of_tensors_are_refused(tmp_path, form, kind):
    from tpukit import WorkerError

    with pytest.raises(WorkerError, match=f"a tensor or a dict of tensors, got a {kind}"):
        saved(tmp_path, form)


@pytest.mark.parametrize("backup_dir", [None, "gs://bucket/run"])
def test_a_url_does_not_become_a_folder_of_this_machine(tmp_path, monkeypatch, backup_dir):
    from tpukit import WorkerError

    monkeypatch.chdir(tmp_path)
    folder = "features" if backup_dir else "gs://bucket/run"
    with pytest.raises(WorkerError, match="must be a folder on this machine, got 'gs://bucket"):
        saved(folder, lambda scores: scores, torch.float32, backup_dir)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("count", "piece", "text"),
    [(0, 4, "the dataset has no samples"), (11, 0, "piece must be at least 1, got 0")],
)
def test_no_samples_and_pieces_of_none_are_refused(tmp_path, count, piece, text):
    from tpukit import WorkerError

    def none(core):
        numbers = torch.utils.data.TensorDataset(NUMBERS[:count])
        predict_to(tmp_path, core, core.model(Twice(2.0)), numbers, batch_size=2, piece=piece)

    with pytest.raises(WorkerError, match=text):
        launch(none, cores=1, backend="cpu", progress="off")


def test_a_piece_may_be_a_number_of_numpy(tmp_path):
    def in_pieces(core):
        numbers = torch.utils.data.TensorDataset(NUMBERS)
        piece = numpy.int64(4)
        predict_to(tmp_path, core, core.model(Twice(2.0)), numbers, batch_size=2, piece=piece)

    launch(in_pieces, cores=1, backend="cpu", progress="off")
    assert len(read_predictions(tmp_path)["sums"]) == 11


def test_a_home_folder_is_the_one_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run("~/features", 2.0, 99, "~/backup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup", "features"]
    assert len(read_predictions("~/features")["sums"]) == 11
