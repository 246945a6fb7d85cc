"""CT as hospitals export it: 54 small folders of DICOM files, with the true slices of each.

    case = CASES["signed_12_bits_dirty"]
    truth = case.write(folder)      # writes 8 slices of 64 x 64, and says which slices are true

The slices of a series differ in one spot, so values show which slice is where. Names of files and
instance numbers say nothing of the order. All values are constant in blocks of 8 x 8 pixels, so that
a JPEG of 12 bits can hold them without loss.
"""

import contextlib
import io
import shutil
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pydicom
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence

SIDE = 64  # pixels: a pack of this size resamples nothing
STEP = 2.5  # mm between slices
CORNER = (-24.0, -180.0)  # x and y of the first pixel
AXIAL = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
PRONE = [-1.0, 0.0, 0.0, 0.0, -1.0, 0.0]
CORONAL = [1.0, 0.0, 0.0, 0.0, 0.0, -1.0]
LOCALIZER = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
IODINE = {"RescaleType": "MGML", "RescaleIntercept": 0, "SeriesNumber": 4}
NO_SCALE = {"RescaleSlope": None, "RescaleIntercept": None, "RescaleType": None}
MR, PET = "1.2.840.10008.5.1.4.1.1.4", "1.2.840.10008.5.1.4.1.1.128"
CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
PADDING = -3024.0


@dataclass
class Case:
    """A folder as a hospital exports it.

    Attributes:
        make: writes the files into a folder, and adds the true series to a `Truth`.
        says: regular expression that a message must match, although all slices are read.
        refused: regular expression that an error must match instead.
        tolerance: of the Hounsfield units.
    """

    make: Callable
    says: str = ""
    refused: str = ""
    tolerance: float = 0.5

    def write(self, folder: Path) -> "Truth":
        folder.mkdir(parents=True, exist_ok=True)
        truth = Truth()
        with pydicom.config.disable_value_validation(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.make(folder, truth)
        return truth


@dataclass
class Truth:
    """The true slices of a folder: images and Hounsfield units by (study, series)."""

    images: dict = field(default_factory=dict)
    units: dict = field(default_factory=dict)


CASES = {}


def case(**facts):
    """Register a function that writes a case, under its name."""

    def register(make):
        CASES[make.__name__] = Case(make, **facts)
        return make

    return register


def identifier(*words) -> str:
    return uid.generate_uid(entropy_srcs=[str(word) for word in words])


def chest(number: int) -> np.ndarray:
    """Return (64, 64) Hounsfield units without any symmetry; the spot depends on the number."""
    units = np.full((SIDE, SIDE), -1000.0)
    units[8:56, 8:56] = 40
    units[16:32, 16:32] = -850  # one lung, so left and right differ
    units[40:48, 32:40] = 700  # the spine, so front and back differ
    units[16:24, 40:48] = 1000 + 40 * number
    return units


def dataset(stored, place, *, study, series, image, syntax=uid.ExplicitVRLittleEndian, **tags):
    """Return a CT slice; a tag of None is left out."""
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = syntax
    defaults = {
        "SOPClassUID": uid.CTImageStorage,
        "SOPInstanceUID": image,
        "StudyInstanceUID": study,
        "SeriesInstanceUID": series,
        "Modality": "CT",
        "PatientID": f"P-{study[-4:]}",
        "ImageType": ["ORIGINAL", "PRIMARY", "AXIAL"],
        "AcquisitionNumber": 1,
        "SliceThickness": STEP,
        "ImageOrientationPatient": AXIAL,
        "ImagePositionPatient": [float(number) for number in place],
        "PixelSpacing": [0.75, 0.75],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "Rows": SIDE,
        "Columns": SIDE,
        "BitsAllocated": 16,
        "BitsStored": 16,
        "PixelRepresentation": 1,
        "RescaleSlope": 1,
        "RescaleIntercept": -1024,
        "RescaleType": "HU",
    }
    for name, value in (defaults | tags).items():
        if value is not None:
            setattr(file, name, value)
    file.HighBit = file.BitsStored - 1
    store(file, stored)
    file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID
    file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID
    return file


def store(file, stored) -> None:
    """Put stored values into a data set."""
    kind = "<i2" if file.PixelRepresentation else "<u2"
    file.PixelData = np.round(stored).astype(kind).tobytes()


def save(file, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    syntax = file.file_meta.TransferSyntaxUID
    is_big_endian = syntax == uid.ExplicitVRBigEndian
    if is_big_endian:
        file.PixelData = np.frombuffer(file.PixelData, "<u2").astype(">u2").tobytes()
        file["PixelData"].VR = "OW"
    file.save_as(
        path,
        enforce_file_format=True,
        implicit_vr=syntax == uid.ImplicitVRLittleEndian,
        little_endian=not is_big_endian,
    )


def write_series(
    folder,
    truth,
    *,
    name="a",
    count=8,
    study="one",
    series="axial",
    places=None,
    first=0,
    ending=".dcm",
    change=None,
    after=None,
    is_true=True,
    series_uid=None,
    **tags,
):
    """Write a series; its slices are numbered from the head.

    `change(number, file, units)` changes a data set, and returns the true units if they change;
    `after(number, path)` changes the file.
    """
    if places is None:
        places = [(*CORNER, -100 + STEP * number) for number in range(count)]
    count = len(places)
    study_uid = identifier("study", study)
    series_uid = series_uid or identifier("series", study, series)
    shuffled = np.random.default_rng(count).permutation(count)
    images = []
    units = []
    for number, place in enumerate(places):
        true = chest(number + first)
        slope = tags.get("RescaleSlope") or 1
        intercept = tags.get("RescaleIntercept", -1024) or 0
        file = dataset(
            (true - intercept) / slope,
            place,
            study=study_uid,
            series=series_uid,
            image=identifier("image", study, series, number),
            **{"InstanceNumber": count - number, **tags},
        )
        changed = change(number, file, true) if change else None
        path = folder / f"{name}{shuffled[number]:02d}{ending}"
        save(file, path)
        if after:
            after(number, path)
        images.append(str(file.SOPInstanceUID))
        units.append(true if changed is None else changed)
    if is_true:
        truth.images[study_uid, series_uid] = images
        truth.units[study_uid, series_uid] = np.stack(units)


def with_series(**arguments):
    """Return a function that writes a single series."""
    return lambda folder, truth: write_series(folder, truth, **arguments)


def coded(name: str):
    """Return a function that compresses a file with GDCM, without loss."""

    def compress(number, path):
        import gdcm

        reader = gdcm.ImageReader()
        reader.SetFileName(str(path))
        assert reader.Read()
        change = gdcm.ImageChangeTransferSyntax()
        change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, name)))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer = gdcm.ImageWriter()
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        writer.SetFileName(str(path))
        assert writer.Write()

    return compress


