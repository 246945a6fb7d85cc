"""pack_dicom: series become records once and in order, whatever ends it; every pixel is that of the slice alone."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("array_record")
pytest.importorskip("scipy")

from PIL import features  # noqa: E402
from pydicom import uid  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402

import tpukit  # noqa: E402
from tpukit import launch  # noqa: E402
from tpukit.datasets import PackOptions  # noqa: E402
from tpukit.essentials.data.batches import Batches  # noqa: E402
from tpukit.pe import (  # noqa: E402
    LABELS,
    hounsfield,
    index_dicom,
    pack_dicom,
    phantom,
    read_dicom,
    read_labels,
    three_windows,
)  # noqa: E402
from tpukit.pe.ct import to_grey  # noqa: E402
from tpukit.pe.phantoms.dicom_files import Place, write_dicom  # noqa: E402

KIT = Path(__file__).parents[2]
QUIET = {"progress": "off"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three studies of five slices of 64 pixels, and their labels."""
    pytest.importorskip("pydicom")
    return phantom(
        tmp_path_factory.mktemp("phantom"), 3, 5, size=64, form="dicom", workers=2, progress="off"
    )


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "train", tmp_path / "train")


def paths(folder):
    return sorted(Path(folder).rglob("*.dcm"))


def change(path, **tags):
    file = pydicom.dcmread(path)
    for name, value in tags.items():
        setattr(file, name, value)
    file.save_as(path)


def decoded(records):
    return np.stack([image.permute(1, 2, 0).numpy() for image, _ in records])


def resized(array, size):
    return np.asarray(Image.fromarray(array).resize((size, size), Image.Resampling.BILINEAR))


def test_a_record_is_the_slice_through_three_windows_with_the_labels_of_its_row(
    made, tmp_path, capsys
):
    labels = read_labels(made)
    records = pack_dicom(
        made / "train",
        tmp_path / "records",
        labels,
        size=48,
        options=PackOptions(quality=95),
        **QUIET,
    )
    assert (len(records), records.shape, records.names) == (15, (48, 48, 3), list(LABELS))
    assert "3 series numbered from the head to the feet" in capsys.readouterr().out
    for number in range(len(records)):
        row = labels.loc[records.rows[number]]
        path = made / "train" / records.name(number)
        assert path.stem == row.SOPInstanceUID
        image, target = records[number]
        assert target.tolist() == row[list(LABELS)].tolist()
        assert records.group_names[records.groups[number]] == row.StudyInstanceUID
        expected = resized(three_windows(read_dicom(path)), 48)
        assert (
            abs(image.permute(1, 2, 0).numpy().astype(int) - expected).mean() < 3
        )  # of noise, at quality 95


def test_a_series_lies_in_one_piece_from_the_feet_to_the_head(made, tmp_path):
    records = pack_dicom(made / "train", tmp_path / "records", size=16, **QUIET)
    packed = [made / "train" / records.name(number) for number in range(len(records))]
    z = np.array([pydicom.dcmread(path).ImagePositionPatient[2] for path in packed]).reshape(3, 5)
    assert (np.diff(z, axis=1) > 0).all()
    assert [len({path.parent for path in packed[k : k + 5]}) for k in (0, 5, 10)] == [1, 1, 1]
    assert (records.labels.shape, records.rows.tolist()) == ((15, 0), list(range(15)))


@pytest.mark.parametrize("window", ["embolism", (100, 700)])
def test_one_window_has_the_neighbouring_slices_as_colours(made, tmp_path, window):
    labels = read_labels(made)
    # Small files, so that neighbours are in another one.
    records = pack_dicom(
        made / "train",
        tmp_path / "r",
        labels,
        window=window,
        size=64,
        options=PackOptions(shard_size=2, quality=95),
        **QUIET,
    )
    slices = [
        to_grey(read_dicom(made / "train" / records.name(number)), 100, 700) for number in range(15)
    ]
    for number, image in enumerate(decoded(records)):
        first, last = number // 5 * 5, number // 5 * 5 + 4
        around = [slices[max(number - 1, first)], slices[number], slices[min(number + 1, last)]]
        for color, expected in enumerate(around):
            errors = [abs(image[..., color].astype(int) - other).mean() for other in slices]
            assert np.argmin(errors) == [other is expected for other in slices].index(True)


