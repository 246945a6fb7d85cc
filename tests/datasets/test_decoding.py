"""decode: Pillow's pixels to the last bit, whatever the file; what is no whole image raises."""

import contextlib
import io
import struct
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
PIL = pytest.importorskip("PIL")

from tpukit.datasets.decoding import decode  # noqa: E402
from tpukit.datasets.image_modes import to_form  # noqa: E402
from tpukit.datasets.pixel_form import PixelForm  # noqa: E402

KIT = Path(__file__).parents[2]


def picture(height, width, mode="RGB", seed=0):
    coarse = np.random.default_rng(seed).integers(
        0, 256, (height // 5 + 2, width // 5 + 2, 3), dtype=np.uint8
    )
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def by_pillow(data, size=None):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    return np.asarray(
        image if size is None else image.resize((size, size), Image.Resampling.BILINEAR)
    )


def turned(how, order=">"):
    """Return an EXIF header with one tag: the orientation."""
    begin = b"Exif\0\0" + {">": b"MM", "<": b"II"}[order]
    return begin + struct.pack(order + "HIHHHIHHI", 42, 8, 1, 0x0112, 3, 1, how, 0, 0)


WHOLE = {
    "a JPEG as cameras write it": encoded(picture(96, 96)),
    "of odd height and width": encoded(picture(101, 67), quality=90),
    "smaller than asked for": encoded(picture(20, 30)),
    "of one pixel": encoded(picture(1, 1)),
    "without subsampling": encoded(picture(80, 80), subsampling=0),
    "progressive": encoded(picture(70, 90), progressive=True),
    "grey": encoded(picture(64, 64, "L")),
    "CMYK": encoded(picture(64, 64, "CMYK")),
    "YCCK": encoded(picture(64, 64, "CMYK")).replace(
        b"Adobe\0d\0\0\0\0\0", b"Adobe\0d\0\0\0\0\2"
    ),  # Adobe's note says so
    "stored as RGB": encoded(picture(64, 48), keep_rgb=True),
    **{
        f"turned by its header, {how} of 8": encoded(picture(40, 60), exif=turned(how))
        for how in range(1, 9)
    },
    "turned by its header, smaller than asked for": encoded(picture(20, 30), exif=turned(6)),
    "turned by its header, of little-endian numbers": encoded(picture(40, 60), exif=turned(8, "<")),
    "turned by its header, CMYK": encoded(picture(40, 60, "CMYK"), exif=turned(6)),
    "a turned PNG": encoded(picture(40, 60), "PNG", exif=turned(6)),
    "with a header that turns it by 9": encoded(picture(40, 60), exif=turned(9)),
    "with a comment after its end": encoded(picture(96, 96)) + b"junk",
    "PNG": encoded(picture(50, 70), "PNG"),
    "PNG with a palette": encoded(picture(50, 70).convert("P"), "PNG"),
    "PNG with transparency": encoded(picture(50, 70, "RGBA"), "PNG"),
    "PNG in black and white": encoded(picture(50, 70, "1"), "PNG"),
    "WebP": encoded(picture(50, 70), "WEBP"),
}


@pytest.mark.parametrize("size", [None, 32, 64])
@pytest.mark.parametrize("what", WHOLE)
def test_pixels_are_pillows_to_the_last_bit(what, size):
    pixels = decode(WHOLE[what], size)
    assert (pixels.dtype, pixels.shape[2], pixels.flags.writeable) == (np.uint8, 3, True)
    assert np.array_equal(pixels, by_pillow(WHOLE[what], size))


@pytest.mark.parametrize("what", WHOLE)
def test_inexact_pixels_have_the_size_and_are_near(what):
    pixels = decode(WHOLE[what], 32, exact=False)
    assert pixels.shape == (32, 32, 3)
    assert np.abs(pixels.astype(int) - by_pillow(WHOLE[what], 32)).mean() < 12


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("what", WHOLE)
def test_pixels_go_where_they_are_wanted(what, exact):
    out = np.zeros((3, 48, 48, 3), np.uint8)
    assert decode(WHOLE[what], 48, exact=exact, out=out[1]) is not None
    assert np.array_equal(out[1], decode(WHOLE[what], 48, exact=exact))
    assert not out[::2].any()


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"the pixels have the shape \(96, 96, 3\), and out is"):
        decode(WHOLE["a JPEG as cameras write it"], out=np.zeros((95, 96, 3), np.uint8))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_read(kind):
    assert (
        decode(kind(WHOLE["PNG"])).shape
        == decode(kind(encoded(picture(50, 70)))).shape
        == (50, 70, 3)
    )


def with_zeros(data, at, count):
    return data[:at] + bytes(count) + data[at + count :]