def jpeg_of_12_bits(stored) -> bytes:
    """Return a JPEG Extended of 12 bits of an image that is constant in blocks of 8 x 8 pixels.

    Each block is its mean alone, so the only codes are the 16 sizes of a difference of means, here
    all of five bits, and the end of a block, of one bit.
    """
    head = io.BytesIO()

    def segment(marker: int, content: bytes) -> None:
        head.write(struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content)

    head.write(b"\xff\xd8")
    segment(0xDB, bytes([0]) + bytes([1] * 64))  # nothing is divided
    segment(0xC1, struct.pack(">BHHB", 12, *stored.shape, 1) + bytes([1, 0x11, 0]))
    segment(0xC4, bytes([0x00, 0, 0, 0, 0, 16, *[0] * 11, *range(16)]))
    segment(0xC4, bytes([0x10, 1, *[0] * 15, 0]))
    segment(0xDA, bytes([1, 1, 0x00, 0, 63, 0]))
    bits = ""
    before = 0
    for mean in (8 * (stored[::8, ::8].astype(int) - 2048)).ravel().tolist():
        difference = mean - before
        before = mean
        size = abs(difference).bit_length()
        bits += f"{size:05b}"
        if size:
            code = difference if difference > 0 else difference + 2**size - 1
            bits += f"{code:0{size}b}"
        bits += "0"
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return head.getvalue() + scan + b"\xff\xd9"