@pytest.mark.parametrize("size", [64, 40])
def test_int16_gives_the_hounsfield_units_back(made, tmp_path, size):
    records = pack_dicom(made / "train", tmp_path / "records", form="int16", size=size, **QUIET)
    assert (records.encoding, records.shape) == ("uint8", (size, size, 2))
    ((batch, _),) = [(images.clone(), labels) for images, labels in Batches(records, batch_size=15)]
    units = hounsfield(batch)
    assert (units.shape, units.dtype) == ((15, 1, size, size), torch.float32)
    for number in range(15):
        expected = np.rint(resized(read_dicom(made / "train" / records.name(number)), size))
        assert np.array_equal(units[number, 0].numpy(), expected)
    cache = tpukit.cached_images(records, size=size, progress="off")
    assert cache.shape == records.shape
    assert np.array_equal(cache.take(range(15)), records.take(range(15)))


def test_a_damaged_slice_takes_its_neighbours_along_where_they_show_it(folder, tmp_path):
    whole = pack_dicom(folder, tmp_path / "whole", size=16, window="lung", **QUIET)
    path = folder / whole.name(2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"3 of 15 images .* damaged= allows 10%(.*\n)*  fix: .* damaged=0.2"
    ):
        pack_dicom(folder, tmp_path / "rest", size=16, window="lung", damaged="skip", **QUIET)
    records = pack_dicom(folder, tmp_path / "rest", size=16, window="lung", damaged=0.2, **QUIET)
    assert [skipped["row"] for skipped in records.skipped] == [1, 2, 3]


def test_labels_without_their_columns_are_refused(made, tmp_path):
    with pytest.raises(ValueError, match=r"have no column central_pe\n  found: [^\n]*\n  fix:"):
        pack_dicom(
            made / "train", tmp_path / "records", read_labels(made).drop(columns="central_pe")
        )


STORED = {  # by what makes it of an upright one
    (-1, 0, 0, 0, 1, 0): lambda upright: upright[:, ::-1],
    (-1, 0, 0, 0, -1, 0): lambda upright: upright[::-1, ::-1],
    (1, 0, 0, 0, -1, 0): lambda upright: upright[::-1],
    (0, 1, 0, -1, 0, 0): lambda upright: np.rot90(
        upright
    ),  # a row goes to the back, a column to the right
}


@pytest.fixture(scope="module")
def upright(made, tmp_path_factory):
    return pack_dicom(
        made / "train", tmp_path_factory.mktemp("upright"), form="int16", size=32, **QUIET
    )


@pytest.mark.parametrize("orientation", STORED)
def test_images_that_are_stored_mirrored_upside_down_or_lying_are_turned(
    folder, upright, tmp_path, orientation, capsys
):
    for path in paths(folder):
        stored = STORED[orientation](pydicom.dcmread(path).pixel_array)
        change(path, PixelData=stored.tobytes(), ImageOrientationPatient=list(orientation))
    records = pack_dicom(folder, tmp_path / "turned", form="int16", size=32, **QUIET)
    assert [records.name(k) for k in range(15)] == [upright.name(k) for k in range(15)]
    assert (
        abs(
            hounsfield(torch.stack([x for x, _ in records]))
            - hounsfield(torch.stack([x for x, _ in upright]))
        )
        <= 1
    ).all()
    assert (
        "3 series stored mirrored, upside down or lying: their images are turned"
        in capsys.readouterr().out
    )


def test_a_row_without_a_file_is_named_with_a_fix_and_the_fix_works(made, folder, tmp_path, capsys):
    labels = read_labels(made)
    gone = paths(folder)[3]
    gone.unlink()
    with pytest.raises(
        FileNotFoundError, match=f"1 of 15 images are not in(.*\n)*.*{gone.stem}\n  fix:"
    ):
        pack_dicom(folder, tmp_path / "records", labels, size=16, **QUIET)
    records = pack_dicom(folder, tmp_path / "records", labels, size=16, missing="drop", **QUIET)
    assert "left out 1 of 15 rows" in capsys.readouterr().out
    assert sorted(labels.SOPInstanceUID[records.rows]) == sorted(
        path.stem for path in paths(folder)
    )
    assert [Path(records.name(k)).stem for k in range(14)] == labels.SOPInstanceUID[
        records.rows
    ].tolist()


