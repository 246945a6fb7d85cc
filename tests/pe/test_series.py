"""Series in the order of the body: whatever the names, the numbers and the way the patient lay; odd ones are said."""

import pytest

np = pytest.importorskip("numpy")
pydicom = pytest.importorskip("pydicom")
Image = pytest.importorskip("PIL.Image")

from tpukit.pe.phantoms.dicom_files import Place, write_dicom  # noqa: E402
from tpukit.pe.series import (  # noqa: E402
    CHUNK,
    arrange,
    find_files,
    header_type,
    read_headers,
    turn,
    without_other_kinds,
)

HEAD_FIRST = [1, 0, 0, 0, 1, 0]


def headers(places, *, numbers=None, orientation=HEAD_FIRST, series="s", axis=2, shape=(8, 8)):
    """Return headers of one series of slices at these places in mm along an axis."""
    made = np.zeros(len(places), header_type())
    made["series"], made["orientation"], made["shape"] = series.encode(), orientation, shape
    made["number"] = range(len(places)) if numbers is None else numbers
    made["position"][:, axis] = places
    return made


ORIENTATIONS = {
    "head first": (HEAD_FIRST, 2),
    "feet first, stored mirrored": ([-1, 0, 0, 0, 1, 0], 2),
    "on the belly": ([-1, 0, 0, 0, -1, 0], 2),
    "the gantry tilted": ([1, 0, 0, 0, 0.97, -0.26], 2),
    "coronal": ([1, 0, 0, 0, 0, -1], 1),
    "sagittal": ([0, 1, 0, 0, 0, -1], 0),
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [3, 2, 1, 0], [5, 5, 5, 5]])
def test_slices_are_in_the_order_of_the_axis_they_are_stacked_along(orientation, numbers):
    directions, axis = ORIENTATIONS[orientation]
    order, _ = arrange(
        headers([30, -20, 0, 10.5], numbers=numbers, orientation=directions, axis=axis)
    )
    assert order.tolist() == [1, 2, 3, 0]


def test_series_stay_apart():
    order, noticed = arrange(
        np.concatenate([headers([2, 1, 3], series="b"), headers([2, 3, 1], series="a")])
    )
    assert order.tolist() == [5, 3, 4, 1, 0, 2]


def localizer():
    return np.concatenate(
        [headers([4, 2, 0], numbers=[7, 8, 9]), headers([1], orientation=[1, 0, 0, 0, 0, -1])]
    )


def two_sizes():
    return np.concatenate([headers([0, 1]), headers([2], shape=(9, 8))])


def placeless():
    made = headers([4, 2, 0])
    made["position"][1] = np.nan
    return made


def unscaled():
    made = headers([0, 2, 4])
    made["unscaled"][1] = True
    return made


def two_scales():
    made = headers([0, 2, 4])
    made["scale"] = [(1, -1024), (1, -1024), (1, 0)]
    return made


def airless():
    made = headers([0, 2, 4])
    made["airless"][1] = True
    return made


def unnamed():
    made = headers([0, 2, 4])
    made["unnamed"][1] = True
    return made