def as_jpeg_of_12_bits(number, file, units):
    file.PixelData = pydicom.encaps.encapsulate([jpeg_of_12_bits(units + 1024)])
    file["PixelData"].is_undefined_length = True
    file.file_meta.TransferSyntaxUID = uid.JPEGExtended12Bit


# Series and files


@case()
def plain(folder, truth):
    write_series(folder, truth)


@case()
def several_series(folder, truth):
    write_series(folder, truth)
    write_series(folder, truth, name="b", series="sharp", first=20)


def two_studies_of_one_series(first, other, truth):
    write_series(first, truth, series_uid="1.2.3")
    places = [(*CORNER, -98.75 + STEP * number) for number in range(8)]
    second = {"study": "two", "first": 20, "places": places}
    write_series(other, truth, name="b", series_uid="1.2.3", **second)


@case()
def same_series_uid_in_two_studies(folder, truth):
    two_studies_of_one_series(folder / "p1", folder / "p2", truth)


@case()
def same_series_uid_flat(folder, truth):
    two_studies_of_one_series(folder, folder, truth)


@case(says="mirrored, upside down or lying")
def turned_patient(folder, truth):
    def change(number, file, units):
        store(file, units[::-1, ::-1] + 1024)

    places = [(24.0, 180.0, -100 + STEP * number) for number in range(8)]
    write_series(folder, truth, places=places, change=change, ImageOrientationPatient=PRONE)


CASES["ima_ending"] = Case(with_series(ending=".IMA"))
CASES["no_ending"] = Case(with_series(ending=""))


@case()
def no_preamble(folder, truth):
    def cut(number, path):
        if number % 2:
            path.write_bytes(path.read_bytes()[132:])

    write_series(folder, truth, ending="", after=cut)


@case()
def no_meta(folder, truth):
    def strip(number, path):
        content = path.read_bytes()
        length = struct.unpack("<I", content[140:144])[0]
        path.write_bytes(content[144 + length :])

    write_series(folder, truth, ending="", after=strip, syntax=uid.ImplicitVRLittleEndian)


@case(says="left out 3 files .* not DICOM")
def rubbish(folder, truth):
    write_series(folder, truth, ending="")
    (folder / "DICOMDIR").write_bytes(bytes(128) + b"DICM" + bytes(64))
    (folder / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    (folder / "report.txt").write_text("no embolus\n" * 40)
    (folder / "EMPTY").write_bytes(b"")


@case(refused=r"a\d\d.dcm(.*\n)*.*fewer|less than expected")
def cut_off(folder, truth):
    def cut(number, path):
        if number == 3:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])

    write_series(folder, truth, after=cut)


@case(says="files left out, because another file has the same image: 1")
def same_file_twice(folder, truth):
    write_series(folder, truth)
    shutil.copy(folder / "a02.dcm", folder / "copy.dcm")


@case()
def long_identifiers(folder, truth):
    def change(number, file, units):
        file.SOPInstanceUID = f"1.2.826.0.1.3680043.8.498.{'7' * 40}.{number + 1}"
        file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID

    write_series(folder, truth, change=change)


# Images that are no CT slices in Hounsfield units


@case(says="2 files of localizers")
def localizer_own_series(folder, truth):
    write_series(folder, truth)
    places = [(-24.0, -150.0 + number, 0.0) for number in range(2)]
    scout = {"ImageType": LOCALIZER, "ImageOrientationPatient": CORONAL}
    write_series(
        folder, truth, name="s", series="scout", places=places, first=30, is_true=False, **scout
    )


@case(says="1 files of localizers")
def localizer_in_the_series(folder, truth):
    write_series(folder, truth)
    scout = {"ImageType": LOCALIZER, "ImageOrientationPatient": CORONAL, "InstanceNumber": 99}
    scout["SOPInstanceUID"] = identifier("scout")
    places = [(-24.0, -150.0, 0.0)]
    write_series(folder, truth, name="s", places=places, first=30, is_true=False, **scout)


@case(says="8 files of RescaleType MGML")
def iodine_map(folder, truth):
    write_series(folder, truth)
    write_series(folder, truth, name="i", series="iodine", first=30, is_true=False, **IODINE)


