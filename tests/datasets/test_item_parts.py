"""Datasets as people have them, torchvision's and Hugging Face's: packed as they are, and trained on."""

import gzip
import io
import struct

import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")
torch = pytest.importorskip("torch")

import tpukit  # noqa: E402
from tpukit.datasets.packing import PackOptions, pack  # noqa: E402
from tpukit.essentials.display.figures import show_batch  # noqa: E402

QUIET = {"progress": "off"}
COUNT, SIZE = 12, 16
NAMES = ["cat", "dog", "cow"]


def pixels_of(number, size=SIZE):
    """Return (size, size, 3) uint8 whose strongest colour says its class."""
    pixels = np.random.default_rng(number).integers(0, 80, (size, size, 3), dtype=np.uint8)
    pixels[..., number % 3] += 150
    return pixels


def picture(number, mode="RGB"):
    return Image.fromarray(pixels_of(number)).convert(mode)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(image):
    """Return what somebody sees of a Pillow image: on white, three channels."""
    image = image.convert("RGBA") if "A" in image.mode or "transparency" in image.info else image
    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return np.asarray(image.convert("RGB"))


def learn(core, images):
    torch.manual_seed(0)
    model = core.model(
        torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3)
        )
    )
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss()
    batches = core.batches(images, batch_size=3, shuffle=True, drop_last=True)
    how = {"epochs": 4, "preprocess": lambda images: images / 255}
    history = tpukit.fit(
        core, model, optimizer, loss, batches, core.batches(images, batch_size=5), **how
    )
    return [row["valid_loss"] for row in history.epochs]


def check_trains(records):
    """Check that a dataset of `pixels_of` with three classes is what it was, names its classes, and can be learned."""
    assert records.classes == records.names == NAMES
    assert records.labels.dtype == np.int64
    assert np.array_equal(records.labels, records.rows % 3)
    titles = [
        axes.get_title(loc="left")
        for axes in show_batch(records[0][0][None], records.labels[:1], names=NAMES).axes
    ]
    assert titles == [NAMES[records.rows[0] % 3]]
    losses = tpukit.launch(learn, records, cores=2).results[0]
    assert losses[-1] < losses[0]


def test_an_image_folder_of_torchvision_is_packed_with_its_classes(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    transforms = pytest.importorskip("torchvision.transforms")
    for number in range(COUNT):
        file = tmp_path / "imgs" / sorted(NAMES)[number % 3] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(file)
    for transform in (
        None,
        transforms.ToTensor(),
        transforms.PILToTensor(),
    ):  # floats in [0, 1]; bytes
        dataset = datasets.ImageFolder(tmp_path / "imgs", transform)
        records = pack(dataset, tmp_path / str(transform), **QUIET)
        assert records.classes == sorted(NAMES)
        for place, row in enumerate(records.rows):
            name, label = dataset.samples[row]
            assert np.array_equal(records.take([place])[0], np.asarray(Image.open(name)))
            assert records.labels[place] == label
    some = torch.utils.data.Subset(datasets.ImageFolder(tmp_path / "imgs"), [5, 7])
    assert pack(some, tmp_path / "some", **QUIET).classes == sorted(NAMES)


def test_grey_images_of_torchvision_are_packed_and_trained_on(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    images, labels = (
        np.random.default_rng(0).integers(0, 256, (9, 28, 28), dtype=np.uint8),
        np.arange(9) % 3,
    )
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):  # as the set is published
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, 9, 28, 28) + images.tobytes()
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, 9) + labels.astype(np.uint8).tobytes()
        )
        for file in list(raw.glob(f"{part}*ubyte")):
            (raw / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    records = pack(datasets.MNIST(tmp_path), tmp_path / "out", **QUIET)
    assert records.classes[:2] == ["0 - zero", "1 - one"]
    assert np.array_equal(records.take(range(9)), images[records.rows][..., None].repeat(3, axis=3))
    assert np.array_equal(records.labels, labels[records.rows])
    assert tpukit.launch(learn, records, cores=2).results


class Classified:
    """A dataset with classes, as torchvision has them."""

    classes = NAMES

    def __init__(self, image=picture, label=lambda number: number % 3):
        self.image, self.label = image, label

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        return self.image(number), self.label(number)


def test_a_dataset_with_classes_is_trained_on(tmp_path):
    check_trains(pack(Classified(), tmp_path, **QUIET))


def test_a_label_that_is_none_of_the_classes_is_told_and_the_fix_works(tmp_path):
    source = Classified(label=lambda number: number - 3)
    with pytest.raises(
        ValueError, match=r"(?s)label -3 of item 0 is not one of the 3 classes.*classes=\(\)"
    ):
        pack(source, tmp_path / "out", **QUIET)
    records = pack(source, tmp_path / "out", classes=(), **QUIET)
    assert (records.labels.shape, records.classes, records.names) == ((COUNT, 1), [], ["label"])
    with pytest.raises(
        ValueError, match="classes= names the classes of one label, but items have 2 labels"
    ):
        pack(Classified(label=lambda number: (1, 2)), tmp_path / "new", classes=NAMES, **QUIET)


def test_words_of_items_are_numbered_by_classes(tmp_path):
    source = Classified(label=lambda number: NAMES[number % 3])
    check_trains(pack(source, tmp_path / "out", classes=NAMES, **QUIET))
    source.classes = None
    with pytest.raises(
        ValueError,
        match=r"(?s)item 0 has the label 'cat', and labels that are words.*fix: +classes=",
    ):
        pack(source, tmp_path / "new", **QUIET)
    with pytest.raises(
        ValueError, match=r"(?s)item 2 has the label 'cow'.*found: classes \['cat', 'dog'\]"
    ):
        pack(source, tmp_path / "other", classes=NAMES[:2], **QUIET)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "PA", "RGBA", "CMYK", "1", "YCbCr", "HSV"])
