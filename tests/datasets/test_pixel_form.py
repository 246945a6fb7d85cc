"""Sizes that are not square, grey images and 16 bits: packed, decoded, cached, shown and predicted."""

import io
import re

import numpy as np
import pandas
import pytest
import torch
from helpers.launching import quietly as launched
from helpers.one_process import in_this_process
from helpers.pictures import quietly
from PIL import Image, ImageOps

import tpukit
from tpukit.datasets import PackedImages, PixelForm, cached_images, decode, plan_pack, uint16_values
from tpukit.datasets.image_cache import build_image_cache


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with in_this_process():
        yield


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scene(height, width):
    """Return a smooth picture, of which all resizing filters make similar pixels."""
    rows, columns = np.mgrid[:height, :width]
    channels = [255 * rows / height, 255 * columns / width, 128 + 0 * rows]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


def bilinear(image, size, resize):
    """Return Pillow's own answer for a size (height, width)."""
    wanted = (size[1], size[0])
    if resize == "crop":
        return ImageOps.fit(image, wanted, Image.Resampling.BILINEAR)
    if resize == "letterbox":
        return ImageOps.pad(image, wanted, Image.Resampling.BILINEAR)
    return image.resize(wanted, Image.Resampling.BILINEAR)


SIZES = [(48, 48), (32, 96), (96, 24)]
RESIZES = ["stretch", "crop", "letterbox"]


@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_size_of_height_and_width_is_what_pillow_gives(size, resize, kind):
    data = encoded(scene(300, 400), kind)
    form = PixelForm(resize=resize)
    expected = np.asarray(bilinear(Image.open(io.BytesIO(data)), size, resize))
    assert np.array_equal(decode(data, size, form=form), expected)
    close = decode(data, size, exact=False, form=form).astype(int)
    assert close.shape == (*size, 3)
    assert abs(close - expected).mean() < 2


