"""index_images and PEImages: every row finds its file in one scan, and every pixel is Pillow's."""

import pickle

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")

from tpukit.pe import COLUMNS, LABELS, PEImages, index_images  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """Two studies of three images of noise, positions 9 to 11."""
    rng = np.random.default_rng(0)
    for study in "ab":
        into = tmp_path / study / f"{study}s"
        into.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(
                into / f"{i + 9:03d}_{study}{i}.jpg"
            )
    return tmp_path


@pytest.fixture
def labels():
    ids = [[study, f"{study}s", f"{study}{i}"] for study in "ba" for i in (1, 0, 2)]
    return pd.DataFrame([row + [n % 2] * 14 for n, row in enumerate(ids)], columns=COLUMNS)


def test_every_row_finds_its_file_whatever_its_order(folder, labels):
    table = index_images(labels.sample(frac=1, random_state=3), folder)
    for row in table.itertuples():
        assert row.path == str(
            folder
            / row.StudyInstanceUID
            / row.SeriesInstanceUID
            / f"{row.position:03d}_{row.SOPInstanceUID}.jpg"
        )
    assert table.index.tolist() == list(range(6))
    assert "path" not in labels


def test_a_missing_file_is_named_with_a_fix_and_the_fix_works(folder, labels, capsys):
    (folder / "a" / "as" / "009_a0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 6 images.*(\n.*)*a/as/\*_a0.jpg(\n.*)*fix:"):
        index_images(labels, folder)
    table = index_images(labels, folder, missing="drop")
    assert table.SOPInstanceUID.tolist() == ["b1", "b0", "b2", "a1", "a2"]
    assert "left out 1 of 6 rows" in capsys.readouterr().out


def test_files_without_a_row_are_counted_once(folder, labels, capsys):
    index_images(labels.head(4), folder)
    assert capsys.readouterr().out.splitlines() == [
        f"2 images in {folder} have no row in the labels and are not used"
    ]
    twice = pd.concat([labels, labels.head(3)])
    assert len(index_images(twice, folder)) == 9
    assert capsys.readouterr().out == ""


def test_labels_without_a_row_give_a_table_without_a_row(folder, labels):
    table = index_images(labels.iloc[:0], folder)
    assert len(table) == 0
    assert {"path", "position"} < set(table.columns)


def test_studies_without_a_row_are_not_looked_into(folder, labels, capsys):
    table = index_images(labels[labels.StudyInstanceUID == "b"], folder)
    assert len(table) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "no folder"),
        ("empty", "an empty folder"),
        ("a", "looked for b/<series>/<position>_<image>.jpg"),
    ],
)
def test_a_folder_without_the_images_is_refused(folder, labels, where, said):
    (folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="fix:") as error:
        index_images(labels, folder / where)
    assert said in str(error.value)


def test_other_files_in_the_folder_do_no_harm(folder, labels):
    (folder / "a" / "as" / ".DS_Store").write_text("")
    (folder / "a" / "as" / "notes_a0.txt").write_text("")
    (folder / "a" / "readme.txt").write_text("")
    (folder / "train.txt").write_text("")
    assert len(index_images(labels, folder)) == 6


@pytest.mark.parametrize("size", [None, 64, 48, 20, 100])
def test_pixels_are_pillows_to_the_last_bit(folder, labels, size):
    table = index_images(labels, folder)
    image, target = PEImages(table, size)[4]
    with Image.open(table.path[4]) as file:
        truth = (
            file.convert("RGB")
            if size is None
            else file.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        )
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    assert torch.equal(image, torch.tensor(np.asarray(truth)).permute(2, 0, 1))
    assert target.dtype == torch.float32
    assert target.tolist() == table.loc[4, list(LABELS)].tolist()


def test_a_grey_jpeg_becomes_three_channels(folder, labels):
    table = index_images(labels, folder)
    Image.new("L", (64, 64), 77).save(table.path[0])
    image, _ = PEImages(table, 32)[0]
    assert image.shape == (3, 32, 32)
    assert image.unique().tolist() == [77]


def test_a_dataset_can_be_pickled_and_batched(folder, labels):
    images = pickle.loads(pickle.dumps(PEImages(index_images(labels, folder), 32)))
    pixels, targets = torch.utils.data.default_collate([images[i] for i in range(len(images))])
    assert (tuple(pixels.shape), tuple(targets.shape)) == ((6, 3, 32, 32), (6, 10))


BROKEN_FILES = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:600]),
    "empty": lambda path: path.write_bytes(b""),
    "no JPEG at all": lambda path: path.write_text("<html>404</html>"),
    "zeros in its data": lambda path: path.write_bytes(
        path.read_bytes()[:900] + bytes(64) + path.read_bytes()[964:]
    ),
    "only the header is whole": lambda path: path.write_bytes(path.read_bytes()[:200] + bytes(100)),
}


@pytest.mark.parametrize("broken", BROKEN_FILES)
def test_a_corrupt_jpeg_is_named_with_its_index_and_a_fix(folder, labels, broken):
    table = index_images(labels, folder)
    path = folder / "b" / "bs" / "011_b2.jpg"
    BROKEN_FILES[broken](path)
    with pytest.raises(OSError, match="fix:") as error:
        PEImages(table)[2]
    assert f"image 2 of 6 cannot be decoded: {path}" in str(error.value)


def test_a_file_that_went_away_is_named_with_its_index_and_a_fix(folder, labels):
    images = PEImages(index_images(labels, folder))
    (folder / "b" / "bs" / "010_b1.jpg").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"image 0 of 6 no longer exists: .*010_b1.jpg\n.*fix:"
    ):
        images[0]


def test_a_table_without_paths_says_what_to_call(labels):
    with pytest.raises(ValueError, match=r"fix: +PEImages\(tpukit.pe.index_images"):
        PEImages(labels)


def test_an_index_past_the_end_ends_a_loop(folder, labels):
    assert len(list(PEImages(index_images(labels, folder), 16))) == 6


def test_two_files_of_one_image_are_told(tmp_path):
    table = pd.DataFrame(
        [{"StudyInstanceUID": "a", "SeriesInstanceUID": "s", "SOPInstanceUID": "i"}]
    )
    (tmp_path / "a" / "s").mkdir(parents=True)
    for name in ("0001_i.jpg", "0005_i.jpg"):
        (tmp_path / "a" / "s" / name).write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=r"two files hold the same image: .*0001_i.jpg and .*0005_i.jpg\n  found: .*\n  fix:",
    ):
        index_images(table, tmp_path)
    (tmp_path / "a" / "s" / "0005_i.jpg").unlink()
    assert index_images(table, tmp_path).position.tolist() == [1]
