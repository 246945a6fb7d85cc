"""The picture of a machine with TPU chips: what is drawn for each machine, and that it can be read."""

import itertools
from collections import Counter

import matplotlib
import pytest

from tpukit.essentials.environment.hardware import MachineInfo
from tpukit.preflight.tpu_picture import draw_tpu
from tpukit.profiling import TPUS
from tpukit.simulator.shapes import SHAPES

# Google's pages of v3, v4, v5e, v5p and v6e; two ranks share a process where PyTorch sees both cores of a chip.
MACHINES = {
    "v2-8": {"process": 4, "chip": 4, "core": 8, "ranks": 8},
    "v3-8": {"process": 4, "chip": 4, "core": 8, "ranks": 8},
    "v4-8": {"process": 4, "chip": 4, "core": 8, "ranks": 4},
    "v5p-8": {"process": 4, "chip": 4, "core": 8, "ranks": 4},
    "v5e-1": {"process": 1, "chip": 1, "core": 1, "ranks": 1},
    "v5e-8": {"process": 8, "chip": 8, "core": 8, "ranks": 8},
    "v6e-1": {"process": 1, "chip": 1, "core": 1, "ranks": 1},
    "v6e-4": {"process": 4, "chip": 4, "core": 4, "ranks": 4},
}


def texts(figure):
    return [text for text in figure.findobj(matplotlib.text.Text) if text.get_text().strip()]


@pytest.mark.parametrize("name", MACHINES)
def test_every_chip_has_its_process_and_every_core_its_rank(name):
    figure = draw_tpu(name)
    drawn = Counter(patch.get_gid() for patch in figure.axes[0].patches if patch.get_gid())
    expected = dict(MACHINES[name])
    ranks = expected.pop("ranks")
    assert drawn == {"kernel": 1, **expected}
    said = " ".join(text.get_text() for text in texts(figure) if text.get_text().startswith("rank"))
    assert [int(word) for word in said.split() if word.isdigit()] == list(range(ranks))
    assert f"{ranks} core" in texts(figure)[0].get_text()
    assert f"{ranks} core" in figure.alt


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_picture_and_the_kit_count_the_same_cores(shape):
    known = {
        "platform": "",
        "system": "",
        "versions": {},
        "memory": None,
        "cpus": 1,
        "shm": None,
        "evidence": {},
    }
    machine = MachineInfo(chips=shape.chips, generation=shape.generation, **known)
    title = texts(draw_tpu(shape.name.split()[-1]))[0].get_text()
    assert title.endswith(
        f"{machine.chips} chip{'s' * (machine.chips != 1)}, {machine.cores} core"
        + "s" * (machine.cores != 1)
    )


@pytest.mark.parametrize("name", TPUS)
def test_no_text_leaves_the_picture_or_touches_another(name):
    figure = draw_tpu(name)
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    for text, box in boxes:
        assert figure.bbox.contains(box.x0, box.y0), text
        assert figure.bbox.contains(box.x1, box.y1), text
    for (text, box), (other, place) in itertools.combinations(boxes, 2):
        assert not box.overlaps(place), f"{text!r} meets {other!r}"


def test_text_in_a_box_stays_in_it():
    figure = draw_tpu("v5e-8")
    figure.draw_without_rendering()
    boxes = [
        patch.get_window_extent()
        for patch in figure.axes[0].patches
        if patch.get_gid() in ("process", "kernel")
    ]
    for text in texts(figure):
        place = text.get_window_extent()
        for box in boxes:
            if box.overlaps(place):
                assert box.x0 < place.x0, text.get_text()
                assert place.x1 < box.x1, text.get_text()


def test_a_notebook_can_show_it_before_pyplot_is_loaded():
    assert draw_tpu()._repr_png_().startswith(b"\x89PNG")