@pytest.mark.parametrize("resize", RESIZES)
def test_a_jpeg_that_exif_turns_reaches_a_size_that_is_not_square(resize):
    exif = Image.Exif()
    exif[0x0112] = 6
    stripes = np.tile(np.uint8([0, 0, 0, 255, 255, 255]), (800, 50))
    data = encoded(Image.fromarray(stripes).convert("RGB"), "JPEG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    expected = np.asarray(bilinear(upright, (150, 40), resize))
    form = PixelForm(resize=resize)
    assert np.array_equal(decode(data, (150, 40), form=form), expected)
    close = decode(data, (150, 40), exact=False, form=form)
    # Stripes of three pixels would be lost if the decoder shrank the image to fewer rows.
    inside = slice(70, 80)
    if resize != "letterbox":  # which has 15 rows, too few for the stripes
        assert close[inside].std() > 0.7 * expected[inside].std() > 10


@pytest.mark.parametrize("resize", RESIZES)
def test_pack_cache_and_items_agree_at_a_size_that_is_not_square(resize):
    options = tpukit.PackOptions(resize=resize)
    pictures = [scene(60 + 10 * number, 90) for number in range(4)]
    items = [(encoded(picture), number) for number, picture in enumerate(pictures)]
    files = quietly(items, "files", options=options)
    sized = quietly(items, "sized", options=options, size=(32, 48))
    arrays = quietly(
        list(zip(pictures[:1], [0], strict=True)), "arrays", options=options, size=(32, 48)
    )
    cache = build_image_cache(files, size=(32, 48), progress="off")
    assert cache.folder.name == "files-cache-32x48"
    decoded = PackedImages("files", (32, 48), exact=True)
    assert decoded.shape == sized.shape == cache.shape == (32, 48, 3)
    everything = range(4)
    assert np.array_equal(sized.take(everything), cache.take(everything))
    assert np.array_equal(decoded.take(everything), cache.take(everything))
    for number, row in enumerate(files.rows):
        expected = bilinear(pictures[row], (32, 48), resize)
        assert np.array_equal(cache.take([number])[0], np.asarray(expected))
    expected = np.asarray(bilinear(pictures[0], (32, 48), resize))
    assert np.array_equal(arrays.take([0])[0], expected)
    assert tuple(cache[0][0].shape) == (3, 32, 48)
    if resize != "stretch":
        with pytest.raises(FileExistsError, match=f"resize {resize}, asked for"):
            quietly(items, "sized", size=(32, 48))
    with pytest.raises(FileExistsError, match=r"size \[32, 48\], asked for 48"):
        quietly(items, "sized", size=48, options=options)
    again = quietly(items, "sized", size=[32, 48], options=options)
    assert again.digest == sized.digest


def test_a_letterbox_keeps_a_pixel_of_a_line():
    line = encoded(Image.new("RGB", (1000, 2), "white"))
    boxed = decode(line, (64, 32), form=PixelForm(resize="letterbox"))
    assert (boxed.max(axis=(1, 2)) > 0).sum() == 1


def test_a_square_size_is_one_number_in_a_plan():
    items = [(encoded(scene(20, 30)), 0)]
    square = quietly(items, "square", size=16)
    assert quietly(items, "square", size=(16, 16)).digest == square.digest
    assert square.made["size"] == 16


@pytest.mark.parametrize("resize", RESIZES)
def test_a_mask_is_cut_and_boxed_as_its_image_is(resize):
    mask = np.zeros((60, 120), np.uint8)
    mask[:, 60:] = 7
    image = np.repeat(mask[:, :, None] * 30, 3, axis=2)
    options = tpukit.PackOptions(resize=resize)
    picture, drawn = Image.fromarray(image), Image.fromarray(mask)
    files = {"image": encoded(picture), "mask": encoded(drawn)}
    for number, item in enumerate([(picture, drawn), files]):
        masks = "mask" if number else None
        packed = quietly([item], f"{number}", options=options, masks=masks, size=(40, 40))
        pixels = packed.take([0])[0]
        white = pixels[..., 0] > 105
        assert (white == (pixels[..., 3] == 7)).mean() > 0.97
        assert set(np.unique(pixels[..., 3])) == {0, 7}
        rows_of_seven = (pixels[..., 3] == 7).any(axis=1).sum()
        assert rows_of_seven == (20 if resize == "letterbox" else 40)


GREY = np.random.default_rng(0).integers(0, 256, (24, 40), np.uint8)
COLOURS = np.random.default_rng(1).integers(0, 256, (24, 40, 3), np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (24, 40), np.uint16)
GREY_OF_COLOURS = np.asarray(Image.fromarray(COLOURS).convert("L"))
GREY_OF_DEEP = (DEEP * (255 / 65535)).round().astype(np.uint8)
SOURCES_OF_GREY = {
    "a grey PNG": (encoded(Image.fromarray(GREY)), GREY),
    "a grey TIFF": (encoded(Image.fromarray(GREY), "TIFF"), GREY),
    "a colour PNG": (encoded(Image.fromarray(COLOURS)), GREY_OF_COLOURS),
    "a PNG of 16 bits": (encoded(Image.fromarray(DEEP)), GREY_OF_DEEP),
    "a Pillow image": (Image.fromarray(GREY), GREY),
    "an array": (GREY, GREY),
    "an array of colours": (COLOURS, GREY_OF_COLOURS),
    "a tensor": (torch.from_numpy(GREY)[None], GREY),
}


@pytest.mark.parametrize("what", SOURCES_OF_GREY)
def test_grey_images_have_one_channel_if_asked(what):
    image, expected = SOURCES_OF_GREY[what]
    packed = quietly([(image, 1.5)], "a", options=tpukit.PackOptions(mode="L"))
    assert packed.shape == (24, 40, 1)
    assert np.array_equal(packed.take([0])[0, ..., 0], expected)
    image, label = packed[0]
    assert (tuple(image.shape), image.dtype, label.tolist()) == ((1, 24, 40), torch.uint8, [1.5])
    if packed.encoding == "jpeg":
        small = PackedImages("a", (12, 20))
        assert small.shape == (12, 20, 1)
        assert build_image_cache(packed, size=(12, 20), progress="off").images.shape == (
            1,
            12,
            20,
            1,
        )


@pytest.mark.parametrize("colours", [False, True])
def test_a_jpeg_becomes_the_grey_of_pillow(colours):
    picture = scene(120, 200) if colours else scene(120, 200).convert("L")
    data = encoded(picture, "JPEG")
    opened = Image.open(io.BytesIO(data)).convert("L")
    form = PixelForm(mode="L")
    assert np.array_equal(decode(data, form=form)[..., 0], np.asarray(opened))
    small = opened.resize((50, 30), Image.Resampling.BILINEAR)
    assert np.array_equal(decode(data, (30, 50), form=form)[..., 0], np.asarray(small))
    close = decode(data, (30, 50), exact=False, form=form)[..., 0].astype(int)
    assert abs(close - np.asarray(small)).mean() < 2
    out = np.empty((30, 50, 1), np.uint8)
    assert decode(data, (30, 50), form=form, out=out) is out


SOURCES_OF_16_BITS = {
    "a PNG": encoded(Image.fromarray(DEEP)),
    "a TIFF": encoded(Image.fromarray(DEEP), "TIFF"),
    "a TIFF of 32 bits": encoded(Image.fromarray(DEEP.astype(np.int32)), "TIFF"),
    "a Pillow image": Image.fromarray(DEEP),
    "an array": DEEP,
    "an array of int32": DEEP.astype(np.int32)[:, :, None],
    "a tensor": torch.from_numpy(DEEP.astype(np.int32))[None],
}


@pytest.mark.parametrize("what", SOURCES_OF_16_BITS)
def test_all_sixteen_bits_come_back_as_pairs_of_bytes(what):
    options = tpukit.PackOptions(mode="I;16")
    source = [(SOURCES_OF_16_BITS[what], 0.5)]
    packed = quietly(source, "a", options=options)
    assert packed.shape == (24, 40, 2)
    image, _ = packed[0]
    assert image.dtype == torch.uint8
    assert np.array_equal(uint16_values(image)[0], DEEP)
    assert np.array_equal(uint16_values(image[None])[0, 0], DEEP)
    sized = quietly(source, "b", options=options, size=(12, 20))
    small = Image.fromarray(DEEP.astype(np.float32)).resize((20, 12), Image.Resampling.BILINEAR)
    assert np.array_equal(uint16_values(sized[0][0])[0], np.asarray(small).round())
    if packed.encoding == "jpeg":
        cache = cached_images(packed, size=(12, 20), progress="off")
        assert np.array_equal(cache.take([0]), sized.take([0]))


def test_sixteen_bits_are_not_called_nearly_black(capsys):
    dark = Image.fromarray(DEEP % 64)
    for number, image in enumerate((dark, encoded(dark))):
        quietly([(image, 0)], f"{number}", options=tpukit.PackOptions(mode="I;16"))
    assert "nearly black" not in capsys.readouterr().out


def test_grey_and_16_bits_train_predict_and_show_at_a_size_that_is_not_square():
    table = pandas.DataFrame({"path": [f"{number}.png" for number in range(12)]})
    table["label"] = np.arange(12) % 2 / 1.0
    for name, label in zip(table.path, table.label, strict=True):
        Image.fromarray((DEEP // 8 + 20_000 * int(label)).astype(np.uint16)).save(name)
    options = tpukit.PackOptions(mode="I;16", resize="letterbox")
    packed = quietly(table, "deep", labels="label", options=options)
    images = cached_images(packed, size=(16, 24), progress="off")

    def preprocess(batch):
        return uint16_values(batch) / 65535

    def train(core):
        torch.manual_seed(0)
        model = core.model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(384, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = core.batches(images, batch_size=3, shuffle=True)
        loss = torch.nn.MSELoss()
        tpukit.fit(core, model, optimizer, loss, batches, epochs=1, preprocess=preprocess)
        held_out = core.batches(images, batch_size=2)
        return tpukit.predict(core, model, held_out, preprocess=preprocess)

    predictions = launched(train, cores=2).results[0]
    table["predicted"] = images.in_table_order(predictions)[:, 0]
    assert table.groupby("label").predicted.std().max() < 1e-4 < table.predicted.std()
    batch, labels = torch.utils.data.default_collate([images[number] for number in range(4)])
    with pytest.raises(
        ValueError, match="are the bytes of 16-bit values, pass tpukit.datasets.uint16_values"
    ):
        tpukit.show_batch(batch, labels)
    with pytest.raises(ValueError, match=r"uint16_values\(images\) / 65535, labels"):
        tpukit.Augment()(batch, labels)
    values = preprocess(batch)
    changed, _ = tpukit.Augment()(values, labels)
    assert changed.shape == (4, 1, 16, 24)
    tpukit.show_batch(values, labels)
    tpukit.show_predictions(values, labels, torch.full((4, 1), 0.5), names=["bright"])
    assert plan_pack(table[["path"]], options=options).formats == {"PNG I;16": 12}


def test_grey_images_are_augmented_and_shown():
    items = [(GREY, number % 2) for number in range(4)]
    packed = quietly(items, "a", options=tpukit.PackOptions(mode="L"), classes=["no", "yes"])
    images, labels = torch.utils.data.default_collate([packed[number] for number in range(4)])
    changed, _ = tpukit.Augment()(images, labels)
    assert (changed.shape, changed.dtype) == (images.shape, torch.uint8)
    tpukit.show_batch(images, labels, names=packed.classes)


EIGHT_BITS = {
    "a PNG": encoded(Image.fromarray(GREY)),
    "a JPEG": encoded(Image.fromarray(GREY), "JPEG"),
    "a palette": encoded(Image.fromarray(GREY).convert("P")),
    "a Pillow image": Image.fromarray(COLOURS),
    "an array": GREY,
    "a tensor of bools": torch.from_numpy(GREY > 9)[None],
}


@pytest.mark.parametrize("what", EIGHT_BITS)
def test_a_window_is_refused_for_images_of_eight_bits(what):
    source = [(EIGHT_BITS[what], 0)]
    for number, options in enumerate(({}, {"size": 16})):
        with pytest.raises(
            (ValueError, OSError),
            match="(?s)window= is for images of more than 8 bits.*a separate pack, without window=",
        ):
            quietly(source, f"{number}", options=tpukit.PackOptions(window=(0, 128)), **options)
        quietly(source, f"{number}", **options)


def grey(**options):
    """Pack a grey image with some options."""
    return quietly([(GREY, 0)], "a", options=tpukit.PackOptions(**options))


REFUSED = {
    "a size of three": (lambda: decode(b"", (1, 2, 3)), "one number, or"),
    "a size of words": (lambda: quietly([(GREY, 0)], "a", size="64"), "whole number"),
    "a size of None": (lambda: quietly([(GREY, 0)], "a", size=(4, None)), "whole number"),
    "a size of nothing": (lambda: quietly([(GREY, 0)], "a", size=(0, 4)), "1 or more"),
    "an unknown mode": (lambda: grey(mode="grey"), "'RGB', 'L', 'I;16'"),
    "an unknown way": (lambda: grey(resize="pad"), "'stretch', 'crop', 'letterbox'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_form_has_is_refused_by_name(what):
    call, words = REFUSED[what]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_the_options_hold_for_the_images_in_a_table(tmp_path):
    deep = pandas.DataFrame({"path": [np.full((8, 8), 4095, np.uint16)] * 2})
    grey = quietly(deep, "grey", options=tpukit.PackOptions(mode="L", window=(0, 4095)))
    assert (grey.shape, grey.take([0]).min()) == ((8, 8, 1), 255)
    wide = pandas.DataFrame({"path": [Image.new("RGB", (16, 8), "red")] * 2})
    boxed = quietly(wide, "boxed", size=8, options=tpukit.PackOptions(resize="letterbox"))
    assert boxed.take([0])[0, :, 0, 0].tolist() == [0, 0, 255, 255, 255, 255, 0, 0]
