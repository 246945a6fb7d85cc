"""Draw the patient of a phantom from a seed: sizes, vessels and findings.

    make_patient(rng, Findings(left=True, acute=True))
      1. sizes, and the centre lines of the great vessels: PATHS, scaled to these sizes
      2. the small vessels of both lungs, grown from the ends of the great vessels
      3. findings: clots in the arteries, a wide right ventricle, opacities, fluid

All lengths are in mm. x points to the patient's left (the right of the image), y to the back, z to
the feet. x = y = 0 is the middle of the chest. z is 0 at the lung apices. The slice z = HEIGHT is
below the domes of the diaphragm. A "level" is z as a share of HEIGHT.

The order in which random numbers are drawn must not change, because a seed must always give the
same images. This module imports numpy, so only the functions that draw a phantom import it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

HEIGHT = 250.0  # mm from the apices to below the diaphragm
LEVELS = (0.0, 0.08, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # the levels of the measures in OUTLINES
# Measures in mm at each of LEVELS, from the apices down. "width" and "depth" are half axes.
OUTLINES = {
    "cavity_width": (58, 86, 110, 120, 127, 134, 138, 137),  # half of the inside of the rib cage
    "cavity_depth": (38, 54, 70, 77, 81, 85, 87, 85),
    "cavity_y": (18, 14, 11, 10, 10, 9, 8, 6),
    "body_width": (196, 190, 180, 173, 169, 165, 163, 161),
    "body_depth": (88, 95, 103, 107, 110, 112, 112, 109),
    "spine_y": (46, 51, 58, 62, 64, 66, 64, 59),
    "mediastinum": (29, 29, 27, 26, 25, 24, 20, 17),  # half its width, without the heart
}

# Centre lines of the great vessels and airways: x, y (mm), level, radius (mm).
# fmt: off
PATHS = {
    "aorta": (
        (8, -4, 0.61, 15), (-6, -16, 0.55, 16), (-15, -20, 0.47, 16), (-14, -18, 0.36, 15),
        (-9, -12, 0.295, 14), (4, 2, 0.265, 13), (16, 20, 0.275, 12.5), (24, 36, 0.33, 12),
        (25, 43, 0.45, 12), (23, 45, 0.65, 11.5), (17, 45, 0.85, 11), (10, 42, 1.05, 10.5),
    ),
    "brachiocephalic artery": (
        (-8, -8, 0.27, 6.5), (-16, -6, 0.16, 6), (-22, 2, 0.02, 5), (-24, 4, -0.1, 5),
    ),
    "left carotid": ((4, 2, 0.26, 4.5), (10, 4, 0.12, 4), (16, 6, -0.1, 4)),
    "left subclavian": (
        (13, 16, 0.27, 5), (22, 18, 0.14, 5), (34, 14, -0.02, 4.5), (60, 0, -0.06, 4),
    ),
    "cava": ((-25, -14, 0.15, 9), (-28, -12, 0.3, 9.5), (-29, -8, 0.45, 10), (-29, -4, 0.58, 12)),
    "left brachiocephalic vein": (
        (48, -26, 0.03, 6), (22, -32, 0.12, 7), (-8, -27, 0.17, 7.5), (-25, -14, 0.21, 8),
    ),
    "right brachiocephalic vein": (
        (-42, -22, 0.02, 6), (-30, -18, 0.09, 7.5), (-25, -14, 0.17, 8.5),
    ),
    "trunk": ((8, -40, 0.60, 15), (17, -34, 0.54, 15), (23, -24, 0.49, 14.5), (22, -10, 0.455, 14)),
    "right main": (
        (21, -9, 0.46, 12), (8, 1, 0.465, 11.5), (-12, 4, 0.47, 11.5), (-32, 5, 0.48, 11),
        (-43, 8, 0.5, 10),
    ),
    "left main": (
        (22, -10, 0.455, 12.5), (33, 3, 0.43, 12), (43, 16, 0.425, 11), (50, 23, 0.45, 10),
    ),
    "right interlobar": (
        (-43, 8, 0.5, 10), (-48, 13, 0.56, 9.2), (-51, 22, 0.64, 8.2), (-54, 33, 0.74, 6.5),
        (-57, 42, 0.82, 4.5),
    ),
    "left interlobar": (
        (50, 23, 0.45, 10), (54, 25, 0.53, 9.2), (56, 30, 0.62, 8), (59, 38, 0.72, 6.4),
        (62, 45, 0.81, 4.5),
    ),
    "right upper": (
        (-32, 2, 0.475, 8), (-44, -4, 0.42, 7.2), (-55, -8, 0.36, 6), (-62, -10, 0.28, 4.2),
    ),
    "left upper": ((42, 14, 0.425, 8), (50, 6, 0.38, 7), (56, -4, 0.33, 5.8), (62, -10, 0.26, 4.2)),
    "trachea": ((0, 8, -0.1, 8.2), (-1, 16, 0.15, 8.5), (-2, 24, 0.36, 9)),
    "right bronchus": (
        (-3, 25, 0.37, 8), (-22, 24, 0.45, 7), (-38, 23, 0.52, 5.8), (-43, 33, 0.64, 4.6),
        (-47, 44, 0.78, 3),
    ),
    "left bronchus": (
        (1, 25, 0.37, 7.5), (24, 28, 0.47, 6.3), (42, 32, 0.54, 5), (47, 41, 0.66, 4),
        (52, 50, 0.78, 2.8),
    ),
    "right upper bronchus": ((-20, 23, 0.44, 5), (-42, 14, 0.42, 3.8), (-58, 6, 0.36, 2.4)),
    "left upper bronchus": ((38, 29, 0.51, 4.6), (48, 10, 0.47, 3.6), (58, -6, 0.42, 2.4)),
    "right superior vein": (
        (-18, 17, 0.57, 8), (-36, 0, 0.55, 6.5), (-50, -16, 0.5, 5), (-62, -26, 0.42, 3.2),
    ),
    "left superior vein": (
        (22, 16, 0.56, 8), (38, 0, 0.53, 6.5), (50, -18, 0.48, 5), (60, -30, 0.42, 3.2),
    ),
    "right inferior vein": (
        (-18, 28, 0.62, 8), (-38, 36, 0.65, 6.5), (-56, 46, 0.7, 4.4), (-66, 52, 0.76, 3),
    ),
    "left inferior vein": (
        (22, 28, 0.61, 8), (40, 36, 0.64, 6.5), (58, 48, 0.69, 4.4), (70, 54, 0.76, 3),
    ),
    "azygos": ((-9, 42, 0.42, 4), (-8, 46, 0.7, 3.8), (-8, 44, 1.05, 3.5)),
}
# fmt: on
ARTERIES = (
    "trunk",
    "right main",
    "left main",
    "right interlobar",
    "left interlobar",
    "right upper",
    "left upper",
)
VEINS = tuple(name for name in PATHS if name.endswith("ior vein"))
_SIDES = {"right": -1, "left": 1}  # signs of x
_MOVED = ("aorta", "cava", "azygos")  # vessels whose place varies from patient to patient


@dataclass(frozen=True)
class Findings:
    """The findings of an exam. They determine its labels and the images that are drawn."""

    left: bool = False
    right: bool = False
    central: bool = False
    chronic: bool = False
    acute: bool = False
    rv_lv_ratio: float = 0.8  # the short axis of the right ventricle divided by that of the left
    indeterminate: bool = False
    motion: bool = False
    poor_contrast: bool = False
    flow_artifact: bool = False
    defect_not_pe: bool = False  # a defect in the left atrium, which cannot be a pulmonary embolus
    extent: float = 0.0  # mm of each embolus along the body; 0 for the whole length of its artery

    @property
    def positive(self) -> bool:
        """True if the exam has an embolus."""
        return self.left or self.right or self.central

    @property
    def labels(self) -> dict[str, int]:
        """The labels of train.csv that all images of an exam share."""
        is_wide = self.rv_lv_ratio >= 1
        labels = {
            "negative_exam_for_pe": not self.positive and not self.indeterminate,
            "qa_motion": self.motion,
            "qa_contrast": self.poor_contrast,
            "flow_artifact": self.flow_artifact,
            "rv_lv_ratio_gte_1": self.positive and is_wide,
            "rv_lv_ratio_lt_1": self.positive and not is_wide,
            "leftsided_pe": self.left,
            "chronic_pe": self.chronic and not self.acute,
            "true_filling_defect_not_pe": self.defect_not_pe,
            "rightsided_pe": self.right,
            "acute_and_chronic_pe": self.chronic and self.acute,
            "central_pe": self.central,
            "indeterminate": self.indeterminate,
        }
        return {name: int(value) for name, value in labels.items()}


class Segment(NamedTuple):
    """A piece of a vessel: a truncated cone."""

    start: np.ndarray  # (3,) mm
    end: np.ndarray  # (3,) mm
    start_radius: float
    end_radius: float


@dataclass(frozen=True)
class Tubes:
    """Round vessels as n segments: end points, (n, 3), and radii, (n,), in mm."""

    start: np.ndarray
    end: np.ndarray
    start_radius: np.ndarray
    end_radius: np.ndarray

    @staticmethod
    def along(points: np.ndarray) -> "Tubes":
        """Make the segments between (n, 4) points of x, y, z and radius in mm."""
        points = np.asarray(points, np.float32)
        places = points[:, :3]
        radii = points[:, 3]
        return Tubes(places[:-1], places[1:], start_radius=radii[:-1], end_radius=radii[1:])

    @staticmethod
    def joined(parts: list["Tubes"]) -> "Tubes":
        """Return the segments of several vessels as one `Tubes`."""
        # float32, because float64 would double the size of the arrays of distances to a vessel.
        joined = {}
        for name in ("start", "end", "start_radius", "end_radius"):
            arrays = [getattr(part, name) for part in parts]
            joined[name] = np.concatenate(arrays, dtype=np.float32)
        return Tubes(**joined)

    def near(self, z: float) -> list[Segment]:
        """Return the segments that the slice at z, in mm, may cut."""
        low = np.minimum(self.start[:, 2] - self.start_radius, self.end[:, 2] - self.end_radius)
        high = np.maximum(self.start[:, 2] + self.start_radius, self.end[:, 2] + self.end_radius)
        ends = (self.start, self.end, self.start_radius, self.end_radius)
        return [Segment(*(of[i] for of in ends)) for i in np.flatnonzero((low < z) & (z < high))]


@dataclass(frozen=True)
class Embolus:
    """A clot in one artery: an acute clot in the middle of the lumen, a chronic one at the wall."""

    clot: Tubes
    lumen: Tubes | None  # the channel that a chronic clot leaves open; None for an acute clot
    calcium: Tubes | None
    hu: float  # the Hounsfield units of the clot
    extent: tuple[float, float] | None = None  # first and last z in mm; None for the whole clot

    def at(self, z: float) -> bool:
        """Return False if the plane at z is above or below the clot."""
        return self.extent is None or self.extent[0] <= z < self.extent[1]


@dataclass(frozen=True)
class Chamber:
    """An ellipsoid of the heart, turned in the plane of the slice; lengths in mm."""

    x: float
    y: float
    z: float
    long: float
    short: float
    height: float
    angle: float  # radians from +x towards +y

    def at(self, z: float) -> float:
        """Return the scale of the cross-section at z, 0 to 1; 0 if the slice misses the chamber."""
        return float(np.sqrt(max(0.0, 1 - ((z - self.z) / self.height) ** 2)))


class Opacity(NamedTuple):
    """A consolidation in the lung, in mm."""

    x: float
    y: float
    z: float
    radius: float


@dataclass(frozen=True)
class Patient:
    """The anatomy that all slices of an exam share."""

    findings: Findings
    field_of_view: float  # mm
    turn: float  # radians by which the patient is turned on the table
    shift: tuple[float, float]  # mm by which the patient is off the centre, in x and y
    outline: dict[str, float]  # factors for OUTLINES
    # (6, 5): amplitude in mm; kx, ky, kz in 1/mm; phase. Three waves bend x, three bend y.
    waves: np.ndarray
    breasts: float  # 0 for none
    fat: float  # mm added under the skin
    domes: tuple[float, float]  # levels of the right and left dome of the diaphragm
    chambers: dict[str, Chamber]
    vessels: dict[str, Tubes]
    emboli: list[Embolus]
    flow: Tubes | None
    contrast: dict[str, float]  # Hounsfield units
    opacities: list[Opacity] = field(default_factory=list)
    effusion: tuple[float, float] = (0.0, 0.0)  # mm of fluid behind the right and the left lung
    noise: float = 18.0  # HU
    air: float = -860.0  # HU of lung without vessels
    rib_phase: float = 0.0

    def measure(self, name: str, z: float) -> float:
        """Return a measure of `OUTLINES` at the height z, scaled to this patient; both in mm."""
        value = float(np.interp(z / HEIGHT, LEVELS, OUTLINES[name]))
        return value * self.outline.get(name, 1.0)


class _Size(NamedTuple):
    """The size of a patient as factors; 1 is the mean."""

    whole: float  # the factor for all lengths except widths
    width: float
    domes: tuple[float, float]  # as in `Patient`


def make_patient(rng: np.random.Generator, findings: Findings) -> Patient:
    """Draw a random patient with these findings."""
    # Do not reorder these lines: each draws random numbers.
    whole = rng.normal(1, 0.05)
    width = whole * rng.normal(1, 0.03)
    size = _Size(whole, width, (rng.uniform(0.77, 0.84), rng.uniform(0.81, 0.88)))
    paths = _vessel_paths(rng, findings, size)
    blood = _blood(rng, findings)
    vessels = _vessels(rng, paths, size)
    flow = _flow(rng, findings, paths)
    opacities = _opacities(rng, findings, size)
    effusion = tuple(_fluid(rng, findings) for _ in _SIDES)
    waves = _waves(rng)
    return Patient(
        findings=findings,
        field_of_view=rng.uniform(288, 318) * max(width, 0.98),
        turn=np.radians(rng.normal(0, 2.5)),
        shift=tuple(rng.normal(0, 4, 2)),
        outline=_outline_factors(size) | {"mediastinum": rng.normal(1, 0.1)},
        waves=waves,
        breasts=rng.uniform(0.7, 1.15) if rng.random() < 0.45 else 0.0,
        fat=rng.uniform(-6, 10),
        domes=size.domes,
        chambers=make_heart(rng, findings.rv_lv_ratio, whole * rng.normal(1, 0.04)),
        vessels=vessels,
        emboli=place_emboli(rng, findings, paths),
        flow=flow,
        contrast=blood | {"muscle": rng.uniform(45, 65), "liver": rng.uniform(70, 110)},
        opacities=opacities,
        effusion=effusion,
        noise=rng.uniform(14, 26) * (1.5 if findings.indeterminate else 1.0),
        air=rng.uniform(-880, -800),
        rib_phase=rng.uniform(0, 1),
    )


def _outline_factors(size: _Size) -> dict[str, float]:
    return {name: size.width if name.endswith("width") else size.whole for name in OUTLINES}


def _vessel_paths(rng: np.random.Generator, findings: Findings, size: _Size) -> dict:
    """Return the points of each path of PATHS, (n, 4), smooth and scaled to a patient."""
    widths = {name: rng.normal(1, 0.05) for name in PATHS}
    for name in ARTERIES:
        widths[name] *= _widening(findings, name)
    shifts = {name: rng.normal(0, 1.5, 3) for name in _MOVED}
    paths = {}
    for name, given in PATHS.items():
        points = np.array(given, float)
        points *= [1, 1, HEIGHT, widths[name]]
        shift = shifts.get(name, np.zeros(3))
        points[:, :3] = points[:, :3] * [size.width, size.whole, 1] + shift
        paths[name] = smooth(points)
    return paths


def _widening(findings: Findings, artery: str) -> float:
    """Return the factor by which the findings widen an artery."""
    has_clot = ("right" in artery and findings.right) or ("left" in artery and findings.left)
    # A short clot does not widen its artery, because a network could see that in other slices.
    is_swollen = has_clot and "main" not in artery and not findings.extent
    is_strained = findings.rv_lv_ratio >= 1
    factor = 1.0
    if is_strained:
        factor *= 1.12
    if is_swollen:
        factor *= 1.22
    return factor


def smooth(points: np.ndarray, steps: int = 5) -> np.ndarray:
    """Return a Catmull-Rom curve through (n, 4) points, with `steps` points per segment."""
    before = 2 * points[:1] - points[1:2]
    after = 2 * points[-1:] - points[-2:-1]
    padded = np.concatenate([before, points, after])
    t = np.linspace(0, 1, steps, endpoint=False)[:, None]
    spans = []
    for a, b, c, d in zip(padded[:-3], padded[1:-2], padded[2:-1], padded[3:], strict=True):
        square = 2 * a - 5 * b + 4 * c - d
        cube = 3 * b - a - 3 * c + d
        spans.append(0.5 * (2 * b + (c - a) * t + square * t**2 + cube * t**3))
    return np.concatenate([*spans, points[-1:]])


def _blood(rng: np.random.Generator, findings: Findings) -> dict[str, float]:
    """Return the Hounsfield units of blood with contrast: pulmonary, left heart, vena cava."""
    poor = findings.poor_contrast
    artery = rng.uniform(120, 165) if poor else rng.uniform(260, 400)
    left = artery * rng.uniform(0.55, 0.95)
    cava = rng.uniform(300, 420) if poor else rng.uniform(420, 800)
    return {"artery": artery, "left": left, "cava": cava}


def _vessels(rng: np.random.Generator, paths: dict, size: _Size) -> dict[str, Tubes]:
    """Return all vessels by name.

    "arteries" and "veins" are the great vessels of the lungs together; "lung arteries" and "lung
    veins" are the small vessels that grow from them.
    """
    vessels = {name: Tubes.along(path) for name, path in paths.items()}
    vessels["arteries"] = Tubes.joined([vessels[name] for name in ARTERIES])
    vessels["veins"] = Tubes.joined([vessels[name] for name in VEINS])
    for kind, stems in (("arteries", ARTERIES[3:]), ("veins", VEINS)):
        trees = []
        for word, side in _SIDES.items():
            of_side = [paths[name] for name in stems if word in name]
            trees.append(lung_tree(rng, of_side, side, lambda points: _is_in_lung(points, size)))
        vessels[f"lung {kind}"] = Tubes.joined(trees)
    return vessels


def _is_in_lung(points: np.ndarray, size: _Size) -> np.ndarray:
    """Return whether points, (n, 3), are inside a lung, (n,) bool.

    That is inside the rib cage, above the diaphragm, and outside of the mediastinum.
    """
    x = points[:, 0]
    y = points[:, 1]
    level = points[:, 2] / HEIGHT
    a = np.interp(level, LEVELS, OUTLINES["cavity_width"]) * size.width - 6
    b = np.interp(level, LEVELS, OUTLINES["cavity_depth"]) * size.whole - 6
    from_middle = y - np.interp(level, LEVELS, OUTLINES["cavity_y"]) * size.whole
    from_dome = np.hypot(np.abs(x) - 65, y) / 100
    lowest = np.where(x < 0, *size.domes) + 0.35 * from_dome**2
    is_in_cage = (x / a) ** 2 + (from_middle / b) ** 2 < 1
    is_in_mediastinum = np.abs(x) <= 26
    return (level < lowest) & is_in_cage & ~is_in_mediastinum


def lung_tree(
    rng: np.random.Generator,
    stems: list[np.ndarray],
    side: int,
    inside: Callable,
) -> Tubes:
    """Grow branches from the stems to random points all over a lung.

    Args:
        rng: the random numbers.
        stems: (n, 4) points of the vessels from which branches grow.
        side: -1 for the right lung, 1 for the left.
        inside: a function from (n, 3) points to (n,) bool, True inside the lung.

    Returns:
        The branches; the width of a branch follows from the number of branches that it feeds.
    """
    box = ((0, -95, 0.03 * HEIGHT), (140, 100, 0.9 * HEIGHT))
    targets = rng.uniform(*box, (1000, 3)) * (side, 1, 1)
    targets = targets[inside(targets)]
    stem = np.concatenate([stem[len(stem) // 3 :, :3] for stem in stems])
    # Near targets first, so that far branches grow from them.
    targets = targets[np.argsort(np.linalg.norm(targets - stem.mean(0), axis=1))]
    count = len(stem)
    nodes = np.zeros((count + 3 * len(targets), 3))
    cost = np.zeros(len(nodes))  # mm from the stem along the branches
    nodes[:count] = stem
    parents = [-1] * count
    for target in targets:
        # 1 mm along existing vessels costs 0.45 of 1 mm of a new branch, so branches share trunks.
        distance = np.linalg.norm(nodes[:count] - target, axis=1)
        parent = int((distance + 0.45 * cost[:count]).argmin())
        start = nodes[parent]
        span = target - start
        wiggle = rng.normal(0, 0.03 * np.linalg.norm(span), (3, 3))
        for share, off in zip((0.35, 0.7, 1.0), wiggle, strict=True):
            nodes[count] = start + share * span + off
            cost[count] = cost[parent] + np.linalg.norm(nodes[count] - nodes[parent])
            parents.append(parent)
            parent = count
            count += 1
    return _branches(nodes, parents)


def _branches(nodes: np.ndarray, parents: list[int]) -> Tubes:
    """Return the tubes of a tree.

    Args:
        nodes: (n, 3) points; a parent comes before its children.
        parents: (n,) the index of each node's parent; -1 for the nodes of stems.
    """
    feeds = np.zeros(len(nodes))  # the number of branch ends that each node feeds
    for node in range(len(nodes) - 1, -1, -1):
        feeds[node] = max(feeds[node], 1)
        if parents[node] >= 0:
            feeds[parents[node]] += feeds[node]
    # Murray's law, with the exponent 2.7 instead of 3, as in lungs; in mm.
    radius = np.minimum(0.95 * feeds ** (1 / 2.7), 4.0)
    grown = [node for node in range(len(nodes)) if parents[node] >= 0]
    above = [parents[node] for node in grown]
    first = np.minimum(radius[above], radius[grown] * 1.25)
    return Tubes(nodes[above], nodes[grown], start_radius=first, end_radius=radius[grown])


def _flow(rng: np.random.Generator, findings: Findings, paths: dict) -> Tubes | None:
    """Return the part of an artery that contrast has not reached yet; None if there is none."""
    if not findings.flow_artifact:
        return None
    artery = str(rng.choice(["right interlobar", "left interlobar", "trunk"]))
    return Tubes.along(paths[artery][2:-3] * [1, 1, 1, 0.9])


def _opacities(rng: np.random.Generator, findings: Findings, size: _Size) -> list[Opacity]:
    """Place consolidations at the outer edge of the lungs, more of them with an embolus."""
    opacities = []
    for _ in range(rng.poisson(1.3 if findings.positive else 0.15)):
        if not findings.positive or findings.left == findings.right:
            side = rng.choice([-1.0, 1.0])
        elif findings.left:
            side = 1.0
        else:
            side = -1.0
        angle = rng.uniform(-0.2, 1.1)
        x = side * 122 * size.width * np.cos(angle)
        y = (8 + 76 * np.sin(angle)) * size.whole
        z = HEIGHT * rng.uniform(0.45, 0.85)
        opacities.append(Opacity(x, y, z, rng.uniform(22, 36)))
    return opacities


def _fluid(rng: np.random.Generator, findings: Findings) -> float:
    """Return the depth of the fluid behind a lung in mm; 0 for no fluid."""
    probability = 0.55 if findings.positive else 0.1
    if rng.random() >= probability:
        return 0.0
    return rng.uniform(10, 34)


def _waves(rng: np.random.Generator) -> np.ndarray:
    """Draw the waves of a patient; see `Patient.waves`."""
    numbers = rng.uniform(0.012, 0.045, (6, 3)) * rng.choice([-1, 1], (6, 3)) * [1, 1, 0.6]
    amplitudes = rng.uniform(0.8, 2.2, 6)
    phases = rng.uniform(0, 6.28, 6)
    return np.column_stack([amplitudes, numbers, phases]).astype(np.float32)


def make_heart(rng: np.random.Generator, ratio: float, scale: float) -> dict[str, Chamber]:
    """Place the four chambers of the heart.

    Args:
        rng: the random numbers.
        ratio: the short axis of the right ventricle divided by that of the left.
        scale: the size of the heart; 1 is the mean.
    """
    turn = np.radians(rng.uniform(-42, -30))
    left = rng.uniform(18.5, 20.5) * scale
    if ratio >= 1:  # a strained right heart squeezes the left one
        left *= 0.9
    right = ratio * left
    septum = 9 * scale
    along = np.array([np.cos(turn), np.sin(turn)])
    across = np.array([np.sin(turn), -np.cos(turn)])
    left_at = np.array([38.0, 6.0]) * scale
    right_at = left_at + across * (left + septum + right) - along * 6 * scale
    z = HEIGHT * np.array([0.735, 0.725, 0.675, 0.605]) + rng.normal(0, 2)
    chambers = {  # x, y, long axis, short axis, height, angle
        "left ventricle": (*left_at, 32 * scale, left, 0.165 * HEIGHT, turn),
        "right ventricle": (*right_at, 36 * scale, right, 0.18 * HEIGHT, turn),
        "right atrium": (-30 * scale, -4, 27 * scale, 21 * scale, 0.16 * HEIGHT, np.radians(100)),
        "left atrium": (0, 24, 34 * scale, 17 * scale, 0.095 * HEIGHT, 0.0),
    }
    heart = {}
    for middle, (name, (x, y, *axes)) in zip(z, chambers.items(), strict=True):
        heart[name] = Chamber(x, y, middle, *axes)
    return heart


class _Site(NamedTuple):
    """The part of an artery that has a clot."""

    artery: str  # a key of PATHS
    first: float  # where the part begins, as a share of the artery's length
    last: float  # where the part ends


def place_emboli(rng: np.random.Generator, findings: Findings, paths: dict) -> list[Embolus]:
    """Place the clots of the findings.

    On each affected side, the interlobar artery has a clot, and often the upper artery too. If the
    findings are central, the trunk and the main arteries of these sides have clots too.
    """
    emboli = []
    for number, (artery, first, last) in enumerate(_sites(rng, findings)):
        path = paths[artery]
        steps = len(path) - 1
        part = path[int(first * steps) : int(np.ceil(last * steps)) + 1]
        is_old = findings.chronic and (not findings.acute or number % 2 == 0)
        embolus = old_clot(rng, part) if is_old else fresh_clot(rng, part)
        if findings.extent:
            # In the first half of the part, where the artery is wide enough for a visible clot.
            middle = part[int(rng.uniform(0.1, 0.5) * (len(part) - 1)), 2]
            half = findings.extent / 2
            embolus = replace(embolus, extent=(middle - half, middle + half))
        emboli.append(embolus)
    return emboli


def _sites(rng: np.random.Generator, findings: Findings) -> list[_Site]:
    sites = []
    for side, is_affected in (("right", findings.right), ("left", findings.left)):
        if not is_affected:
            continue
        sites.append(_Site(f"{side} interlobar", rng.uniform(0.0, 0.12), rng.uniform(0.6, 0.85)))
        if rng.random() < 0.6:
            sites.append(_Site(f"{side} upper", rng.uniform(0.0, 0.2), rng.uniform(0.5, 0.75)))
        if findings.central:
            sites.append(_Site(f"{side} main", rng.uniform(0.1, 0.3), rng.uniform(0.8, 1.0)))
    if findings.central:  # alone, or with clots in the main arteries as a saddle embolus
        sites.append(_Site("trunk", rng.uniform(0.35, 0.5), 1.0))
    return sites


def fresh_clot(rng: np.random.Generator, path: np.ndarray) -> Embolus:
    """Make an acute clot: it fills the artery, or leaves a rim of contrast around itself.

    Args:
        rng: the random numbers.
        path: (n, 4) points of the artery's centre line, for the part that has the clot.
    """
    clot = path.copy()
    # A clot has the width of the leg vein in which it formed, so it never fills an artery with a
    # radius above 10.5 mm.
    if path[0, 3] > 10.5:
        clot[:, 3] *= rng.uniform(0.62, 0.8)
    elif rng.random() < 0.6:
        clot[:, 3] *= rng.uniform(0.74, 0.88)
    else:
        clot[:, 3] *= rng.uniform(1.0, 1.12)
    return Embolus(Tubes.along(clot), lumen=None, calcium=None, hu=rng.uniform(45, 70))


def old_clot(rng: np.random.Generator, path: np.ndarray) -> Embolus:
    """Make a chronic clot, which lines the wall of the artery around an eccentric open channel.

    Half of these clots have calcium. The arguments are those of `fresh_clot`.
    """
    angle = rng.uniform(0, 2 * np.pi)
    away = np.array([np.cos(angle), np.sin(angle), 0])
    clot = path.copy()
    clot[:, 3] *= 1.03
    lumen = path.copy()
    lumen[:, 3] *= rng.uniform(0.42, 0.55)
    lumen[:, :3] += away * (path[:, 3:] - lumen[:, 3:] - 0.5)
    calcium = path[len(path) // 3 : 2 * len(path) // 3 + 2].copy()
    # The channel is moved to one side of the artery, and calcium is on the other side, in the clot.
    calcium[:, :3] -= away * calcium[:, 3:] * 0.8
    calcium[:, 3] = 1.3
    return Embolus(
        Tubes.along(clot),
        lumen=Tubes.along(lumen),
        calcium=Tubes.along(calcium) if rng.random() < 0.5 else None,
        hu=rng.uniform(40, 60),
    )