def test_some_rows_of_the_labels_pack_some_slices(made, tmp_path, capsys):
    labels = read_labels(made)
    some = labels[labels.StudyInstanceUID == labels.StudyInstanceUID[7]]
    records = pack_dicom(made / "train", tmp_path / "records", some, size=16, **QUIET)
    assert len(records) == 5
    assert "10 slices in" in capsys.readouterr().out
    assert [Path(records.name(k)).stem for k in range(5)] == some.SOPInstanceUID.iloc[
        records.rows
    ].tolist()
    assert records.labels.tolist() == some[list(LABELS)].iloc[records.rows].to_numpy().tolist()


def test_two_files_of_one_image_count_once(folder, tmp_path, capsys):
    shutil.copy(paths(folder)[0], folder / "copy.dcm")
    assert len(pack_dicom(folder, tmp_path / "records", size=16, **QUIET)) == 15
    assert "files left out, because another file has the same image: 1\n" in capsys.readouterr().out


def test_slices_of_other_sizes_are_resized_and_said(folder, tmp_path, capsys):
    smaller = np.zeros((32, 48), "<i2")
    change(paths(folder)[0], PixelData=smaller.tobytes(), Rows=32, Columns=48)
    assert pack_dicom(folder, tmp_path / "records", size=16, **QUIET).shape == (16, 16, 3)
    assert "1 series whose slices differ in size" in capsys.readouterr().out


DAMAGES = {
    "no DICOM": lambda path: path.write_text("x"),
    "a header that is cut off": lambda path: path.write_bytes(path.read_bytes()[:300]),
    "pixels that are cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_can_be_left_out(folder, tmp_path, damage):
    path = paths(folder)[4]
    DAMAGES[damage](path)
    with pytest.raises(OSError, match="fix:") as error:
        pack_dicom(folder, tmp_path / "records", size=16, **QUIET)
    assert path.name in str(error.value)
    assert str(error.value).count("fix:") == 1
    records = pack_dicom(folder, tmp_path / "records", size=16, damaged="skip", **QUIET)
    assert path.name not in [Path(records.name(k)).name for k in range(len(records))]
    assert len(records) == 14


def test_files_of_other_modalities_are_left_out_by_name_and_are_no_damage(folder, tmp_path, capsys):
    change(paths(folder)[0], Modality="SR", RescaleSlope=None)
    for path in paths(folder)[5:10]:
        change(path, Modality="PT", RescaleSlope=1.7)
    assert len(pack_dicom(folder, tmp_path / "records", size=16, **QUIET)) == 9
    said = capsys.readouterr().out
    assert f"left out 5 files of modality PT in {folder}, for instance" in said
    assert "left out 1 files of modality SR" in said
    for path in paths(folder):
        change(path, Modality="MR")
    with pytest.raises(
        ValueError, match=r"none of the 15 files .* is a CT slice\n  found: .*: modality MR\n  fix:"
    ):
        pack_dicom(folder, tmp_path / "none", size=16, **QUIET)


def test_a_damaged_slice_is_copied_again_and_the_pack_goes_on(made, folder, tmp_path):
    path, to = paths(folder)[-1], tmp_path / "records"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match="copy it again"):
        pack_dicom(folder, to, size=16, options=PackOptions(shard_size=3, workers=1), **QUIET)
    before = {path: path.stat().st_mtime_ns for path in written(to)}
    assert any(path.suffix == ".array_record" for path in before)
    shutil.copy(made / "train" / path.relative_to(folder), path)
    assert (
        len(pack_dicom(folder, to, size=16, options=PackOptions(shard_size=3, workers=1), **QUIET))
        == 15
    )
    assert {path: path.stat().st_mtime_ns for path in to.glob("*.array_record")}.items() >= {
        (path, time) for path, time in before.items() if path.suffix == ".array_record"
    }


@pytest.mark.parametrize("finished", [True, False])
def test_files_of_other_sizes_under_the_names_of_packed_ones_are_another_pack(
    folder, tmp_path, finished
):
    arguments = {
        "to": tmp_path / "records",
        "size": 16,
        "options": PackOptions(shard_size=3, workers=1),
        **QUIET,
    }
    whole = paths(folder)[-1].read_bytes()
    if not finished:
        paths(folder)[-1].write_bytes(whole[:-100])
        with pytest.raises(OSError, match="copy it again"):
            pack_dicom(folder, **arguments)
        paths(folder)[-1].write_bytes(whole)
    else:
        pack_dicom(folder, **arguments)
    for path in paths(folder):
        change(path, ImageComments="another file")
    with pytest.raises(FileExistsError, match="files have another size, for instance"):
        pack_dicom(folder, **arguments)
    for path in paths(folder):
        del (file := pydicom.dcmread(path)).ImageComments
        file.save_as(path)
    assert len(pack_dicom(folder, **arguments)) == 15