ODD = {  # the series, its order, what is said
    "one slice": (headers([3]), [0], "1 series of a single slice"),
    "a gap": (
        headers([0, 2, 4, 10, 12], numbers=[1, 2, 3, 6, 7]),
        [0, 1, 2, 3, 4],
        "2 slices are missing between others",
    ),
    "a gap among three": (
        headers([0, 2, 6], numbers=[1, 2, 4]),
        [0, 1, 2],
        "1 slices are missing between others",
    ),
    "another spacing": (
        headers([0, 2, 4, 10, 16]),
        [0, 1, 2, 3, 4],
        "1 series whose spacing changes, though their slices are numbered without a gap",
    ),
    "no orientation": (
        headers([4, 0, 2], orientation=[np.nan] * 6),
        [1, 2, 0],
        "3 slices without an orientation: axial slices are assumed",
    ),
    "a tilted gantry": (
        headers([0, 2, 4], orientation=[1, 0, 0, 0, 0.97, -0.26]),
        [0, 1, 2],
        "1 series with a tilted gantry",
    ),
    "two scales": (two_scales(), [0, 1, 2], "1 series whose slices differ in RescaleSlope or"),
    "no value for air": (airless(), [0, 1, 2], "1 slices whose values cannot hold air"),
    "two at one place": (headers([0, 2, 2, 4]), [0, 1, 2, 3], "1 slices at the same position as another"),
    "all at one place": (headers([2, 2]), [0, 1], "1 slices at the same position as another"),
    "two sizes": (two_sizes(), [0, 1, 2], "1 series whose slices differ in size"),
    "numbered downwards": (headers([4, 2, 0]), [2, 1, 0], "1 series numbered from the head to the feet"),
    "mirrored": (headers([0, 2], orientation=[-1, 0, 0, 0, 1, 0]), [0, 1], "1 series stored mirrored"),
    "a localizer": (localizer(), [3, 2, 1, 0], "1 slices of another orientation"),
    "one without a place": (placeless(), [1, 2, 0], "1 slices without a position"),
    "one without a slope": (unscaled(), [0, 1, 2], "1 slices without RescaleSlope"),
    "one without a modality": (unnamed(), [0, 1, 2], "1 slices without a Modality: they are treated as CT"),
    "lying": (headers([0, 2], orientation=[0, 1, 0, -1, 0, 0]), [0, 1], "1 series stored mirrored, upside down or ly"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_what_is_unusual_is_put_right_or_said(odd):
    series, expected, said = ODD[odd]
    order, noticed = arrange(series)
    assert order.tolist() == expected
    assert any(
        sentence.startswith(said) and sentence.endswith("series s") for sentence in noticed
    ), noticed


def test_nothing_is_said_about_series_as_they_should_be():
    assert (
        arrange(np.concatenate([headers([0, 1.25, 2.5, 3.75]), headers([-7, -5, -3], series="t")]))[
            1
        ]
        == []
    )


@pytest.mark.parametrize("small", [[0.0049, 0.0051], [0.004, 0.006], [-0.008, 0.008]])
def test_angles_on_both_sides_of_a_rounding_edge_are_one_orientation(small):
    made = headers(range(0, 20, 2))
    made["orientation"][:, 4] = 1 - np.resize(small, 10) ** 2
    made["orientation"][:, 5] = np.resize(small, 10)
    order, noticed = arrange(made)
    assert order.tolist() == list(range(10))
    assert noticed == []


AXES = np.array([[1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("flip", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("lying", [False, True])
@pytest.mark.parametrize("tilt", [0, 20, -35])
def test_axial_images_are_turned_until_rows_go_to_the_left_and_columns_to_the_back(
    flip, lying, tilt
):
    # Greys that say where in the patient a pixel lies: 1 for each step to the left, 10 for each to the back.
    angle = np.radians(tilt)
    axes = AXES @ [[np.cos(angle), np.sin(angle), 0], [-np.sin(angle), np.cos(angle), 0], [0, 0, 1]]
    row, column = (flip[0] * axes[int(lying)], flip[1] * axes[int(not lying)])
    steps = np.arange(3) - 1
    place = steps[None, :, None] * row + steps[:, None, None] * column
    greys = (100 + place @ [10, 40, 0]).round().astype(np.uint8)
    how = turn([*row, *column])
    image = Image.fromarray(greys)
    upright = np.asarray(image.transpose(Image.Transpose[how]) if how else image).astype(int)
    assert (np.diff(upright, axis=0).min(), np.diff(upright, axis=1).min()) > (0, 0)
    if not tilt:
        assert upright.tolist() == [[50, 60, 70], [90, 100, 110], [130, 140, 150]]
    assert (how is None) == (flip == (1, 1) and not lying)


@pytest.mark.parametrize("orientation", [[1, 0, 0, 0, 0, -1], [0, 1, 0, 0, 0, -1]])
def test_other_planes_stay_as_they_are(orientation):
    assert turn(orientation) is None


def write(path, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    place = {"study": "st", "series": "se", "image": path.stem, "number": 1, "z": 2.5, "pixel": 0.5}
    write_dicom(path, np.zeros((6, 8)), Place(**{**place, **changes}))
    return path


def test_headers_hold_what_the_files_say(tmp_path):
    write(tmp_path / "in" / "b" / "y.dcm", image="i1", z=7.25, number=4)
    write(tmp_path / "in" / "a" / "1.2.840.77", image="i2", series="other")
    (tmp_path / "work").mkdir()
    names = find_files(tmp_path / "in")
    assert names == ["a/1.2.840.77", "b/y.dcm"]
    found, others = read_headers(tmp_path / "in", names, tmp_path / "work", 2, "off")
    assert others == []
    assert found["image"].tolist() == [b"i2", b"i1"]
    assert found["series"].tolist() == [b"other", b"se"]
    assert found["position"][1].tolist() == [-1.25, -1.25, 7.25]
    assert found["orientation"].tolist() == [HEAD_FIRST] * 2
    assert (found["shape"].tolist(), found["number"].tolist()) == ([[6, 8]] * 2, [1, 4])


@pytest.mark.parametrize("name", [".hidden.dcm", "DICOMDIR", ".git/x.dcm", "__MACOSX/x.dcm"])
def test_hidden_files_and_indices_are_ignored(tmp_path, name):
    write(tmp_path / "x.dcm")
    write(tmp_path / name)
    assert find_files(tmp_path) == ["x.dcm"]


@pytest.mark.parametrize("name", ["x.IMA", "notes.txt", "a/x.csv", "IM0001", "1.2.840.7"])
@pytest.mark.parametrize("without_preamble", [False, True])
def test_a_file_is_dicom_by_its_content(tmp_path, name, without_preamble, capsys):
    path = write(tmp_path / name)
    if without_preamble:
        path.write_bytes(path.read_bytes()[132:])
    assert find_files(tmp_path) == [name]
    found, others = read_headers(tmp_path, [name], work_in(tmp_path), 1, "off")
    assert (len(found), others) == (1, [])
    assert capsys.readouterr().out == ""


def test_files_that_are_not_dicom_are_counted_by_their_ending(tmp_path, capsys):
    write(tmp_path / "in" / "x.dcm")
    (tmp_path / "in" / "LICENSE").write_text("of something else")
    for name in ("a.png", "b.PNG", "y.dcm"):
        (tmp_path / "in" / name).write_text("")
    names = find_files(tmp_path / "in")
    assert names == ["x.dcm", "y.dcm"]
    assert "left out 3 files in" in (said := capsys.readouterr().out)
    assert "that are not DICOM: 2 .png, 1 without an ending" in said
    found, others = read_headers(tmp_path / "in", names, work_in(tmp_path), 1, "off")
    assert len(found) == 1
    assert others == [[1, "not a DICOM file (0 bytes)"]]


def work_in(tmp_path):
    work = tmp_path / ".work"
    work.mkdir()
    return work


OTHER_KINDS = {
    "localizers (ImageType LOCALIZER)": {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]},
    "RescaleType MGML": {"RescaleType": "MGML"},
    "secondary captures": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"},
    "modality PT": {"Modality": "PT"},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_images_without_hounsfield_units_are_left_out_by_kind(tmp_path, kind, capsys):
    names = ["a.dcm", "b.dcm"]
    for name in names:
        path = write(tmp_path / name)
    file = pydicom.dcmread(path)
    for tag, value in OTHER_KINDS[kind].items():
        setattr(file, tag, value)
    file.save_as(path)
    found, others = read_headers(tmp_path, names, work_in(tmp_path), 1, "off")
    assert found["file"].tolist() == [0]
    assert without_other_kinds(tmp_path, names, others) == []
    assert (
        f"left out 1 files of {kind} in {tmp_path}, for instance b.dcm" in capsys.readouterr().out
    )


def test_series_of_two_studies_with_one_identifier_stay_apart():
    made = np.concatenate([headers([0, 2], series="1.2.3"), headers([1, 3], series="1.2.3")])
    made["study"][:2] = b"one"
    made["study"][2:] = b"two"
    assert arrange(made)[0].tolist() == [0, 1, 2, 3]


def test_identifiers_of_any_length_stay_apart(tmp_path):
    for number in range(3):
        write(tmp_path / f"{number}.dcm", image=f"1.2.{'7' * 70}.{number}")
    names = find_files(tmp_path)
    found, _ = read_headers(tmp_path, names, work_in(tmp_path), 1, "off")
    assert len(set(found["image"].tolist())) == 3


def test_a_file_that_was_damaged_and_copied_again_is_read(tmp_path):
    path = write(tmp_path / "in" / "x.dcm")
    whole = path.read_bytes()
    (tmp_path / "work").mkdir()
    for data, slices in ((whole[:200], 0), (whole, 1)):
        path.write_bytes(data)
        found, others = read_headers(tmp_path / "in", ["x.dcm"], tmp_path / "work", 1, "off")
        assert (len(found), len(others)) == (slices, 1 - slices)


def test_a_link_to_a_missing_file_is_damaged_and_ends_no_reading(tmp_path):
    write(tmp_path / "in" / "x.dcm")
    (tmp_path / "in" / "gone.dcm").symlink_to("nowhere.dcm")
    names = find_files(tmp_path / "in")
    assert names == ["gone.dcm", "x.dcm"]
    found, others = read_headers(tmp_path / "in", names, tmp_path / "work", 1, "off")
    assert (found["file"].tolist(), others) == (
        [1],
        [[0, "a symbolic link to a file that does not exist"]],
    )


def test_links_to_folders_are_not_followed_and_said(tmp_path, capsys):
    write(tmp_path / "in" / "x.dcm")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    assert find_files(tmp_path / "in") == ["x.dcm"]
    assert "1 links to folders in" in capsys.readouterr().out


def test_a_folder_without_dicom_says_what_is_in_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_files(tmp_path / "nowhere")
    (tmp_path / "x.jpg").write_text("")
    with pytest.raises(
        FileNotFoundError, match=r"holds no DICOM file\n  found: \['x.jpg'\]\n  fix:"
    ):
        find_files(tmp_path)


def test_headers_are_read_again_only_where_they_are_missing_or_a_file_has_changed(tmp_path):
    names = [f"{number:04}.dcm" for number in range(CHUNK + 3)]
    for name in names:
        write(tmp_path / "in" / name)
    work = tmp_path / "work"
    work.mkdir()
    first, _ = read_headers(tmp_path / "in", names, work, 2, "off")
    before = (work / "headers-000000.npy").stat().st_mtime_ns
    (work / "headers-000001.json").unlink()
    again, others = read_headers(tmp_path / "in", names, work, 1, "off")
    assert again.tobytes() == first.tobytes()
    assert others == []
    write(tmp_path / "in" / names[-1], z=7.5)
    changed, _ = read_headers(tmp_path / "in", names, work, 1, "off")
    assert changed["position"][:, 2].tolist() == [2.5] * (CHUNK + 2) + [7.5]
    assert (work / "headers-000000.npy").stat().st_mtime_ns == before
