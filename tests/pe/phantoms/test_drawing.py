"""phantom: the same seed gives the same bytes, the labels are what was drawn, and nobody's files are touched."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("scipy")

from tpukit.pe import (  # noqa: E402
    COLUMNS,
    LABELS,
    PEImages,
    assign_folds,
    embolus_masks,
    embolus_places,
    index_dicom,
    index_images,
    phantom,
    read_dicom,
    read_labels,
    three_windows,
)
from tpukit.pe.phantoms.anatomy import HEIGHT, Findings, make_patient  # noqa: E402
from tpukit.pe.phantoms.drawing import decide_findings, height_of  # noqa: E402
from tpukit.pe.phantoms.scanner import scan  # noqa: E402

SMALL = {"studies": 3, "slices": 4, "size": 64}


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return phantom(tmp_path_factory.mktemp("phantom"), **SMALL, workers=2)


def test_a_phantom_goes_through_the_whole_pipeline(made, capsys):
    labels = assign_folds(read_labels(made), folds=3)
    assert list(pd.read_csv(made / "train.csv").columns) == list(COLUMNS)
    table = index_images(labels, made / "train-jpegs")
    assert len(table) == 12
    assert sorted(table.position[table.fold == 0]) == [0, 1, 2, 3]
    image, target = PEImages(table, 32)[0]
    assert (image.shape, target.shape) == ((3, 32, 32), (len(LABELS),))
    assert capsys.readouterr().out == ""


def test_the_layout_is_that_of_the_jpeg_set(made):
    for path in (made / "train-jpegs").rglob("*.jpg"):
        study, series, name = path.relative_to(made / "train-jpegs").parts
        position, image = name.removesuffix(".jpg").split("_")
        assert int(position) in range(4)
        assert all(len(uid) == 12 and int(uid, 16) >= 0 for uid in (study, series, image))
        with Image.open(path) as picture:
            assert (picture.size, picture.mode, picture.format) == ((64, 64), "RGB", "JPEG")


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_workers(made, tmp_path):
    assert contents(phantom(tmp_path / "again", **SMALL, workers=1)) == contents(made)
    other = contents(phantom(tmp_path / "other", **SMALL, seed=1, workers=2))
    assert not other.keys() & contents(made).keys() - {"train.csv", "phantom.json"}


def test_a_finished_phantom_is_not_made_again(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "copy")
    mark = next((folder / "train-jpegs").rglob("*.jpg"))
    mark.write_bytes(b"marked")
    assert phantom(folder, **SMALL) == folder
    assert mark.read_bytes() == b"marked"


def test_hidden_files_of_a_file_manager_do_no_harm(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "copy")
    mark = next((folder / "train-jpegs").rglob("*.jpg"))
    mark.write_bytes(b"marked")
    (folder / "train-jpegs" / ".DS_Store").write_bytes(b"Finder")
    phantom(folder, **SMALL)
    assert mark.read_bytes() == b"marked"


def test_other_phantoms_are_never_drawn_over_finished_ones(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "copy")
    with pytest.raises(FileExistsError) as refused:
        phantom(folder, **SMALL | {"slices": 3, "seed": 5}, workers=1)
    assert str(refused.value) == (
        f"{folder} holds another phantom\n"
        "  found: slices 4, asked for 3; seed 0, asked for 5\n"
        f"  fix:   name another folder, or delete this one: shutil.rmtree({str(folder)!r})"
    )
    assert contents(folder) == contents(made)
    shutil.rmtree(folder)
    phantom(folder, **SMALL | {"slices": 3, "seed": 5}, workers=1)
    assert len(read_labels(folder)) == 9


@pytest.mark.parametrize("form", ["jpeg", "dicom"])
def test_a_phantom_that_has_lost_one_image_is_made_again(tmp_path, form):
    if form == "dicom":
        pytest.importorskip("pydicom")
    folder = phantom(tmp_path, 2, 2, size=32, form=form)
    whole = contents(folder)
    next(path for path in folder.rglob("*") if path.suffix in (".jpg", ".dcm")).unlink()
    assert contents(phantom(folder, 2, 2, size=32, form=form)) == whole


INTERRUPTIONS = {
    "before the manifest": lambda folder: (folder / "phantom.json").write_text(
        '{"complete": false}'
    ),
    "while the manifest was written": lambda folder: (folder / "phantom.json").write_text(
        '{"recipe": 1, "stu'
    ),
    "and a study is gone": lambda folder: shutil.rmtree(next((folder / "train-jpegs").iterdir())),
    "and the table is gone": lambda folder: (folder / "train.csv").unlink(),
}


@pytest.mark.parametrize("interrupted", INTERRUPTIONS)
def test_an_interrupted_phantom_is_made_again(made, tmp_path, interrupted):
    folder = shutil.copytree(made, tmp_path / "copy")
    INTERRUPTIONS[interrupted](folder)
    phantom(folder, **SMALL, workers=2)
    assert contents(folder) == contents(made)


def test_processes_that_draw_the_same_into_one_folder_take_turns_and_others_are_refused(
    made, tmp_path
):
    calls = [
        f"from tpukit.pe import phantom; phantom({str(tmp_path)!r}, 3, {slices}, size=64, workers=1)"
        for slices in (3, 4, 4)
    ]
    root = Path(__file__).parents[3]
    started = [
        subprocess.Popen([sys.executable, "-c", call], cwd=root, stderr=subprocess.PIPE)
        for call in calls
    ]
    errors = [process.communicate(timeout=600)[1] for process in started]
    slices = json.loads((tmp_path / "phantom.json").read_text())["plan"]["slices"]
    assert [process.returncode == 0 for process in started] == [
        slices == 3,
        slices == 4,
        slices == 4,
    ]
    assert all(
        b"holds another phantom" in error
        for error, one in zip(errors, started, strict=True)
        if one.returncode
    )
    assert len(index_images(read_labels(tmp_path), tmp_path / "train-jpegs")) == 3 * slices
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "phantom.json",
        "train-jpegs",
        "train.csv",
    ]


def test_what_a_killed_run_left_is_cleared(made, tmp_path):
    call = f"from tpukit.pe import phantom; phantom({str(tmp_path)!r}, 50, 12, size=64, workers=2)"
    process = subprocess.Popen([sys.executable, "-c", call], cwd=Path(__file__).parents[3])
    while not list(tmp_path.glob("unfinished/train-jpegs/*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    phantom(tmp_path, **SMALL, workers=1)
    assert contents(tmp_path) == contents(made)


def test_a_folder_with_somebodys_files_is_left_alone(tmp_path):
    (tmp_path / "train.csv").write_text("precious")
    with pytest.raises(FileExistsError, match=r"not a phantom's\n  found: \['train.csv'\]\n  fix:"):
        phantom(tmp_path, **SMALL)
    assert contents(tmp_path) == {"train.csv": b"precious"}


def test_numbers_of_numpy_are_numbers(tmp_path):
    numbers = {name: np.int32(value) for name, value in SMALL.items()}
    phantom(tmp_path, **numbers, positive=np.float32(0.5), workers=1)
    assert len(read_labels(tmp_path)) == SMALL["studies"] * SMALL["slices"]


@pytest.mark.parametrize("name", ["studies", "slices", "size"])
def test_what_the_error_offers_for_a_number_too_small_is_accepted(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}.*got 1\n  fix: +{name}=") as refused:
        phantom(tmp_path, **SMALL | {name: 1})
    offered = str(refused.value).rpartition("=")[2]
    phantom(tmp_path, **SMALL | {name: int(offered)}, workers=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": -1},
        {"workers": 0},
        {"seed": -1},
        {"seed": None},
        {"studies": 0},
        {"studies": 2.5},
        {"slices": "4"},
        {"size": 8},
        {"positive": 1.5},
        {"form": "png"},
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_before_anything_is_written(tmp_path, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        phantom(tmp_path / "new", **{**SMALL, **wrong})
    assert not (tmp_path / "new").exists()


def test_dicom_phantoms_are_the_same_slices_in_the_competitions_layout(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    folder = phantom(tmp_path / "dicom", **SMALL, form="dicom")
    drawn = phantom(tmp_path / "jpeg", **SMALL)
    assert (folder / "train.csv").read_text() == (drawn / "train.csv").read_text()
    for row in index_images(read_labels(drawn), drawn / "train-jpegs").itertuples():
        path = (
            folder
            / "train"
            / row.StudyInstanceUID
            / row.SeriesInstanceUID
            / f"{row.SOPInstanceUID}.dcm"
        )
        header = pydicom.dcmread(path)
        assert (header.WindowCenter, header.WindowWidth, header.RescaleIntercept) == (
            40,
            400,
            -1024,
        )
        assert header.ImagePositionPatient[2] == pytest.approx(
            HEIGHT * (0.03 + 0.94 * row.position / 3), abs=0.001
        )
        with Image.open(row.path) as picture:
            seen = three_windows(read_dicom(path)).astype(float)
            assert abs(seen - np.asarray(picture)).mean() < 10  # the loss of a JPEG of noise


def test_a_process_that_fails_is_told_with_its_traceback_and_leaves_nothing_complete(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)ended with status 1.*Error"):
        phantom(
            tmp_path / "new", studies=2, slices=2, size=10**7
        )  # more than can be addressed: MemoryError
    assert not (tmp_path / "new" / "phantom.json").exists()


def test_drawing_says_how_far_it_is_once_at_the_end_in_a_log_and_nothing_when_off(tmp_path, capsys):
    phantom(tmp_path / "a", studies=2, slices=2, size=32, progress="text")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("draw phantoms  2/2")
    phantom(tmp_path / "b", studies=2, slices=2, size=32, progress="off")
    assert capsys.readouterr().out == ""


def test_one_line_in_a_shell_is_enough(tmp_path):
    call = f"import tpukit; print(tpukit.pe.phantom({str(tmp_path / 'x')!r}, 2, 2, size=32))"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(tmp_path / "x")


def recipe(**changes):
    return {"seed": 0, "studies": 64, "positive": 0.36} | changes


@pytest.mark.parametrize("seed", range(4))
def test_the_shares_of_exams_are_met_and_every_kind_of_embolus_occurs(seed):
    exams = decide_findings(recipe(seed=seed))
    assert sum(exam.positive for exam in exams) == 23
    assert sum(exam.indeterminate for exam in exams) == 4
    seen = pd.DataFrame([exam.labels for exam in exams]).sum()
    assert (
        seen[
            ["leftsided_pe", "rightsided_pe", "central_pe", "rv_lv_ratio_gte_1", "rv_lv_ratio_lt_1"]
        ]
        > 0
    ).all()


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1.0, 64), (0.5, 32)])
def test_any_share_of_positive_exams_can_be_had(share, expected):
    exams = decide_findings(recipe(positive=share))
    assert (len(exams), sum(exam.positive for exam in exams)) == (64, expected)


def drawn(findings, z, *, size=128, seed=5):
    hounsfield, mask = scan(
        make_patient(np.random.default_rng(seed), findings), z, size, np.random.default_rng(0)
    )
    return hounsfield, mask.any()


SIDES = {"left": Findings(left=True, acute=True), "right": Findings(right=True, acute=True)}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("old", [False, True])
def test_an_embolus_darkens_an_artery_on_the_side_its_label_names(side, old):
    """Draw the same patient without the clots: what differs is the clot, and it lies on one side."""
    patient = make_patient(
        np.random.default_rng(5), replace(SIDES[side], acute=not old, chronic=old)
    )
    without = replace(patient, emboli=[])
    shown = 0
    for level in np.linspace(0.3, 0.75, 10):
        (with_clot, mask), (clean, _) = (
            scan(one, level * HEIGHT, 128, np.random.default_rng(0)) for one in (patient, without)
        )
        changed = np.abs(with_clot - clean) > 40
        assert mask.any() == changed.any()
        if mask.any():
            assert (mask & changed).sum() > 0.8 * max(
                mask.sum(), changed.sum()
            )  # but for a blurred edge
            shown += 1
            # The picture shows the patient from the feet: the left side is on the right.
            assert (np.argwhere(changed)[:, 1].mean() > 63.5) == (side == "left")
            assert with_clot[changed].mean() < clean[changed].mean() - 80
    assert shown >= 3


def test_a_slice_shows_an_embolus_or_nothing_of_it():
    """A sliver of a clot that nobody could see is not drawn, so that no negative slice holds one."""
    patient = make_patient(np.random.default_rng(5), SIDES["right"])
    seen = set()
    clot = patient.emboli[0].clot
    top = clot.start[0, 2] - clot.start_radius[0]  # where the round end of the first clot begins
    for z in np.linspace(top - 1, top + 5, 13):
        (with_clot, mask), (clean, _) = (
            scan(one, z, 64, np.random.default_rng(0))
            for one in (patient, replace(patient, emboli=[]))
        )
        assert mask.any() == (with_clot != clean).any()
        seen.add(bool(mask.any()))
    assert seen == {True, False}


def test_a_central_embolus_lies_in_the_trunk_or_a_main_artery():
    patient = make_patient(
        np.random.default_rng(5), Findings(left=True, right=True, central=True, acute=True)
    )
    middle = 0
    for level in np.linspace(0.43, 0.53, 6):
        (with_clot, _), (clean, _) = (
            scan(one, level * HEIGHT, 128, np.random.default_rng(0))
            for one in (patient, replace(patient, emboli=[]))
        )
        columns = np.argwhere(np.abs(with_clot - clean) > 40)[:, 1]
        middle += np.count_nonzero(np.abs(columns - 63.5) * patient.field_of_view / 128 < 30)
    assert middle > 50


def test_an_exam_without_emboli_has_no_positive_slice():
    findings = Findings(
        flow_artifact=True, defect_not_pe=True, motion=True, poor_contrast=True, indeterminate=True
    )
    assert not any(drawn(findings, z)[1] for z in np.linspace(10, 240, 12))


@pytest.mark.parametrize("ratio", [0.7, 0.85, 1.15, 1.5])
def test_the_ventricles_have_the_ratio_the_label_says(ratio):
    chambers = make_patient(
        np.random.default_rng(2), Findings(right=True, acute=True, rv_lv_ratio=ratio)
    ).chambers
    left, right = chambers["left ventricle"], chambers["right ventricle"]
    assert right.short / left.short == pytest.approx(ratio)
    # Neither covers the other, so the diameters can be measured in the picture: a septum lies between them.
    apart = np.sin(left.angle) * (right.x - left.x) - np.cos(left.angle) * (right.y - left.y)
    assert 6 < apart - left.short - right.short < 12


def test_tissue_has_the_density_of_tissue():
    hounsfield, _ = drawn(Findings(), 0.47 * HEIGHT)
    shares = [
        ((low <= hounsfield) & (hounsfield < high)).mean()
        for low, high in ((-950, -700), (-160, -40), (20, 110), (200, 900))
    ]
    assert all(share > 0.02 for share in shares)  # lung, fat, muscle, contrast and bone


FINDINGS = {  # what is drawn: the labels that are 1
    "negative": (Findings(), {"negative_exam_for_pe"}),
    "on the left": (Findings(left=True, acute=True), {"leftsided_pe", "rv_lv_ratio_lt_1"}),
    "on the right, strained": (
        Findings(right=True, acute=True, rv_lv_ratio=1.2),
        {"rightsided_pe", "rv_lv_ratio_gte_1"},
    ),
    "central": (
        Findings(left=True, right=True, central=True, acute=True),
        {"leftsided_pe", "rightsided_pe", "central_pe", "rv_lv_ratio_lt_1"},
    ),
    "old": (Findings(left=True, chronic=True), {"leftsided_pe", "rv_lv_ratio_lt_1", "chronic_pe"}),
    "old and new": (
        Findings(left=True, chronic=True, acute=True),
        {"leftsided_pe", "rv_lv_ratio_lt_1", "acute_and_chronic_pe"},
    ),
    "moving": (Findings(indeterminate=True, motion=True), {"indeterminate", "qa_motion"}),
    "pale": (Findings(indeterminate=True, poor_contrast=True), {"indeterminate", "qa_contrast"}),
    "hard negatives": (
        Findings(flow_artifact=True, defect_not_pe=True),
        {"negative_exam_for_pe", "flow_artifact", "true_filling_defect_not_pe"},
    ),
}


@pytest.mark.parametrize("drawn_as", FINDINGS)
def test_findings_become_labels(drawn_as):
    findings, ones = FINDINGS[drawn_as]
    labels = findings.labels
    assert {name for name, value in labels.items() if value} == ones
    assert set(labels) == set(COLUMNS[4:])


def test_the_places_of_emboli_show_clot_and_no_contrast(tmp_path):
    folder = phantom(tmp_path / "places", studies=6, slices=8, size=128, progress="off")
    table = index_images(read_labels(folder), folder / "train-jpegs").sample(frac=1, random_state=0)
    places, images = embolus_places(folder, table), PEImages(table, None)
    shows = table.pe_present_on_image.to_numpy() == 1
    assert shows.any()
    assert np.array_equal(np.isfinite(places).all(axis=1), shows)
    for index in np.flatnonzero(shows):
        x, y = (places[index] * 128).astype(int)
        # Clots have 40 to 70 HU, so 106 to 117 in this window; contrast has 260 HU and more, 186; noise and blur add.
        assert 80 < images[index][0][1, y - 1 : y + 2, x - 1 : x + 2].float().mean() < 150


def test_the_places_of_emboli_are_also_found_by_the_positions_of_dicom_files(tmp_path):
    options = {"positive": 1.0, "form": "dicom", "masks": True, "progress": "off"}
    folder = phantom(tmp_path, studies=2, slices=6, size=64, workers=1, **options)
    table = index_dicom(read_labels(folder), folder / "train", workers=1, progress="off")
    places = embolus_places(folder, table)
    masks = embolus_masks(folder, table)
    shows = masks.any((1, 2))
    assert shows.any()
    assert np.array_equal(np.isfinite(places).all(axis=1), shows)
    for (x, y), mask in zip((places[shows] * 64).astype(int), masks[shows], strict=True):
        assert mask[y, x]


def test_masks_are_where_the_emboli_were_drawn_and_the_images_are_the_same_without(made, tmp_path):
    folder = phantom(tmp_path / "masks", **SMALL, masks=True, workers=1)
    images = {
        name: data
        for name, data in contents(folder).items()
        if not name.startswith(("masks", "phantom.json"))
    }
    assert images == {name: data for name, data in contents(made).items() if name != "phantom.json"}
    table = index_images(read_labels(folder), folder / "train-jpegs")
    masks, places = embolus_masks(folder, table), embolus_places(folder, table)
    shows = table.pe_present_on_image.to_numpy() == 1
    assert shows.any()
    assert np.array_equal(masks.any(axis=(1, 2)), shows)
    for mask, (x, y) in zip(masks[shows], places[shows], strict=True):
        assert mask[int(y * 64), int(x * 64)]
    assert embolus_masks(folder, table, size=32).shape == (12, 32, 32)
    with pytest.raises(FileNotFoundError, match=r"no masks of emboli\n  fix:   .*masks=True"):
        embolus_masks(made, table)
    others = table.assign(StudyInstanceUID="another", pe_present_on_image=1)
    assert np.isnan(embolus_places(folder, others)).all()
    shutil.rmtree(folder / "masks")
    phantom(folder, **SMALL, masks=True, workers=1)
    assert np.array_equal(embolus_masks(folder, table), masks), "deleted masks are drawn again"


def test_data_of_patients_say_no_places(made, tmp_path):
    table = index_images(read_labels(made), made / "train-jpegs")
    assert np.isnan(embolus_places(tmp_path, table)).all()


def test_short_emboli_show_on_two_to_six_slices_and_nowhere_else():
    recipe = {"seed": 0, "studies": 12, "slices": 150, "positive": 1.0, "short": True}
    for number, findings in enumerate(decide_findings(recipe)[:6]):
        patient = make_patient(np.random.default_rng(number), findings)
        assert 2 <= findings.extent <= 6
        heights = [height_of(position, 150) for position in range(150)]
        cut = [z for z in heights if any(embolus.at(z) for embolus in patient.emboli)]
        seen = [z for z in cut if scan(patient, z, 64, np.random.default_rng(0))[1].any()]
        assert 2 <= len(seen) <= 5 * len(patient.emboli)
        beside = max(seen) + 3 * (heights[0] - heights[1])
        assert any(embolus.at(beside) for embolus in patient.emboli) or not (
            scan(patient, beside, 64, np.random.default_rng(0))[1].any()
        )


def test_phantoms_with_short_emboli_have_consistent_labels_at_any_number_of_slices(tmp_path):
    folder = phantom(
        tmp_path, 4, 6, size=64, positive=1.0, short=True, form="dicom", masks=True, workers=1
    )
    labels = read_labels(folder)  # a positive exam without a positive image would be refused
    shown = labels.groupby("StudyInstanceUID").pe_present_on_image.sum()
    assert shown.between(1, 5).all()
    index = index_dicom(labels, folder / "train", progress="off")
    assert (embolus_masks(folder, index).any((1, 2)) == index.pe_present_on_image).all()