def test_before_anything_is_packed_other_files_under_the_same_names_are_arranged_anew(
    folder, tmp_path
):
    whole = paths(folder)[-1].read_bytes()
    paths(folder)[-1].write_bytes(whole[:-100])
    with pytest.raises(OSError, match="copy it again"):
        pack_dicom(folder, tmp_path / "records", size=16, **QUIET)
    paths(folder)[-1].write_bytes(whole)
    for path in paths(folder):
        x, y, z = pydicom.dcmread(path).ImagePositionPatient
        change(path, ImagePositionPatient=[x, y, -z])
    records = pack_dicom(folder, tmp_path / "records", size=16, **QUIET)
    z = [
        pydicom.dcmread(folder / records.name(number)).ImagePositionPatient[2]
        for number in range(15)
    ]
    assert (np.diff(np.reshape(z, (3, 5)), axis=1) > 0).all()


def test_more_files_that_are_no_slices_than_a_tenth_are_rather_a_wrong_folder(folder, tmp_path):
    for number in range(85):
        (folder / f"{number}.dcm").write_text("x")
    for damaged in ("raise", "skip", 0.84):
        with pytest.raises(
            OSError,
            match=r"85 of 100 files (.*\n)*  fix: .* pack_dicom\(..., damaged=0.85\)",
        ):
            pack_dicom(folder, tmp_path / "records", size=16, damaged=damaged, **QUIET)
    assert len(pack_dicom(folder, tmp_path / "records", size=16, damaged=0.85, **QUIET)) == 15


def test_too_many_open_files_leave_no_slice_out(folder, tmp_path):
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import numpy, PIL.Image\n"
        "from tpukit.pe.dicom_slices import Slices, read_slice; from tpukit.datasets.pack_shards import prepare\n"
        "from tpukit.datasets.pixel_form import PixelForm\n"
        "read_slice(sys.argv[2])\n"
        "slices = Slices(Path(sys.argv[1]), '', {'pixels': 16, 'window': None, 'form': 'int16'})\n"
        "slices._names = [sys.argv[2]]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: print(prepare(slices, 0, None, PixelForm()))\n"
        "except OSError as error: print('raised', error.strerror)"
    )
    (tmp_path / "names").write_bytes(b"x\0")
    np.save(tmp_path / "neighbours.npy", np.zeros((1, 2), int))
    code = [sys.executable, "-c", code, tmp_path, paths(folder)[0]]
    ran = subprocess.run(code, cwd=KIT, capture_output=True, text=True)
    assert ran.stdout == "raised Too many open files\n", ran.stderr


def test_a_folder_without_any_slice_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "LICENSE").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"holds no DICOM file\n  found: \['LICENSE'\]"):
        pack_dicom(tmp_path / "in", tmp_path / "records", **QUIET)
    (tmp_path / "in" / "x.dcm").write_text("x")
    with pytest.raises(
        ValueError, match="none of the 1 files in .* is a CT slice\n  found: .*x.dcm.*\n  fix:"
    ):
        pack_dicom(tmp_path / "in", tmp_path / "records", **QUIET)


