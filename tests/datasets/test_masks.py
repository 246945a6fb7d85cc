"""Masks: as they were, beside their images, in every way in which images are stored and read; and trained on."""

import io
import pickle

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")
torch = pytest.importorskip("torch")

import tpukit  # noqa: E402
from tpukit.datasets.image_cache import build_image_cache  # noqa: E402
from tpukit.datasets.packed_images import PackedImages  # noqa: E402
from tpukit.datasets.packing import pack  # noqa: E402
from tpukit.essentials.data.batches import Batches  # noqa: E402

QUIET = {"progress": "off"}
COUNT, SIZE = 12, 16


def mask_of(number, size=SIZE):
    """Return (size, size) uint8 of classes 0, 1 and 255, another one for each number."""
    mask = np.zeros((size, size), np.uint8)
    mask[number % size :, : size // 2] = 1
    mask[0, -3:] = 255
    return mask


def image_of(number, size=SIZE):
    """Return (size, size, 3) uint8 that is bright where the mask is 1."""
    noise = np.random.default_rng(number).integers(0, 60, (size, size, 3), dtype=np.uint8)
    return noise + 150 * (mask_of(number, size) == 1)[..., None].astype(np.uint8)


def encoded(array, kind="PNG", palette=None):
    image = Image.fromarray(array)
    if palette:
        image.putpalette(palette)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rows = []
    for number in range(COUNT):
        kind = ("png", "tiff", "bmp")[number % 3]
        palette = (
            None if number % 2 else [200, *range(256), *range(256), *range(255)]
        )  # as of VOC's masks
        (root / f"{number}.bmp").write_bytes(encoded(image_of(number), "BMP"))
        (root / f"{number}-mask.{kind}").write_bytes(
            encoded(mask_of(number), kind.upper(), palette)
        )
        rows.append(
            {
                "path": f"{number}.bmp",
                "mask": f"{number}-mask.{kind}",
                "sick": number % 2,
                "root": str(root),
            }
        )
    return pd.DataFrame(rows)


def packed(table, out, **options):
    return pack(table, out, masks="mask", root=table.root[0], **{**QUIET, **options})


def agree(images, size=SIZE, exact=True):
    """Check that every image has its own mask, to the last pixel."""
    taken = images.take(range(COUNT))
    assert images.has_masks
    assert images.shape == (size, size, 4)
    for row, pixels in zip(images.rows, taken, strict=True):
        expected = np.asarray(
            Image.fromarray(mask_of(row)).resize((size, size), Image.Resampling.NEAREST)
        )
        assert np.array_equal(pixels[..., 3], expected)
        if size == SIZE:
            assert np.array_equal(pixels[..., :3], image_of(row))
    image, target = images[3]
    mask = target["masks"] if isinstance(target, dict) else target
    assert (image.shape, image.dtype) == ((3, size, size), torch.uint8)
    assert (mask.shape, mask.dtype) == ((size, size), torch.int64)
    assert np.array_equal(mask.numpy(), taken[3, ..., 3])


def test_masks_of_a_table_are_what_they_were_in_every_way_of_storing(table, tmp_path):
    files = packed(table, tmp_path / "files")
    agree(files)
    agree(PackedImages(files.folder, 8), 8)
    agree(PackedImages(files.folder, 8, exact=True), 8)
    agree(packed(table, tmp_path / "pixels", size=8), 8)
    agree(packed(table, tmp_path / "larger", size=40), 40)
    cache = build_image_cache(files, tmp_path / "cache", size=SIZE, **QUIET)
    agree(cache)
    agree(pickle.loads(pickle.dumps(cache)))
    assert packed(table, tmp_path / "files").digest == files.digest


def of_bytes():
    return [(encoded(image_of(n)), encoded(mask_of(n))) for n in range(COUNT)]


ITEMS = {
    "arrays": lambda n: (image_of(n), mask_of(n)),
    "Pillow images": lambda n: (Image.fromarray(image_of(n)), Image.fromarray(mask_of(n))),
    "tensors": lambda n: (
        torch.from_numpy(image_of(n)).permute(2, 0, 1),
        torch.from_numpy(mask_of(n)).long()[None],
    ),
    "bytes and an array": lambda n: (encoded(image_of(n)), mask_of(n).astype(np.int64)),
    "floats that are whole": lambda n: (image_of(n), mask_of(n).astype(np.float32)),
}


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("kind", ITEMS)
def test_masks_of_items_are_what_they_were(kind, size, tmp_path):
    agree(pack([ITEMS[kind](n) for n in range(COUNT)], tmp_path, size=size, **QUIET), size or SIZE)


LABELLED = {
    "three parts": lambda n: (image_of(n), n, mask_of(n)),
    "a mask before the label": lambda n: (image_of(n), mask_of(n), n),
    "two parts": lambda n: (image_of(n), (n, Image.fromarray(mask_of(n)))),
    "a dict": lambda n: {"image": image_of(n), "label": n, "masks": encoded(mask_of(n))},
}


@pytest.mark.parametrize("kind", LABELLED)
def test_labels_and_masks_come_as_a_dict(kind, tmp_path):
    options = {"masks": "masks"} if kind == "a dict" else {}
    records = pack([LABELLED[kind](n) for n in range(COUNT)], tmp_path, **options, **QUIET)
    agree(records)
    assert records.labels[:, 0].tolist() == records.rows.tolist()
    for workers in (0, 1):
        images, targets, real = next(
            iter(Batches(records, batch_size=5, mask=True, workers=workers))
        )
        assert (images.shape, images.dtype) == ((5, 3, SIZE, SIZE), torch.uint8)
        assert targets["labels"].tolist() == records.labels[:5].tolist()
        assert np.array_equal(targets["masks"].numpy(), records.take(range(5))[..., 3])
        assert real.all()


REFUSED = {
    "fractions": (
        lambda: (image_of(0), np.full((16, 16), 0.5)),
        r"whole and from 0 to 255, but this one holds 0.5 \(float64\)",
    ),
    "a class of -1": (
        lambda: (image_of(0), np.full((16, 16), -1)),
        r"but this one holds -1 \(int64\)",
    ),
    "nan": (lambda: (image_of(0), np.full((16, 16), np.nan)), "but this one holds nan"),
    "two masks": (lambda: (image_of(0), mask_of(0), mask_of(0)), "2 masks and 0 parts with labels"),
    "rows of other lengths": (lambda: (image_of(0), [[1, 2], [3]]), "has labels of shape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_mask_is_told_and_never_taken_for_labels(what, tmp_path):
    item, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"(?s)item 0 .*{message}.*fix:"):
        pack([item()], tmp_path / "out", **QUIET)


def test_an_item_without_its_mask_is_told(tmp_path):
    items = [(encoded(image_of(0)), mask_of(0)), (encoded(image_of(1)), ())]
    with pytest.raises(
        ValueError, match="item 1 is not like the first one: bytes and 0 labels\n.*bytes and masks"
    ):
        pack(items, tmp_path / "out", **QUIET)


SPOILT = {
    "it is gone": (lambda file: file.unlink(), "the mask .* cannot be read: No such file"),
    "it is cut off": (
        lambda file: file.write_bytes(encoded(mask_of(2), "BMP")[:100]),
        "its mask is not a whole image",
    ),
    "it is a JPEG": (
        lambda file: file.write_bytes(encoded(mask_of(2), "JPEG")),
        "blurs class numbers",
    ),
    "it has another size": (
        lambda file: file.write_bytes(encoded(mask_of(2, 9))),
        "and its mask 9 x 9",
    ),
}


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_mask_is_named_with_its_image_or_left_out(table, tmp_path, what, size):
    for row in table.itertuples():
        for name in (row.path, row.mask):
            (tmp_path / name).write_bytes((type(tmp_path)(row.root) / name).read_bytes())
    spoil, message = SPOILT[what]
    spoil(tmp_path / table["mask"][2])
    table = table.assign(root=str(tmp_path))
    with pytest.raises(OSError, match=f"image 2 cannot be packed: .*2.bmp\n  found: .*{message}"):
        packed(table, tmp_path / "out", size=size)
    records = packed(table, tmp_path / "out", size=size, damaged="skip")
    assert [image["row"] for image in records.skipped] == [2]


def test_a_mask_that_was_changed_is_told(table, tmp_path):
    for row in table.itertuples():
        for name in (row.path, row.mask):
            (tmp_path / name).write_bytes((type(tmp_path)(row.root) / name).read_bytes())
    table = table.assign(root=str(tmp_path))
    packed(table, tmp_path / "out")
    file = tmp_path / table["mask"][5]
    assert file.suffix == ".bmp"
    file.write_bytes(encoded(mask_of(7), "BMP"))
    with pytest.raises(FileExistsError, match="5.bmp has other contents"):
        packed(table, tmp_path / "out")


def test_masks_of_another_column_are_another_pack(table, tmp_path):
    packed(table, tmp_path / "out")
    with pytest.raises(FileExistsError, match="holds another pack"):
        pack(table, tmp_path / "out", root=table.root[0], **QUIET)


def segment(core, images):
    torch.manual_seed(0)
    model = core.model(torch.nn.Conv2d(3, 2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss(ignore_index=255)
    batches = core.batches(images, batch_size=3, shuffle=True, drop_last=True)
    history = tpukit.fit(
        core,
        model,
        optimizer,
        loss,
        batches,
        core.batches(images, batch_size=3),
        epochs=4,
        augment=tpukit.Augment(flip=0.5, fill=255),
        preprocess=lambda images: images / 255,
    )
    return [row["valid_loss"] for row in history.epochs]


def segment_and_classify(core, images):
    model = core.model(Both())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(outputs, targets):
        pixels = torch.nn.functional.cross_entropy(
            outputs["masks"], targets["masks"], ignore_index=255
        )
        return pixels + torch.nn.functional.binary_cross_entropy_with_logits(
            outputs["labels"], targets["labels"]
        )

    batches = core.batches(images, batch_size=3, shuffle=True, drop_last=True)
    valid = core.batches(images, batch_size=5)  # the last batch is filled up
    how = {"epochs": 2, "augment": tpukit.Augment(), "preprocess": lambda images: images / 255}
    return [
        row["valid_loss"]
        for row in tpukit.fit(core, model, optimizer, loss, batches, valid, **how).epochs
    ]


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels, self.head = torch.nn.Conv2d(3, 2, 1), torch.nn.Linear(3, 1)

    def forward(self, images):
        return {"masks": self.pixels(images), "labels": self.head(images.mean((2, 3)))}


@pytest.mark.parametrize("stored", ["files", "cache"])
def test_a_model_learns_masks_on_two_cores(table, tmp_path, stored):
    images = packed(table, tmp_path / "out")
    if stored == "cache":
        images = build_image_cache(images, tmp_path / "cache", size=SIZE, **QUIET)
    part = torch.utils.data.Subset(images, images.split()[0])
    losses = tpukit.launch(segment, part, cores=2).results[0]
    assert losses[-1] < losses[0] < 1.5


def test_a_model_learns_masks_and_labels_together(table, tmp_path):
    images = packed(table, tmp_path / "out", labels="sick")
    losses = tpukit.launch(segment_and_classify, images, cores=2).results[0]
    assert losses[-1] < losses[0]


@pytest.mark.xla
def test_a_model_learns_masks_through_torch_xla(table, tmp_path):
    pytest.importorskip("torch_xla")
    losses = tpukit.launch(
        segment, packed(table, tmp_path / "out"), cores=1, backend="xla"
    ).results[0]
    assert losses[-1] < losses[0]