def test_pillow_images_of_any_mode_are_stored_as_they_are_seen(mode, size, tmp_path):
    def image(number):
        image = picture(number, mode)
        if mode in ("LA", "RGBA"):
            image.putalpha(Image.fromarray(pixels_of(number + 50)[..., 0]))
        return image

    records = pack(Classified(image), tmp_path, size=size, **QUIET)
    for place, row in enumerate(records.rows):
        expected = Image.fromarray(shown(image(row)))
        expected = expected.resize((size, size), Image.Resampling.BILINEAR) if size else expected
        assert np.array_equal(records.take([place])[0], np.asarray(expected))


def test_a_photo_is_turned_upright_however_it_comes(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(picture(3), "JPEG", exif=exif, quality=95)
    upright = np.rot90(np.asarray(Image.open(io.BytesIO(file))), -1)
    for name, image in {"bytes": file, "Pillow": Image.open(io.BytesIO(file))}.items():
        records = pack([(image, 0)], tmp_path / name, **QUIET)
        assert np.array_equal(records.take([0])[0], upright)


DEEP = (np.arange(64).reshape(8, 8) * 1024).astype(np.uint16)
SIGNED = DEEP.astype(np.int16) // 200
ARRAYS = {
    "16 bits of Pillow": (Image.fromarray(DEEP), {}, (DEEP / 257).round()),
    "16 bits of Pillow in a window": (
        Image.fromarray(DEEP),
        {"options": PackOptions(window=(0, 1024))},
        (DEEP > 0) * 255,
    ),
    "an array of 16 bits": (DEEP, {}, (DEEP / 257).round()),
    "Hounsfield units": (
        SIGNED,
        {"options": PackOptions(window=(-100, 100))},
        ((SIGNED + 100.0) * 1.275).clip(0, 255).round(),
    ),
    "booleans": (DEEP > 9999, {}, (DEEP > 9999) * 255),
    "floats in [0, 1]": (torch.from_numpy(DEEP / 64512).float(), {}, (DEEP / 64512 * 255).astype("f4").round()),
    "one channel first": (torch.from_numpy((DEEP >> 8).astype(np.uint8))[None], {}, DEEP >> 8),
    "one channel last": ((DEEP >> 8).astype(np.uint8)[..., None], {}, DEEP >> 8),
}  # fmt: skip


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_of_any_kind_become_eight_bits_by_a_stated_window(what, tmp_path):
    image, options, expected = ARRAYS[what]
    records = pack([(image, 0)], tmp_path, **options, **QUIET)
    assert np.array_equal(records.take([0])[0], np.asarray(expected)[..., None].repeat(3, axis=2))


UNCLEAR = {
    "normalised": torch.randn(3, 8, 8) * 3,
    "integers of 32 bits": DEEP.astype(np.int32),
    "floats of Pillow": Image.fromarray(DEEP.astype(np.float32)),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_an_image_whose_black_and_white_nobody_knows_needs_a_window(what, tmp_path):
    with pytest.raises(
        ValueError, match=r"(?s)cannot read item 0 as .*found: .*fix: .*window=\(low, high\)"
    ):
        pack([(UNCLEAR[what], 0)], tmp_path / "out", **QUIET)
    assert (
        len(
            pack(
                [(UNCLEAR[what], 0)],
                tmp_path / "out",
                options=PackOptions(window=(0, 1000)),
                **QUIET,
            )
        )
        == 1
    )


def of_dicts(**names):
    """Return items that are dicts of pixels and class."""
    image, label = names.get("image", "image"), names.get("label", "label")
    return [{image: picture(number), label: number % 3} for number in range(COUNT)]


@pytest.mark.parametrize("label", ["label", "labels", "fine_label", "target"])
@pytest.mark.parametrize("image", ["image", "img", "pixel_values"])
def test_dicts_are_read_by_the_usual_names(image, label, tmp_path):
    records = pack(of_dicts(image=image, label=label), tmp_path, classes=NAMES, **QUIET)
    assert np.array_equal(records.labels, records.rows % 3)


def test_dicts_are_read_by_names_that_are_given(tmp_path):
    items = [
        {**item, "weight": number}
        for number, item in enumerate(of_dicts(image="photo", label="species"))
    ]
    check_trains(
        pack(
            items,
            tmp_path / "one",
            options=PackOptions(image="photo"),
            labels="species",
            classes=NAMES,
            **QUIET,
        )
    )
    both = pack(
        items,
        tmp_path / "both",
        options=PackOptions(image="photo"),
        labels=["species", "weight"],
        **QUIET,
    )
    assert both.names == ["species", "weight"]
    assert np.array_equal(both.labels[:, 1], both.rows)
    none = pack(items, tmp_path / "none", options=PackOptions(image="photo"), labels=[], **QUIET)
    assert none.labels.shape == (COUNT, 0)


DICTS = {
    "no image": (
        [{"photo": 1, "label": 1}],
        {},
        "none of which is 'image' or 'img' or 'pixel_values'",
    ),
    "no label by its name": (
        of_dicts(label="species"),
        {},
        r'labels="species"\); or, if there is no label: labels=\[\]',
    ),
    "no such label": (
        of_dicts(),
        {"labels": "kind"},
        "keys 'image', 'label', none of which is kind",
    ),
    "no such mask": (of_dicts(), {"masks": "kind"}, "none of which is kind"),
    "parts of a set": ({"train": of_dicts()}, {}, r"pass one of its parts: source\['train'\]"),
}


@pytest.mark.parametrize("what", DICTS)
def test_a_dict_with_other_names_says_how_to_name_them(what, tmp_path):
    source, options, message = DICTS[what]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        pack(source, tmp_path / "out", **options, **QUIET)


def hugging_face(label="label", **features):
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(**features), label: datasets.ClassLabel(names=NAMES)}
    columns = {
        "image": [picture(number) for number in range(COUNT)],
        label: [n % 3 for n in range(COUNT)],
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


FORMS = {
    "as it is": lambda data: data,
    "files": lambda data: data.cast_column("image", type(data.features["image"])(decode=False)),
    "of torch": lambda data: data.with_format("torch"),
    "of numpy": lambda data: data.with_format("numpy"),
    "streamed": lambda data: data.to_iterable_dataset(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_hugging_face_dataset_is_packed_with_its_classes_and_trained_on(form, tmp_path):
    records = pack(FORMS[form](hugging_face()), tmp_path, **QUIET)
    assert records.encoding == ("jpeg" if form == "files" else "uint8")
    for place, row in enumerate(records.rows):
        assert np.array_equal(records.take([place])[0], pixels_of(row))
    check_trains(records)


@pytest.mark.parametrize("has_features", [True, False])
def test_a_hugging_face_stream_is_read_once(has_features, tmp_path):
    datasets = pytest.importorskip("datasets")
    seen = []

    def read(numbers):
        for number in numbers:
            seen.append(number)
            yield {"image": encoded(picture(number)), "label": number % 3}

    features = None
    if has_features:
        kinds = {"image": datasets.Value("binary"), "label": datasets.Value("int64")}
        features = datasets.Features(kinds)
    stream = datasets.IterableDataset.from_generator(
        read, features=features, gen_kwargs={"numbers": list(range(COUNT))}
    )
    assert len(pack(stream, tmp_path, **QUIET)) == COUNT
    assert sorted(seen) == list(range(COUNT))


def test_words_of_hugging_face_are_encoded_as_the_fix_says(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {
        "image": [picture(number) for number in range(COUNT)],
        "label": [NAMES[n % 3] for n in range(COUNT)],
    }
    data = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    with pytest.raises(ValueError, match=r"dataset.class_encode_column\(\"label\"\)"):
        pack(data, tmp_path / "out", **QUIET)
    assert pack(data.class_encode_column("label"), tmp_path / "out", **QUIET).classes == sorted(
        NAMES
    )


def test_hugging_face_masks_and_parts(tmp_path):
    datasets = pytest.importorskip("datasets")
    masks = [
        Image.fromarray((pixels_of(n)[..., 0] > 60).astype(np.uint8) * 3) for n in range(COUNT)
    ]
    data = hugging_face("fine_label").add_column(
        "masks", [{"bytes": encoded(mask), "path": None} for mask in masks]
    )
    data = data.cast_column("masks", datasets.Image())
    records = pack(data, tmp_path / "out", masks="masks", **QUIET)
    assert records.classes == NAMES
    _, targets = records[4]
    assert np.array_equal(targets["masks"], np.asarray(masks[records.rows[4]]))
    with pytest.raises(ValueError, match=r"pass one of its parts: source\['train'\]"):
        pack(datasets.DatasetDict(train=data), tmp_path / "new")


@pytest.mark.parametrize(
    ("count", "found"), [(2, "a, b"), (4, "a, b, c, d"), (5, "a, b, c, d, ...")]
)
def test_a_message_has_an_ellipsis_only_for_more_classes(tmp_path, count, found):
    classes = list("abcde"[:count])
    with pytest.raises(ValueError, match=r"label 9 of item 0") as error:
        pack([(np.zeros((8, 8, 3), np.uint8), 9)], tmp_path, classes=classes, progress="off")
    assert error.value.found == f"classes 0 to {count - 1}: {found}"