CASES["iodine_map_alone"] = Case(with_series(**IODINE), refused="RescaleType MGML")
CASES["modified_hounsfield"] = Case(with_series(RescaleType="HU_MOD"))


@case(says="3 files of modality MR(.*\n)*.*3 files of modality PT(.*\n)*.*secondary captures")
def other_modalities(folder, truth):
    write_series(folder, truth)
    pet = {"Modality": "PT", "SOPClassUID": PET, "RescaleSlope": 2.5, "RescaleType": "BQML"}
    mr = {"Modality": "MR", "SOPClassUID": MR, **NO_SCALE}
    dose = {"SOPClassUID": CAPTURE, "ImagePositionPatient": None, **NO_SCALE}
    for name, count, tags in (("p", 3, pet), ("m", 3, mr), ("w", 1, dose)):
        more = {"name": name, "series": name, "count": count, "first": 30}
        write_series(folder, truth, is_true=False, **more, **tags)


# Values

UNSIGNED = {"BitsStored": 12, "PixelRepresentation": 0}
SIGNED = {"RescaleIntercept": 0}
CASES["unsigned_12_bits"] = Case(with_series(**UNSIGNED))
CASES["signed_16_bits"] = Case(with_series(**SIGNED))


@case()
def signed_12_bits_dirty(folder, truth):
    def change(number, file, units):
        stored = np.round(units + 24).astype("<i2").view("<u2")
        rubbish = np.random.default_rng(number).integers(0, 16, stored.shape).astype("<u2") << 12
        file.PixelData = ((stored & 0x0FFF) | rubbish).astype("<u2").tobytes()

    write_series(folder, truth, change=change, BitsStored=12, RescaleIntercept=-24)


def add_overlay(file, units) -> None:
    """Store an overlay in bit 12 of the pixels."""
    mask = (np.indices(units.shape).sum(0) % 5 == 0).astype("<u2") << 12
    file.PixelData = (np.round(units + 1024).astype("<u2") | mask).tobytes()
    file.add_new(0x60000010, "US", SIDE)
    file.add_new(0x60000011, "US", SIDE)
    file.add_new(0x60000040, "CS", "G")
    file.add_new(0x60000050, "SS", [1, 1])
    file.add_new(0x60000100, "US", 16)
    file.add_new(0x60000102, "US", 12)


@case()
def overlay_in_high_bits(folder, truth):
    write_series(folder, truth, change=lambda _, file, units: add_overlay(file, units), **UNSIGNED)


@case()
def jpeg2000_overlay_bits(folder, truth):
    def compress(number, path):
        coded("JPEG2000Lossless")(number, path)  # of all 16 bits
        file = pydicom.dcmread(path)
        file.BitsStored, file.HighBit = 12, 11
        file.save_as(path)

    write_series(
        folder,
        truth,
        change=lambda _, file, units: add_overlay(file, units),
        after=compress,
        PixelRepresentation=0,
    )


for name, syntax in {
    "jpeg2000": "JPEG2000Lossless",
    "jpeg_ls": "JPEGLSLossless",
    "jpeg_lossless": "JPEGLosslessProcess14_1",
}.items():
    CASES[name] = Case(with_series(after=coded(syntax), **UNSIGNED))
    CASES[f"{name}_signed"] = Case(with_series(after=coded(syntax), **SIGNED))
CASES["rle"] = Case(with_series(after=coded("RLELossless"), **SIGNED))
CASES["jpeg_extended_12_bits"] = Case(with_series(change=as_jpeg_of_12_bits, **UNSIGNED))
CASES["deflated"] = Case(with_series(syntax=uid.DeflatedExplicitVRLittleEndian))
CASES["big_endian"] = Case(with_series(syntax=uid.ExplicitVRBigEndian))
CASES["implicit"] = Case(with_series(syntax=uid.ImplicitVRLittleEndian))
CASES["monochrome1"] = Case(with_series(PhotometricInterpretation="MONOCHROME1"))


def corners(units):
    rows, columns = np.indices(units.shape) - (SIDE - 1) / 2
    return np.hypot(rows, columns) > 0.55 * SIDE


