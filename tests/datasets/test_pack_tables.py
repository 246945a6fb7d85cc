"""Tables: from a CSV file to a trained model, with words for labels, numbered by label_arrays."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")
torch = pytest.importorskip("torch")

from tpukit.datasets.image_cache import build_image_cache  # noqa: E402
from tpukit.datasets.label_arrays import as_labels, in_order  # noqa: E402
from tpukit.datasets.packing import PackOptions, pack  # noqa: E402
from tpukit.essentials.display.figures import show_batch  # noqa: E402

KIT = Path(__file__).parents[2]
QUIET = {"progress": "off"}
SPECIES = ("rose", "daisy", "tulip")


def flower(number, size=24):
    """Return an image whose colour says its species."""
    pixels = np.random.default_rng(number).integers(0, 60, (size, size, 3), dtype=np.uint8)
    pixels[..., number % 3] += 150
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    """Return a folder with images/, one sub-folder a species in folders/, and train.csv."""
    root = tmp_path_factory.mktemp("flowers")
    rows = []
    for number in range(48):
        word = SPECIES[number % 3]
        for file in (
            root / "images" / f"{number:03}.png",
            root / "folders" / word / f"{number:03}.png",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            flower(number).save(file)
        rows.append(
            {
                "file_name": f"{number:03}.png",
                "species": word,
                "patient": f"{number % 12:03}",
                "fold": number % 4,
            }
        )
    pd.DataFrame(rows).to_csv(root / "train.csv", index=False)
    return root


FROM_CSV = {"path": "file_name", "labels": "species"}


def test_a_csv_file_with_words_is_packed_and_the_words_travel(flowers, tmp_path):
    records = pack(
        flowers / "train.csv",
        tmp_path / "out",
        root=flowers / "images",
        groups="patient",
        **FROM_CSV,
        **QUIET,
    )
    table = pd.read_csv(flowers / "train.csv")
    assert records.classes == records.names == sorted(SPECIES)
    assert (records.labels.shape, records.labels.dtype) == ((48,), np.int64)
    words = np.array(records.classes)[records.labels]
    assert words.tolist() == table.species[records.rows].tolist()
    assert records.group_names[0] == "000"  # as it is written, not the number 0
    for part in records.split(valid=0.25, stratify=True):
        assert len(set(np.bincount(records.labels[part]))) == 1
    assert np.bincount(table.fold.to_numpy()[records.rows]).tolist() == [12] * 4
    cache = build_image_cache(records, tmp_path / "cache", size=24, **QUIET)
    drawn = show_batch(
        torch.from_numpy(cache.take([0, 1])).permute(0, 3, 1, 2),
        cache.labels[:2],
        names=cache.names,
    )
    assert [axes.get_title(loc="left") for axes in drawn.axes] == words[:2].tolist()
    assert str(flowers / "images" / records.name(0)) == str(
        flowers / "images" / table.file_name[records.rows[0]]
    )


def test_paths_in_a_csv_file_begin_at_its_folder(flowers, tmp_path, monkeypatch):
    table = pd.read_csv(flowers / "train.csv")
    table.assign(file_name="images/" + table.file_name).to_csv(
        flowers / "b.tsv", sep="\t", index=False
    )
    first = pack(flowers / "b.tsv", tmp_path / "out", **FROM_CSV, **QUIET)
    assert (
        pack(str(flowers / "b.tsv"), tmp_path / "out", **FROM_CSV, **QUIET).digest == first.digest
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no file nothing.csv(.|\n)*fix:"):
        pack("nothing.csv", tmp_path / "new", **FROM_CSV)


def test_a_table_and_a_csv_file_are_the_same_pack(flowers, tmp_path):
    how = {"root": flowers / "images", "groups": "patient", **FROM_CSV, **QUIET}
    first = pack(flowers / "train.csv", tmp_path / "out", **how)
    assert (
        pack(
            pd.read_csv(flowers / "train.csv", dtype={"patient": str}), tmp_path / "out", **how
        ).digest
        == first.digest
    )


def test_classes_give_validation_the_numbers_of_training(flowers, tmp_path):
    table = pd.read_csv(flowers / "train.csv")
    how = {"root": flowers / "images", **FROM_CSV, **QUIET}
    valid = pack(
        table[table.species != "daisy"], tmp_path / "valid", classes=sorted(SPECIES), **how
    )
    assert valid.classes == sorted(SPECIES)
    assert sorted(set(valid.labels)) == [1, 2]
    with pytest.raises(
        ValueError,
        match=r"(?s)label 'species' of row 0 is not one of the classes.*'rose'; classes daisy",
    ):
        pack(table, tmp_path / "new", classes=["daisy", "tulip"], **how)
    numbers = table.assign(species=table.species.map(sorted(SPECIES).index))
    named = pack(numbers, tmp_path / "numbers", classes=sorted(SPECIES), **how)
    assert (named.labels.dtype, named.names) == (np.int64, sorted(SPECIES))
    assert named.labels.tolist() == numbers.species[named.rows].tolist()
    with pytest.raises(ValueError, match="row 2 is not one of the classes"):
        pack(numbers, tmp_path / "new", classes=["one", "two"], **how)


def test_a_categorical_column_keeps_its_own_order(flowers, tmp_path):
    table = pd.read_csv(flowers / "train.csv")
    table["species"] = pd.Categorical(
        table.species, categories=["tulip", "rose", "daisy", "orchid"]
    )
    assert (
        pack(table, tmp_path, root=flowers / "images", **FROM_CSV, **QUIET).classes[-1] == "orchid"
    )


TEN_LINES = """
import torch, torchvision, tpukit
images = tpukit.cached_images(tpukit.pack({arguments}), size=24)
train, valid = (torch.utils.data.Subset(images, part) for part in images.split(stratify=True))
def learn(core):
    model = core.model(torchvision.models.resnet18(num_classes=len(images.classes)))
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=1e-3), torch.nn.CrossEntropyLoss()
    batches, held_out = core.batches(train, batch_size=4, shuffle=True), core.batches(valid, batch_size=4)
    return tpukit.fit(core, model, optimizer, loss, batches, held_out, epochs=2, preprocess=lambda x: x / 255)
