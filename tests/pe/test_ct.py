"""three_windows and read_dicom: Hounsfield units become the colours of the JPEG set."""

import builtins

import pytest

np = pytest.importorskip("numpy")

from tpukit.pe import read_dicom, three_windows  # noqa: E402

# Window edges by arithmetic: level - width / 2 is 0, level + width / 2 is 255.
EDGES = {
    "red, lung": (0, -1350, 150),
    "green, embolism": (1, -250, 450),
    "blue, mediastinum": (2, -160, 240),
}


@pytest.mark.parametrize("window", EDGES)
def test_a_window_spans_black_to_white_between_its_edges(window):
    channel, low, high = EDGES[window]
    picture = three_windows(np.array([[-3000, low, *np.linspace(low, high, 6)[1:-1], high, 3000]]))
    assert picture.dtype == np.uint8
    assert picture[0, :, channel].tolist() == [0, 0, 51, 102, 153, 204, 255, 255]


def test_integers_and_floats_give_the_same_picture():
    hounsfield = np.arange(-2048, 2048).reshape(64, 64)
    assert np.array_equal(
        three_windows(hounsfield.astype(np.int16)), three_windows(hounsfield.astype(np.float64))
    )


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4), (4, 4, 3)])
def test_anything_but_one_slice_is_refused(shape):
    with pytest.raises(ValueError, match="fix:"):
        three_windows(np.zeros(shape))


def real_slice():
    data = pytest.importorskip("pydicom.data")
    return data.get_testdata_file("CT_small.dcm", download=False)


def test_a_real_ct_is_read_in_hounsfield_units():
    hounsfield = read_dicom(real_slice())
    assert hounsfield.shape == (128, 128)
    assert hounsfield.dtype == np.float32
    # Its stored values start at 128 and its RescaleIntercept is -1024: air, tissue and bone are where they should be.
    assert hounsfield.min() == -896
    assert 0 < np.median(hounsfield[hounsfield > -200]) < 100


def test_a_real_ct_goes_through_the_windows_and_the_model(capsys):
    torch = pytest.importorskip("torch")
    Image = pytest.importorskip("PIL.Image")
    from tpukit.pe import normalize, resnet34

    picture = Image.fromarray(three_windows(read_dicom(real_slice()))).resize(
        (64, 64), Image.Resampling.BILINEAR
    )
    images = torch.tensor(np.asarray(picture)).permute(2, 0, 1)[None]
    with torch.no_grad():
        logits = resnet34().eval()(normalize(images))
    assert logits.shape == (1, 10)
    assert logits.isfinite().all()


def test_a_file_that_is_no_dicom_is_refused(tmp_path):
    pytest.importorskip("pydicom")
    (tmp_path / "x.dcm").write_text("hello")
    with pytest.raises(ValueError, match=r"not a DICOM file \(5 bytes\)\n  fix:"):
        read_dicom(tmp_path / "x.dcm")


def test_without_pydicom_the_error_says_what_to_install(monkeypatch):
    def without(name, *args, **kwargs):
        if name == "pydicom":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"fix:   %pip install pydicom"):
        read_dicom("x.dcm")