def resized(data, height, width):
    """Return a JPEG whose header claims another size."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + height.to_bytes(2) + width.to_bytes(2) + data[at + 4 :]


LARGE = encoded(picture(256, 256), quality=90)
BROKEN = {
    "a JPEG with zeros in its middle": with_zeros(LARGE, len(LARGE) // 2, 64),
    "a JPEG with zeros in its middle and bytes behind its end": with_zeros(
        LARGE, len(LARGE) // 2, 64
    )
    + b"\0\0",
    "a JPEG with bytes between its header and its pixels": LARGE.replace(
        b"\xff\xda", b"\x12" * 200 + b"\xff\xda", 1
    ),
    "half a JPEG, and an end": LARGE[: len(LARGE) // 2] + b"\xff\xd9",
    "half a progressive JPEG, and an end": encoded(picture(96, 96), progressive=True)[:-300]
    + b"\xff\xd9",
    "half a CMYK JPEG, and an end": encoded(picture(96, 96, "CMYK"))[:-400] + b"\xff\xd9",
    "a JPEG with more data than pixels": encoded(picture(60, 60))[:-2]
    + b"\x12\x34" * 20
    + b"\xff\xd9",
    "nothing": b"",
    "text": b"<html>not found</html>",
    "a JPEG that ends within its header": WHOLE["grey"][:100],
    "a JPEG cut in half": encoded(picture(96, 96))[: len(encoded(picture(96, 96))) // 2],
    "a JPEG without its last bytes": WHOLE["a JPEG as cameras write it"][:-20],
    "a JPEG's first two bytes": b"\xff\xd8",
    "a PNG cut in half": WHOLE["PNG"][: len(WHOLE["PNG"]) // 2],
    "a PNG with a wrong checksum": WHOLE["PNG"][:60] + b"\0\0\0\0" + WHOLE["PNG"][64:],
}
LYING = {
    "a JPEG of 3 kB that claims 900 million pixels": resized(
        encoded(picture(96, 96)), 30_000, 30_000
    ),
    "a JPEG that claims 4,290 million pixels": resized(encoded(picture(96, 96)), 65_500, 65_500),
    "a header that asks for 4,000 million pixels": encoded(picture(9, 9), "BMP")[:18]
    + (63_000).to_bytes(4, "little") * 2
    + encoded(picture(9, 9), "BMP")[26:],
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_whole_image_raises(what, exact):
    with pytest.raises(ValueError, match=rf"not a whole image: .*\({len(BROKEN[what]):,} bytes\)"):
        decode(BROKEN[what], 32, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("what", LYING)
def test_a_header_with_more_pixels_than_the_limit_raises_with_the_line_that_raises_the_limit(
    what, exact
):
    with pytest.raises(ValueError, match="claims more than 89,478,485 pixels") as error:
        decode(LYING[what], 32, exact=exact)
    assert "PIL.Image.MAX_IMAGE_PIXELS = None" in error.value.fix


def test_an_error_of_a_decoder_is_that_of_its_image():
    data = b"BLP1" + bytes(200)  # Pillow raises NotImplementedError for some of them
    with pytest.raises(ValueError, match="not a whole image: "):
        decode(data)
    data = bytearray(encoded(picture(64, 64), "DDS"))
    data[80:88] = struct.pack("<I", 4) + b"DXT9"  # compressed, in a way that is not known
    with pytest.raises(ValueError, match="not a whole image: NotImplementedError: "):
        decode(bytes(data))


DEEP = np.array([[0, 4000], [40_000, 65_535]], np.uint16)
DEEPER = {
    "a TIFF of 32 bits": encoded(Image.fromarray(DEEP.astype(np.int32)), "TIFF"),
    "a TIFF of floats": encoded(Image.fromarray(DEEP.astype(np.float32)), "TIFF"),
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_become_eight_by_their_whole_range_or_a_window_and_are_never_clipped_in_silence(
    kind,
):
    deep = encoded(Image.fromarray(DEEP), kind)
    assert decode(deep)[:, :, 0].tolist() == [[0, 16], [156, 255]]
    assert decode(deep, form=PixelForm(window=(0, 4000)))[:, :, 1].tolist() == [
        [0, 255],
        [255, 255],
    ]


def test_a_turned_png_of_sixteen_bits_has_its_range_also_in_mode_i():
    """Pillow before 10.3 opens a PNG of 16 bits in mode I, and a turned image has no format."""
    image = Image.fromarray(DEEP.astype(np.int32))
    assert image.mode == "I"
    image.format = "PNG"
    image.getexif()[0x0112] = 3
    assert np.asarray(to_form(image))[:, :, 0].tolist() == [[255, 156], [16, 0]]


@pytest.mark.parametrize("kind", DEEPER)
def test_what_has_no_range_of_its_own_needs_a_window(kind):
    with pytest.raises(
        ValueError,
        match=r"(?s)has no known range.*fix: +pack\(..., options=tpukit.PackOptions\(window=",
    ):
        decode(DEEPER[kind])
    assert decode(DEEPER[kind], form=PixelForm(window=(0, 65_535)))[:, :, 2].tolist() == [
        [0, 16],
        [156, 255],
    ]


def test_a_float_image_with_nan_is_refused():
    unknown = encoded(Image.fromarray(np.array([[np.nan, 1]], np.float32)), "TIFF")
    with pytest.raises(ValueError, match="nan or infinity"):
        decode(unknown, form=PixelForm(window=(0, 1)))


@pytest.mark.parametrize("kind", ["DDS", "JPEG2000", "BMP"])
def test_a_number_16_in_a_header_is_no_image_of_sixteen_bits(kind):
    """The colour masks of a DDS, the length of a JPEG 2000, and "BGR;16": five bits per channel."""
    sizes = range(20, 60)
    files = [encoded(picture(32, size), kind) for size in sizes]
    if kind == "BMP":
        pixels = struct.pack("<H", 0b11111_000000_00000) * 4
        head = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 16, 3, 8, 0, 0, 0, 0)
        masks = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
        place = 14 + len(head) + len(masks)
        files = [struct.pack("<2sIII", b"BM", place + 8, 0, place) + head + masks + pixels]
    for data in files:
        assert np.array_equal(decode(data, form=PixelForm(window=(0, 4000))), by_pillow(data))


def test_an_apple_icon_of_sixteen_bits_is_not_clipped():
    values = np.linspace(0, 65_535, 64 * 64).reshape(64, 64).astype(np.uint16)
    pixels = decode(encoded(Image.fromarray(values), "ICNS"))
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert 120 < pixels.mean() < 135


@pytest.mark.skipif(PIL.__version__ < "13", reason="Pillow 12 reads no alpha of a TGA's palette")
def test_alpha_in_the_palette_of_a_tga_shows_white():
    image = Image.new("P", (4, 2), 1)
    image.putpalette([10, 20, 30, 255, 200, 0, 0, 0], "RGBA")
    image.paste(0, (0, 0, 2, 2))
    pixels = decode(encoded(image, "TGA"))
    assert pixels[0].tolist() == [[10, 20, 30]] * 2 + [[255, 255, 255]] * 2


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_shows_white(mode):
    half = Image.new("RGBA", (4, 2), (200, 0, 0, 0))
    half.paste((10, 20, 30, 255), (0, 0, 2, 2))
    if mode in ("P", "L", "RGB"):  # one value or colour that stands for transparent
        image = Image.new(mode, (4, 2), 0)
        image.paste({"P": 5, "L": 5, "RGB": (5, 6, 7)}[mode], (0, 0, 2, 2))
        data = encoded(image, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)
    else:
        data = encoded(half.convert(mode), "TIFF" if mode == "LA" else "PNG")
    pixels = decode(data)
    assert (pixels[:, 2:] == 255).all()
    assert (pixels[:, :2] < 100).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_damaged_exif_header_harms_no_image(kind):
    whole = np.asarray(Image.open(io.BytesIO(encoded(picture(40, 60), kind))).convert("RGB"))
    for exif in (
        turned(6)[:-9],
        b"Exif\0\0",
        b"Exif\0\0nonsense",
        turned(6)[:10] + b"\xff" * 8,
        turned(0),
    ):
        assert np.array_equal(decode(encoded(picture(40, 60), kind, exif=exif)), whole)


def test_of_several_pages_the_first_is_the_image():
    first, second = picture(9, 7), picture(20, 30, seed=1)
    data = encoded(first, "TIFF", save_all=True, append_images=[second])
    assert np.array_equal(decode(data), np.asarray(first))


def test_thousands_of_broken_files_raise_nothing_else():
    random = np.random.default_rng(0)
    files = [WHOLE[name] for name in ("grey", "progressive", "PNG", "WebP", "PNG with a palette")]
    for number in range(1000):
        data = bytearray(files[number % len(files)])
        for _ in range(3):
            data[random.integers(min(len(data), random.choice([60, 700])))] = random.integers(256)
        try:
            pixels = decode(bytes(data), 16, exact=bool(number % 2))
        except ValueError:
            continue
        except Warning:  # Pillow's, of an image bomb; an error only in tests
            continue
        assert pixels.shape == (16, 16, 3)


def test_without_simplejpeg_the_pixels_are_the_same_and_it_is_said_once(tmp_path):
    (tmp_path / "image.jpg").write_bytes(WHOLE["of odd height and width"])
    code = (
        "import sys; sys.modules['simplejpeg'] = None\n"
        "from tpukit.datasets.decoding import decode; import numpy, pathlib\n"
        f"data = pathlib.Path({str(tmp_path / 'image.jpg')!r}).read_bytes()\n"
        f"numpy.save({str(tmp_path / 'pixels.npy')!r}, [decode(data, 40), decode(data, 40, exact=False)])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=KIT, capture_output=True, text=True, check=True
    )
    assert (
        ran.stdout.count("simplejpeg is not installed")
        == ran.stdout.count("pip install simplejpeg")
        == 1
    )
    for pixels in np.load(tmp_path / "pixels.npy"):
        assert np.array_equal(pixels, by_pillow(WHOLE["of odd height and width"], 40))


def test_a_jpeg_with_512_zeros_anywhere_in_its_data_is_never_taken_for_whole():
    data = encoded(picture(256, 256), quality=92)
    start = data.index(b"\xff\xda") + 20
    for at in np.linspace(start, len(data) - 600, 101).astype(int):
        with pytest.raises(
            ValueError, match="not a whole image: .*(premature end|extraneous|Premature)"
        ):
            decode(with_zeros(data, at, 512), 64)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP"])
def test_an_image_that_claims_more_pixels_than_the_limit_costs_no_memory(kind, monkeypatch):
    data = encoded(picture(99, 101), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_999)
    assert decode(data).shape == (99, 101, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_998)
    with (
        contextlib.suppress(Image.DecompressionBombWarning),
        pytest.raises(ValueError, match="claims more than 9,998 pixels, the limit of Pillow"),
    ):
        decode(data)


def test_a_lying_header_costs_no_memory():
    code = (
        "import resource, sys; from tpukit.datasets.decoding import decode; import numpy, PIL.Image, simplejpeg\n"
        "data = sys.stdin.buffer.read(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: decode(data, 32)\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    data = LYING["a JPEG of 3 kB that claims 900 million pixels"]
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=KIT, input=data, capture_output=True, check=True
    )
    *said, kilobytes = ran.stdout.decode().splitlines()
    assert "30,000 x 30,000 pixels" in said[1]
    assert int(kilobytes) < 50_000


def test_a_decoder_that_runs_out_of_memory_has_met_no_whole_image():
    """60 million pixels, where 100 MB of memory are left."""
    code = (
        "import resource, sys; from tpukit.datasets.decoding import decode; import numpy, PIL.Image, simplejpeg\n"
        "PIL.Image.init(); data = sys.stdin.buffer.read()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)\n"
        "try: decode(data, 32)\n"
        "except ValueError as error: print(error)"
    )
    for data in (
        resized(encoded(picture(96, 96)), 8_000, 8_000),
        encoded(Image.new("RGB", (8000, 8000)), "PNG"),
    ):
        ran = subprocess.run([sys.executable, "-c", code], cwd=KIT, input=data, capture_output=True)
        assert b"not a whole image: decoding it takes more memory than there is" in ran.stdout, (
            ran.stderr
        )


def gif(frames=1):
    file = io.BytesIO()
    images = [
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 30, 3), np.uint8))
        for n in range(frames)
    ]
    images[0].save(file, "GIF", save_all=frames > 1, append_images=images[1:])
    return file.getvalue()


@pytest.mark.parametrize("frames", [1, 3])
def test_a_gif_whose_blocks_do_not_lead_to_its_end_is_damaged(frames):
    """Pillow stops where the pixels are full and skips junk; bytes that are put in shift the pixels, and no more."""
    whole, taken_by_pillow = gif(frames), 0
    pixels = decode(whole)
    for start in range(820, len(gif()), 7):  # behind the colours
        damaged = whole[:start] + b"\x07" + whole[start:]
        with contextlib.suppress(OSError, SyntaxError):
            taken_by_pillow += not np.array_equal(
                Image.open(io.BytesIO(damaged)).convert("RGB"), pixels
            )
        with pytest.raises(ValueError, match="not a whole image"):
            decode(damaged)
    assert taken_by_pillow
    assert np.array_equal(decode(whole + b"anything after the end"), pixels)


def test_a_png_is_damaged_where_a_checksum_is_wrong_also_behind_the_last_pixel():
    """Pillow checks no checksum of the pixels, and stops where there are enough of them."""
    file = io.BytesIO()
    y, x = np.mgrid[:46, :31]
    Image.fromarray((x * 8 + y * 3 + x * y % 5).astype(np.uint8)).convert("LA").save(file, "PNG")
    whole, taken_by_pillow = file.getvalue(), 0
    pixels = decode(whole)
    for length in range(1, 80):
        for damaged in (whole[:-length], whole[:-length] + b"\xff" * length):
            with contextlib.suppress(OSError, SyntaxError):
                taken_by_pillow += not np.array_equal(
                    Image.open(io.BytesIO(damaged)).convert("RGB"), pixels
                )
            with pytest.raises(ValueError, match="not a whole image"):
                decode(damaged)
    assert taken_by_pillow
    assert np.array_equal(decode(whole + b"anything after the end"), pixels)