def test_a_missing_decoder_is_named_before_anything_is_decoded(folder, tmp_path):
    path = paths(folder)[4]
    file = pydicom.dcmread(path)
    file.file_meta.TransferSyntaxUID = uid.MPEG2MPML  # which pydicom never decodes
    file.PixelData = encapsulate([b"0123"])
    file.save_as(path)
    with pytest.raises(
        ImportError, match=f"{path.name} is compressed, and no installed(.*\n)*.*MPEG2(.*\n)*.*fix:"
    ):
        pack_dicom(folder, tmp_path / "records", size=16, **QUIET)
    assert not list((tmp_path / "records").glob("*.array_record"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "png"},
        {"options": PackOptions(quality=96)},
        {"size": 0},
        {"size": []},
        {"window": "bone"},
        {"window": (100, 0)},
        {"window": 7},
        {"missing": "skip"},
        {"damaged": "drop"},
        {"form": "int16", "window": "lung"},
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_before_anything_is_written(
    made, tmp_path, wrong
):
    with pytest.raises(ValueError, match="quality" if "options" in wrong else next(iter(wrong))):
        pack_dicom(made / "train", tmp_path / "records", **wrong)
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("is_indexed", [False, True])
def test_labels_without_a_row_are_refused(made, tmp_path, is_indexed):
    labels = read_labels(made)
    if is_indexed:
        labels = index_dicom(labels, made / "train", workers=1, progress="off")
    with pytest.raises(ValueError, match="the labels have no rows"):
        pack_dicom(made / "train", tmp_path / "records", labels[:0], **QUIET)


@pytest.mark.parametrize(
    "option", [{"workers": 0}, {"quality": 0}, {"image": "x"}, {"window": (0, 1)}, {"seed": 1}]
)
def test_an_option_that_slices_do_not_have_is_refused_before_anything_is_written(
    made, tmp_path, option
):
    with pytest.raises(ValueError, match=f"{next(iter(option))}(.|\n)*fix:"):
        pack_dicom(made / "train", tmp_path / "records", options=PackOptions(**option))
    assert not (tmp_path / "records").exists()


def test_columns_and_folders_may_be_generators(made, tmp_path):
    columns = (name for name in ["central_pe"])
    folders = (tmp_path / name for name in ["records"])
    records = pack_dicom(
        made / "train", folders, read_labels(made), size=16, columns=columns, **QUIET
    )
    assert (records.folder.name, records.names) == ("records", ["central_pe"])


def test_another_window_does_not_overwrite_a_pack(made, tmp_path):
    pack_dicom(made / "train", tmp_path / "records", size=16, **QUIET)
    with pytest.raises(FileExistsError, match=r"window None, asked for \[100.0, 700.0\]\n  fix:"):
        pack_dicom(made / "train", tmp_path / "records", size=16, window="embolism", **QUIET)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def start(source, to, window=None):
    arguments = f"{str(source)!r}, {str(to)!r}, size=16, options=PackOptions(shard_size=3), window={window!r}"
    call = (
        f"from tpukit import PackOptions; from tpukit.pe import pack_dicom; pack_dicom({arguments})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", call], cwd=KIT, start_new_session=True, stdout=subprocess.DEVNULL
    )