def padded(kind: str, value: int, stored: int, *, is_signed: bool = True):
    """Return a function that writes a series whose corners are padding."""

    def change(number, file, units):
        values = np.round(units + 1024)
        values[corners(units)] = stored
        store(file, values)
        file.add_new("PixelPaddingValue", kind, value)
        true = units.copy()
        true[corners(units)] = PADDING
        return true

    return with_series(change=change, PixelRepresentation=int(is_signed))


CASES["padding"] = Case(padded("SS", -2000, -2000))
CASES["padding_wrapped"] = Case(padded("US", 63536, -2000))
CASES["padding_unsigned"] = Case(padded("US", 63536, 63536, is_signed=False))


@case(says="differ in RescaleSlope or RescaleIntercept", tolerance=1.01)
def intercepts_differ(folder, truth):
    def change(number, file, units):
        slope, intercept = (1, -1024) if number % 2 else (2, -1000)
        file.RescaleSlope, file.RescaleIntercept = slope, intercept
        store(file, (units - intercept) / slope)

    write_series(folder, truth, change=change)


@case(says="cannot hold air(.*\n)*.*differ in RescaleSlope or RescaleIntercept")
def intercepts_contradict(folder, truth):
    def change(number, file, units):
        file.RescaleIntercept = 0 if number % 2 else -1024
        return units + 1024 * (number % 2)

    write_series(folder, truth, change=change, **UNSIGNED)


@case(says="cannot hold air")
def unsigned_intercept_0(folder, truth):
    def change(number, file, units):
        file.RescaleIntercept = 0
        return units + 1024

    write_series(folder, truth, change=change, **UNSIGNED)


NO_SCALE_SAYS = "without RescaleSlope or RescaleIntercept"
CASES["no_rescale"] = Case(with_series(**NO_SCALE), says=NO_SCALE_SAYS)


