"""read_tfrecords: what an independent writer wrote comes back, and no damaged byte does."""

import gzip
import io

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("google_crc32c")
wire = pytest.importorskip("google.protobuf.internal.encoder")
Image = pytest.importorskip("PIL.Image")

from helpers.tfrecords import example, feature, field, framed, varint, write  # noqa: E402

from tpukit.datasets.tfrecords import read_tfrecords, records  # noqa: E402


def jpeg(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def flower(number: int) -> bytes:
    """Make a record in the layout of Kaggle's flowers."""
    return example(**{"class": number, "id": f"{number:09x}".encode(), "image": jpeg(number)})


@pytest.fixture
def flowers(tmp_path):
    """Two files of three flowers, classes 0 to 5."""
    return [
        write(tmp_path / f"0{part}-32x32-3.tfrec", *map(flower, range(3 * part, 3 * part + 3)))
        for part in (0, 1)
    ]


# What TensorFlow 2.21's TFRecordWriter wrote of {"age": [0.5, 2.0], "image": b"picture", "target": [3, -1]}.
TENSORFLOWS = bytes.fromhex(
    "4800000000000000fe92489d0a460a130a03616765120c120a0a080000003f000000400a140a05696d616765120b0a090a07706963"
    "747572650a190a06746172676574120f1a0d0a0b03ffffffffffffffffff016058132f"
)


def test_what_tensorflow_wrote_is_read_and_is_what_is_written_here(tmp_path):
    file = write(tmp_path / "a.tfrec", example(age=[0.5, 2.0], image=b"picture", target=[3, -1]))
    assert file.read_bytes() == TENSORFLOWS
    ((image, labels),) = read_tfrecords(file, labels=("target", "age"))
    assert (image, labels.tolist()) == (b"picture", [3, -1, 0.5, 2])


def test_flowers_come_back_byte_for_byte_in_order_and_again(flowers):
    source = read_tfrecords(flowers, labels=("class",))
    for _ in range(2):
        images, labels = zip(*source, strict=True)
        assert images == tuple(jpeg(number) for number in range(6))
        assert [label.tolist() for label in labels] == [[float(number)] for number in range(6)]
        assert {(label.dtype.name, label.shape) for label in labels} == {("float32", (1,))}


def test_one_file_and_one_label_may_be_given_plainly(flowers):
    assert [label.tolist() for _, label in read_tfrecords(str(flowers[1]), labels="class")] == [
        [3],
        [4],
        [5],
    ]


LABELS = {
    "an integer": (7, [7]),
    "a negative integer": (-1, [-1]),
    "the largest integer that float32 holds": (2**24, [2**24]),
    "a float": (0.1, [np.float32(0.1)]),
    "a list of integers": ([0, 1, 1, 0], [0, 1, 1, 0]),
    "a list of floats": ([0.5, float("inf")], [0.5, float("inf")]),
}


@pytest.mark.parametrize("label", LABELS)
def test_labels_are_integers_floats_or_lists_of_them(tmp_path, label):
    written, read = LABELS[label]
    file = write(tmp_path / "a.tfrec", example(image=b"picture", target=written))
    assert [values.tolist() for _, values in read_tfrecords(file)] == [read]


def test_several_labels_stand_in_the_order_asked_for(tmp_path):
    file = write(tmp_path / "a.tfrec", example(age=0.5, image=b"picture", sex=1, sites=[2, 3]))
    ((_, values),) = read_tfrecords(file, labels=("sites", "age", "sex"))
    assert values.tolist() == [2, 3, 0.5, 1]


def test_a_test_set_has_images_without_labels(tmp_path):
    file = write(tmp_path / "test.tfrec", example(image=b"picture", id=b"5"))
    ((image, values),) = read_tfrecords(file, labels=())
    assert (image, values.shape, values.dtype.name) == (b"picture", (0,), "float32")


def test_unpacked_lists_of_an_old_writer_are_read(tmp_path):
    loose = field(3, b"".join(wire.TagBytes(1, 0) + varint(each) for each in (4, 5)))
    entries = field(1, field(1, b"target") + field(2, loose)) + field(
        1, field(1, b"image") + field(2, feature(b"p"))
    )
    ((_, values),) = read_tfrecords(write(tmp_path / "a.tfrec", field(1, entries)))
    assert values.tolist() == [4, 5]


def test_gzip_is_recognised_whatever_the_name(flowers):
    plain = list(records(flowers[0]))
    flowers[0].write_bytes(gzip.compress(flowers[0].read_bytes()))
    assert list(records(flowers[0])) == plain


def test_a_record_whose_length_looks_like_gzip_is_no_gzip(tmp_path):
    payload = bytes(0x088B1F)
    assert framed(payload)[:3] == gzip.compress(b"")[:3]
    assert list(records(write(tmp_path / "a.tfrec", payload, b"next"))) == [payload, b"next"]


def flipped(position: int):
    def change(whole: bytes) -> bytes:
        return whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :]

    return change