def written(to):
    """Return the headers and the shards that are there."""
    return [*(to / "unfinished").glob("headers-*.json"), *to.glob("*.array_record")]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Four series of 80 slices, and the pack that nothing has ended."""
    made, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    (made / "source").mkdir()
    for number in range(320):
        place = Place("st", f"se{number % 4}", f"i{number}", number, z=7.0 * number % 97, pixel=0.5)
        write_dicom(made / "source" / f"{number:03}.dcm", rng.normal(0, 500, (16, 16)), place)
    assert start(made / "source", made / "at once", "embolism").wait(600) == 0
    return made


@pytest.mark.soak
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_ended_at_some_moments_nothing_is_done_twice_and_every_byte_is_the_same(
    many, tmp_path, ending, how_often
):
    to, ended, moments = tmp_path / "ended", 0, how_often((1, 20), (0, 1, 2, 10, 40, 70))
    for progress in moments:  # of 2 files of headers and 107 shards
        before = {path: path.stat().st_mtime_ns for path in written(to)}
        process = start(many / "source", to, "embolism")
        while len(written(to)) < max(progress, len(before)) and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is None:
            ended += 1
            (os.killpg if ending == signal.SIGKILL else os.kill)(process.pid, ending)
        process.wait(600)
        if (to / "manifest.json").exists():
            break
        assert before.items() <= {path: path.stat().st_mtime_ns for path in written(to)}.items()
    assert ended >= len(moments) - 2
    assert ended
    shards = {path: path.stat().st_mtime_ns for path in to.glob("*.array_record")}
    assert start(many / "source", to, "embolism").wait(600) == 0
    assert (
        shards.items()
        <= {path: path.stat().st_mtime_ns for path in to.glob("*.array_record")}.items()
    )
    assert contents(to) == contents(many / "at once")
    assert not (to / "unfinished").exists()


def test_a_finished_pack_is_not_made_again(made, tmp_path, capsys):
    pack_dicom(made / "train", tmp_path / "records", size=16, **QUIET)
    before = contents(tmp_path / "records")
    capsys.readouterr()
    assert len(pack_dicom(made / "train", tmp_path / "records", size=16, **QUIET)) == 15
    assert contents(tmp_path / "records") == before
    assert capsys.readouterr().out == "pack: 15 images, no labels\n"


def compress_rle(file):
    file.compress(uid.RLELossless, generate_instance_uid=False)
    file.save_as(file.filename)


def compress_jpeg2000(file):
    if not features.check("jpg_2000"):
        pytest.skip("this Pillow encodes no JPEG 2000")
    encoded = io.BytesIO()
    Image.fromarray(file.pixel_array).save(encoded, "JPEG2000", irreversible=False, no_jp2=True)
    file.PixelData = encapsulate([encoded.getvalue()])
    file.file_meta.TransferSyntaxUID = uid.JPEG2000Lossless
    file.save_as(file.filename)


def compress_jpeg_lossless(file):
    compress_with_gdcm(file, "JPEGLosslessProcess14_1")


def compress_jpeg_ls(file):
    compress_with_gdcm(file, "JPEGLSLossless")


def compress_with_gdcm(file, syntax):
    gdcm = pytest.importorskip("gdcm", reason="python-gdcm, which encodes this, is not installed")
    path = str(file.filename)
    reader, changing, writer = (
        gdcm.ImageReader(),
        gdcm.ImageChangeTransferSyntax(),
        gdcm.ImageWriter(),
    )
    reader.SetFileName(path)
    assert reader.Read()
    changing.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    changing.SetInput(reader.GetImage())
    assert changing.Change()
    writer.SetFileName(path)
    writer.SetFile(reader.GetFile())
    writer.SetImage(changing.GetOutput())
    assert writer.Write()


def train(core, records):
    model = core.model(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, len(LABELS)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for images, labels in core.batches(records, batch_size=2, shuffle=True, drop_last=True):
        with core.step():
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                model(images.float() / 255), labels
            )
            loss.backward()
            core.optimizer_step(optimizer)
        losses.append(loss.item())
    return losses


COMPRESSIONS = [compress_rle, compress_jpeg2000, compress_jpeg_lossless, compress_jpeg_ls]


@pytest.fixture(scope="module")
def unsigned(made, tmp_path_factory):
    """The slices with unsigned pixels, as JPEG's are, and their pack."""
    folder = tmp_path_factory.mktemp("unsigned")
    for path in paths(shutil.copytree(made / "train", folder / "train")):
        stored = pydicom.dcmread(path).pixel_array.clip(min=0).astype("<u2")
        change(path, PixelData=stored.tobytes(), PixelRepresentation=0)
    return folder / "train", pack_dicom(
        folder / "train", folder / "plain", read_labels(made), size=16, **QUIET
    )


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_from_compressed_dicom_to_a_trained_step(made, unsigned, tmp_path, compress):
    labels, (folder, plain) = read_labels(made), unsigned
    folder = shutil.copytree(folder, tmp_path / "train")
    for path in paths(folder):
        file = pydicom.dcmread(path)
        compress(file)
        assert pydicom.dcmread(path).file_meta.TransferSyntaxUID.is_compressed
    records = pack_dicom(folder, tmp_path / "compressed", labels, size=16, **QUIET)
    assert records.read(range(15)) == plain.read(range(15))
    losses = launch(train, records, cores=2, backend="cpu", progress="off").results
    assert np.isfinite(losses).all()
    assert len(losses[0]) == 3


def test_what_index_dicom_found_is_packed_without_reading_a_header_again(
    made, tmp_path, monkeypatch
):
    from tpukit.pe import dicom_packing, index_dicom

    labels = read_labels(made)
    by_headers = pack_dicom(
        made / "train", tmp_path / "by-headers", labels, size=16, window="lung", **QUIET
    )
    index = index_dicom(labels, made / "train", progress="off").sample(frac=1, random_state=0)
    monkeypatch.setattr(dicom_packing, "read_headers", None)
    monkeypatch.setattr(dicom_packing, "find_files", None)
    records = pack_dicom(
        made / "train", tmp_path / "by-index", index, size=16, window="lung", **QUIET
    )
    assert records.read(range(15)) == by_headers.read(range(15))
    assert (
        index.SOPInstanceUID.iloc[records.rows].tolist()
        == labels.SOPInstanceUID.iloc[by_headers.rows].tolist()
    )
    some = pack_dicom(made / "train", tmp_path / "some", index.iloc[:4], size=16, **QUIET)
    assert {Path(some.name(number)).stem for number in range(4)} == {*index.SOPInstanceUID.iloc[:4]}