@case()
def modality_lut(folder, truth):
    def change(number, file, units):
        table = Dataset()
        table.add_new("LUTDescriptor", "US", [4096, 0, 16])
        table.ModalityLUTType = "HU"
        table.add_new("LUTData", "OW", (np.arange(4096) // 2).astype("<u2").tobytes())
        file.ModalityLUTSequence = Sequence([table])
        store(file, units + 1024)
        return np.round(units + 1024) // 2

    write_series(folder, truth, change=change, **UNSIGNED, **NO_SCALE)


@case()
def real_world_value_map(folder, truth):
    def change(number, file, units):
        mapping = Dataset()
        code = Dataset()
        code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = "mg/cm3", "UCUM", "mg/cm3"
        mapping.MeasurementUnitsCodeSequence = Sequence([code])
        mapping.RealWorldValueSlope, mapping.RealWorldValueIntercept = 0.8, -819.2
        mapping.add_new("RealWorldValueFirstValueMapped", "SS", -32768)
        mapping.add_new("RealWorldValueLastValueMapped", "SS", 32767)
        file.RealWorldValueMappingSequence = Sequence([mapping])

    write_series(folder, truth, change=change)


# Places

NO_ORIENTATION = {"ImageOrientationPatient": None}
NO_PLACE = {"ImageOrientationPatient": None, "ImagePositionPatient": None}
WITHOUT = "without a position: they come first, in the order of their InstanceNumber"
CASES["no_orientation"] = Case(with_series(**NO_ORIENTATION), says="without an orientation")


@case(says=WITHOUT)
def slice_location_only(folder, truth):
    def change(number, file, units):
        file.SliceLocation = -100 + STEP * number
        file.InstanceNumber = number + 1

    write_series(folder, truth, change=change, **NO_PLACE)


@case(says=WITHOUT)
def instance_numbers_only(folder, truth):
    def change(number, file, units):
        file.InstanceNumber = number + 1

    write_series(folder, truth, change=change, **NO_PLACE)


@case(says="spacing changes")
def changing_spacing(folder, truth):
    steps = [STEP * number for number in range(6)] + [17.5, 25.0, 32.5, 40.0]
    write_series(folder, truth, places=[(*CORNER, -100 + step) for step in steps])


@case(says="2 slices are missing")
def missing_slices(folder, truth):
    numbers = [0, 1, 2, 3, 6, 7, 8, 9]

    def change(number, file, units):
        file.InstanceNumber = 10 - numbers[number]

    places = [(*CORNER, -100 + STEP * number) for number in numbers]
    write_series(folder, truth, places=places, change=change)


@case(says="8 slices at the same position as another")
def same_places(folder, truth):
    def change(number, file, units):
        file.InstanceNumber = number

    places = [(*CORNER, -100 + STEP * (number // 2)) for number in range(16)]
    write_series(folder, truth, places=places, change=change)


@case(says="tilted gantry")
def gantry_tilt(folder, truth):
    angle = np.deg2rad(20)
    down = [0.0, round(float(np.cos(angle)), 6), -round(float(np.sin(angle)), 6)]
    write_series(folder, truth, ImageOrientationPatient=[1.0, 0, 0, *down])


# Many frames in one file


def enhanced(folder, truth, *, scales):
    """Write an Enhanced CT of 8 frames in no order; the scale of a frame is by its number."""
    series = {"study": identifier("study", "one"), "series": identifier("series", "one", "axial")}
    image = identifier("image", "enhanced")
    nowhere = {"ImagePositionPatient": None, "ImageOrientationPatient": None, "PixelSpacing": None}
    tags = {"SOPClassUID": uid.EnhancedCTImageStorage, **nowhere, **NO_SCALE}
    file = dataset(chest(0), (0, 0, 0), image=image, InstanceNumber=1, **series, **tags)
    shared, plane, measures = Dataset(), Dataset(), Dataset()
    plane.ImageOrientationPatient = AXIAL
    measures.PixelSpacing, measures.SliceThickness = [0.75, 0.75], STEP
    shared.PlaneOrientationSequence = Sequence([plane])
    shared.PixelMeasuresSequence = Sequence([measures])
    frames = []
    pixels = b""
    for number in np.random.default_rng(5).permutation(8).tolist():
        frame, place, scale = Dataset(), Dataset(), Dataset()
        slope, intercept = scales[number % len(scales)]
        scale.RescaleSlope, scale.RescaleIntercept, scale.RescaleType = slope, intercept, "HU"
        place.ImagePositionPatient = [*CORNER, -100 + STEP * number]
        frame.PlanePositionSequence = Sequence([place])
        if len(scales) == 1:
            shared.PixelValueTransformationSequence = Sequence([scale])
        else:
            frame.PixelValueTransformationSequence = Sequence([scale])
        frames.append(frame)
        pixels += np.round((chest(number) - intercept) / slope).astype("<i2").tobytes()
    file.SharedFunctionalGroupsSequence = Sequence([shared])
    file.PerFrameFunctionalGroupsSequence = Sequence(frames)
    file.NumberOfFrames = 8
    file.PixelData = pixels
    save(file, folder / "all.dcm")
    truth.images[series["study"], series["series"]] = [image] * 8
    truth.units[series["study"], series["series"]] = np.stack([chest(n) for n in range(8)])


FRAMES = "enhanced CT: 8 frames"


@case(refused=FRAMES)
def enhanced_ct(folder, truth):
    enhanced(folder, truth, scales=[(1, -1024)])


@case(refused=FRAMES)
def enhanced_ct_scale_per_frame(folder, truth):
    enhanced(folder, truth, scales=[(2, -1000), (1, -1024)])


def packed(folder: Path, to: Path, **options):
    """Pack a folder as Hounsfield units; return images and units by (study, series), and prints."""
    from tpukit import pe

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        records = pe.pack_dicom(folder, to, size=SIDE, form="int16", progress="off", **options)
    values = np.ascontiguousarray(records.take(np.arange(len(records)))).view("<i2")[..., 0]
    found = Truth()
    for number in range(len(records)):
        with pydicom.config.disable_value_validation():
            file = folder / records.name(number)
            header = pydicom.dcmread(file, stop_before_pixels=True, force=True)
            key = str(header.StudyInstanceUID), str(header.SeriesInstanceUID)
            found.images.setdefault(key, []).append(str(header.SOPInstanceUID))
        found.units.setdefault(key, []).append(values[number])
    return found, printed.getvalue()