START = len(framed(flower(0)))  # where record 1 begins

DAMAGE = {
    "a bit of the data": (flipped(START + 500), "record 1 of .*flowers.tfrec is damaged"),
    "a bit of the data's checksum": (flipped(2 * START - 1), "record 1 of .* is damaged"),
    "a bit of a length": (flipped(START), f"is damaged where record 1 begins, at byte {START:,}"),
    "the top bit of a length, 2**60 bytes": (
        flipped(START + 7),
        "is damaged where record 1 begins",
    ),
    "a bit of a length's checksum": (flipped(START + 9), "is damaged where record 1 begins"),
    "a bit of the first length": (flipped(1), "is no TFRecord file, or is damaged at its start"),
    "cut in a record": (lambda whole: whole[: START + 300], "is cut short in record 1\n.*288 of"),
    "cut in the last checksum": (lambda whole: whole[:-1], "is cut short in record 2"),
    "cut in a length": (
        lambda whole: whole[: START + 5],
        "is cut short in record 1\n.*5 bytes at byte",
    ),
    "empty": (lambda whole: b"", "is empty\n.*0 bytes"),
    "zeros": (lambda whole: bytes(len(whole)), "is no TFRecord file"),
    "a stretch of zeros": (
        lambda whole: whole[:START] + bytes(64) + whole[START + 64 :],
        "damaged where record 1",
    ),
    "something behind the end": (lambda whole: whole + b"\n", "is cut short in record 3"),
    "a web page": (
        lambda whole: b"<!doctype html><title>404</title>",
        "is no TFRecord file.*\n.*doctype",
    ),
    "a JPEG": (lambda whole: jpeg(0), "is no TFRecord file"),
    "three bytes": (lambda whole: b"abc", "is cut short in record 0"),
    "gzip cut short": (
        lambda whole: gzip.compress(whole)[:-400],
        "its gzip stream breaks off in record",
    ),
    "gzip of nothing": (lambda whole: gzip.compress(b""), "is empty\n.*0 bytes"),
    "gzip with a flipped bit": (lambda whole: flipped(1200)(gzip.compress(whole)), "damaged"),
    "gzip of a web page": (
        lambda whole: gzip.compress(b"<!doctype html><title>404</title>"),
        "is no TFRecord file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_with_file_and_record_and_the_fix_works(tmp_path, damage):
    change, message = DAMAGE[damage]
    file = write(tmp_path / "flowers.tfrec", flower(0), flower(0), flower(0))
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    with pytest.raises(OSError, match=message) as error:
        list(read_tfrecords(file, labels=("class",)))
    assert str(file) in str(error.value)
    assert "fix:" in str(error.value)
    file.write_bytes(whole)
    assert len(list(read_tfrecords(file, labels=("class",)))) == 3


def test_no_flipped_bit_of_a_small_file_passes(tmp_path):
    whole = write(
        tmp_path / "a.tfrec", example(image=b"pixels", target=1), example(image=b"more", target=0)
    ).read_bytes()
    for position in range(len(whole)):
        (tmp_path / "a.tfrec").write_bytes(flipped(position)(whole))
        with pytest.raises(OSError, match="fix:"):
            list(read_tfrecords(tmp_path / "a.tfrec"))


def test_records_before_the_damaged_one_are_given(tmp_path):
    file = write(
        tmp_path / "a.tfrec", example(image=b"good", target=1), example(image=b"bad", target=0)
    )
    file.write_bytes(file.read_bytes()[:-1])
    assert next(iter(read_tfrecords(file)))[0] == b"good"


GOOD = {"image": b"picture", "target": 1}
WRONG = {
    "no such label": (
        {"image": b"p", "class": 1},
        r"has no feature 'target'\n.*class: int64 \(1\), image: bytes \(1\)",
    ),
    "no such image": ({"jpeg": b"p", "target": 1}, "has no feature 'image'"),
    "no feature at all": ({}, "no feature at all"),
    "a label of bytes": (
        {"image": b"p", "target": b"\xff\xd8"},
        "feature 'target' of record 1 .* holds bytes",
    ),
    "a word after numbers": (
        {"image": b"p", "target": b"rose"},
        "has a word where earlier records have 1 label values",
    ),
    "an image of floats": (
        {"image": [0.5, 0.25], "target": 1},
        r"holds no image.*\n.*image: float \(2\)",
    ),
    "two images": ({"image": [b"p", b"q"], "target": 1}, "holds no image"),
    "an empty image": ({"image": b"", "target": 1}, "holds no image"),
    "more labels than before": (
        {"image": b"p", "target": [1, 2]},
        "has 2 label values where earlier records have 1",
    ),
    "an identifier as a label": (
        {"image": b"p", "target": 2**24 + 1},
        "too large for a label.*\n.*16777217",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_record_of_another_kind_is_named_with_what_it_holds(tmp_path, wrong):
    features, message = WRONG[wrong]
    file = write(tmp_path / "a.tfrec", example(**GOOD), example(**features))
    with pytest.raises(ValueError, match=message) as error:
        list(read_tfrecords(file))
    assert f"record 1 of {file}" in str(error.value)
    assert "fix:" in str(error.value)


def test_a_file_that_is_not_there_is_told_at_once(tmp_path, flowers):
    with pytest.raises(FileNotFoundError, match=r"none.tfrec does not exist\n.*fix:"):
        read_tfrecords([*flowers, tmp_path / "none.tfrec"])
    with pytest.raises(FileNotFoundError, match=r"is no file\n.*glob") as error:
        read_tfrecords(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert (
        len(list(read_tfrecords(sorted(tmp_path.glob("*.tfrec")), labels="class"))) == 6
    )  # what the fix says


def test_other_files_are_another_pack(flowers, tmp_path):
    pytest.importorskip("array_record")
    from tpukit.datasets.packing import pack

    how = {"progress": "off"}
    pack(read_tfrecords(flowers, labels=("class",)), tmp_path / "out", **how)
    with pytest.raises(
        FileExistsError, match=r"found: 2 TFRecord files, .* asked for 1 TFRecord files"
    ):
        pack(read_tfrecords(flowers[:1], labels=("class",)), tmp_path / "out", **how)


def test_the_name_of_the_class_is_a_label(tmp_path):
    names = (b"rose", b"daisy", b"rose")
    file = write(tmp_path / "a.tfrec", *(example(image=b"p", label=name) for name in names))
    words = [label for _, label in read_tfrecords(file, labels="label")]
    assert words == ["rose", "daisy", "rose"]


def test_a_feature_of_the_records_names_the_group_of_each_image(tmp_path):
    pytest.importorskip("array_record")
    from tpukit.datasets import pack

    people = [b"ann", b"bob", b"ann", b"cat", b"dan", b"bob", b"eve", b"dan"]
    files = []
    for part in (0, 1):
        examples = []
        for number in range(4 * part, 4 * part + 4):
            identifier = 2**40 + number // 2
            features = {"patient_id": people[number], "scan": identifier}
            examples.append(example(image=jpeg(number), target=number % 2, **features))
        files.append(write(tmp_path / f"{part}.tfrec", *examples))
    source = read_tfrecords(files)
    packed = pack(source, tmp_path / "people", groups="patient_id", progress="off")
    named = [packed.group_names[number].encode() for number in packed.groups]
    assert named == [people[row] for row in packed.rows]
    for train, valid in [packed.split(0.4), *packed.folds(3)]:
        assert not set(packed.groups[train]) & set(packed.groups[valid])
    again = pack(source, tmp_path / "people", groups="patient_id", progress="off")
    assert again.digest == packed.digest
    with pytest.raises(FileExistsError, match="groups"):
        pack(source, tmp_path / "people", groups="scan", progress="off")
    scans = pack(source, tmp_path / "scans", groups="scan", progress="off")
    assert scans.group_names == [str(2**40 + number) for number in range(4)]
    assert (scans.groups == scans.rows // 2).all()