print("history", tpukit.launch(learn).results[0].epochs[-1])
"""
OF_A_FOLDER = '"flowers", "packed"'
OF_A_CSV_FILE = '"train.csv", "packed", path="file_name", root="images", labels="species"'


@pytest.mark.parametrize(
    "arguments",
    [OF_A_FOLDER, pytest.param(OF_A_CSV_FILE, marks=pytest.mark.only_soak)],
    ids=["a folder", "a CSV file"],
)
def test_ten_lines_train_a_model(flowers, tmp_path, arguments):
    (tmp_path / "images").symlink_to(flowers / "images")
    (tmp_path / "train.csv").write_text((flowers / "train.csv").read_text())
    (tmp_path / "flowers").symlink_to(flowers / "folders")
    (tmp_path / "cell.py").write_text(TEN_LINES.format(arguments=arguments))
    environ = {**os.environ, "PYTHONPATH": str(KIT)}
    ran = subprocess.run(
        [sys.executable, "cell.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert "history {'epoch': 2" in ran.stdout, ran.stdout + ran.stderr


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_files_of_sixteen_bits_are_packed_by_a_window_which_the_pack_keeps(tmp_path):
    deep = (np.arange(64).reshape(8, 8) * 64).astype(np.uint16)  # 12 bits
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(Image.fromarray(deep)))
    table = pd.DataFrame({"path": [str(tmp_path / f"{number}.png") for number in range(3)]})
    whole = pack(table, tmp_path / "whole", **QUIET)
    assert whole.take([0])[0, ..., 0].max() == round(63 * 64 / 257)
    kept = pack(table, tmp_path / "kept", options=PackOptions(window=(0, 4095)), **QUIET)
    expected = (deep * (255 / 4095)).round().astype(np.uint8)
    assert np.array_equal(kept.take([1])[0, ..., 0], expected)
    assert np.array_equal(
        build_image_cache(kept, tmp_path / "cache", size=8, **QUIET).take([1])[0, ..., 2], expected
    )
    assert np.array_equal(
        pack(
            table, tmp_path / "sized", options=PackOptions(window=(0, 4095)), size=8, **QUIET
        ).take([0])[0, ..., 1],
        expected,
    )
    with pytest.raises(FileExistsError, match="window"):
        pack(table, tmp_path / "kept", options=PackOptions(window=(0, 100)), **QUIET)


@pytest.mark.parametrize("column", ["path", "mask"])
def test_a_missing_path_is_named_in_a_column_of_nullable_text(tmp_path, column):
    table = pd.DataFrame({"path": ["a.png", "b.png"], "mask": ["a.png", "b.png"]})
    table[column] = pd.array(["a.png", None], dtype="string")
    with pytest.raises(
        ValueError, match=f"the column {column} holds a value that is not a path\n  found: <NA>\n"
    ) as error:
        pack(table, tmp_path / "out", masks="mask", **QUIET)
    assert error.value.fix == f"drop the rows without a path: table.dropna(subset=[{column!r}])"


@pytest.mark.parametrize("name", ["T.TSV", "t.Tsv.GZ", "t.csv.tsv"])
def test_the_separator_of_a_tsv_file_does_not_depend_on_the_case_of_its_name(
    flowers, tmp_path, name
):
    file = tmp_path / name
    table = pd.read_csv(flowers / "train.csv")
    compression = "gzip" if name.endswith("GZ") else None
    table.to_csv(file, sep="\t", index=False, compression=compression)
    made = pack(file, tmp_path / "out", **FROM_CSV, root=flowers / "images", **QUIET)
    assert made.classes == sorted(SPECIES)


def test_a_csv_file_in_a_folder_named_tsv_has_commas(flowers, tmp_path):
    file = tmp_path / "old.tsv.csv"
    pd.read_csv(flowers / "train.csv").to_csv(file, index=False)
    made = pack(file, tmp_path / "out", **FROM_CSV, root=flowers / "images", **QUIET)
    assert made.classes == sorted(SPECIES)


def test_the_fix_for_a_tsv_file_has_its_separator(tmp_path):
    file = tmp_path / "T.TSV"
    file.write_bytes("path\tkind\na.png\tB\xe4r\n".encode("latin-1"))
    with pytest.raises(ValueError, match="is not in UTF-8") as error:
        pack(file, tmp_path / "out", labels="kind", **QUIET)
    assert "encoding='latin-1', sep='\\t'" in error.value.fix


LABELS_OF_WORDS = {
    "a word after a number": ([1, "x"], "'x'"),
    "pd.NA before a word": ([pd.NA, "x"], "'x'"),
    "a word before a number": (["x", 1], "'x'"),
    "a number that is too large for an array": ([1, 2**70], str(2**70)),
}


@pytest.mark.parametrize("what", LABELS_OF_WORDS)
def test_the_value_that_is_no_number_is_named(tmp_path, what):
    values, named = LABELS_OF_WORDS[what]
    table = pd.DataFrame({"path": ["a.png", "b.png"], "x": pd.Series(values, dtype=object), "y": 0})
    with pytest.raises(ValueError, match=f"numbers, but 'x' holds {named}\n"):
        pack(table, tmp_path / "out", labels=["x", "y"], **QUIET)


@pytest.mark.parametrize("labels", ["x", ["x", "y"]])
@pytest.mark.parametrize("missing", [pd.NA, None, float("nan"), pd.NaT])
def test_a_missing_number_in_a_column_of_objects_is_named(tmp_path, labels, missing):
    values = pd.Series([1.0, missing], dtype=object)
    table = pd.DataFrame({"path": ["a.png", "b.png"], "x": values, "y": 0})
    with pytest.raises(ValueError, match="label 'x' of row 1 is missing"):
        pack(table, tmp_path / "out", labels=labels, **QUIET)


# The path in the table, the path on the disk, and the code of the fix; "" if no code can mend it.
SPELLINGS = {
    "a blank": (" a.jpg", "a.jpg", ".str.strip()"),
    "a blank after a folder": ("in/a.jpg ", "in/a.jpg", ".str.strip()"),
    "back slashes": ("in\\a.jpg", "in/a.jpg", '.str.replace("\\\\", "/")'),
    "the case of the name": ("Train/A.JPG", "Train/a.jpg", "[^/]*$"),
    "the case of the path": ("Train/A.JPG", "train/a.jpg", ".str.lower()"),
    "capital letters": ("Train/a.jpg", "TRAIN/A.JPG", ".str.upper()"),
    "capital letters of the name": ("Train/a.jpg", "Train/A.JPG", "[^/]*$"),
    "the case of the ending": ("Train/A.jpg", "Train/A.JPG", "[^.]*$"),
    "no ending": ("in/a", "in/a.jpg", ' + ".jpg"'),
    "another name": ("in/a.jpg", "in/b.jpg", ""),
}


@pytest.mark.parametrize("with_root", [True, False])
@pytest.mark.parametrize("what", SPELLINGS)
def test_the_fix_for_another_spelling_gives_the_path_on_the_disk(
    tmp_path, monkeypatch, what, with_root
):
    written, on_disk, code = SPELLINGS[what]
    monkeypatch.chdir(tmp_path)
    root = Path("Photos") if with_root else Path()
    (root / on_disk).parent.mkdir(parents=True, exist_ok=True)
    flower(0).save(root / on_disk, "JPEG")
    table = pd.DataFrame({"path": [written]})
    options = {"root": root} if with_root else {}
    with pytest.raises(OSError, match="cannot be packed") as error:
        pack(table, "out", **options, **QUIET)
    fix = str(error.value).partition("fix: ")[2].rpartition("; or leave such images out")[0]
    if not code:
        assert "table[" not in fix
        return
    assert code in fix
    table["path"] = eval(fix[fix.index("table[") :], {"table": table})
    assert len(pack(table, "out", **options, **QUIET)) == 1


def test_words_that_differ_by_a_zero_have_the_same_numbers_in_every_process():
    words = ["type1", "type01", "a", "type001"]
    assert in_order(words) == in_order(words[::-1]) == ["a", "type001", "type01", "type1"]


def test_labels_of_float16_are_read_without_a_warning():
    table = pd.DataFrame({"age": np.array([1.5, 2], np.float16)})
    assert as_labels([table["age"]], ["age"]).tolist() == [[1.5], [2.0]]
