"""The patient of a phantom: measures, vessels and findings, drawn from a seed.

Loads numpy, so only the functions that draw a phantom import it.

Millimetres throughout. x grows to the patient's left (the right of the picture), y to the back, z to the feet. (0, 0)
is the middle of the chest; z is 0 at the lung apices and `HEIGHT` below the domes of the diaphragm.
"""

from dataclasses import dataclass, field, replace

import numpy as np

HEIGHT = 250.0  # mm from the apices to the last slice
LEVELS = (0.0, 0.08, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # heights, as shares of HEIGHT, at which OUTLINES are given
OUTLINES = {
    "cavity_width": (58, 86, 110, 120, 127, 134, 138, 137),  # half of the inside of the rib cage
    "cavity_depth": (38, 54, 70, 77, 81, 85, 87, 85),
    "cavity_y": (18, 14, 11, 10, 10, 9, 8, 6),
    "body_width": (196, 190, 180, 173, 169, 165, 163, 161),
    "body_depth": (88, 95, 103, 107, 110, 112, 112, 109),
    "spine_y": (46, 51, 58, 62, 64, 66, 64, 59),
    "mediastinum": (29, 29, 27, 26, 25, 24, 20, 17),  # half its width, without the heart
}

# Centre lines of the great vessels and airways: x, y (mm), level (share of HEIGHT), radius (mm).
PATHS = {
    "aorta": (
        (8, -4, 0.61, 15),
        (-6, -16, 0.55, 16),
        (-15, -20, 0.47, 16),
        (-14, -18, 0.36, 15),
        (-9, -12, 0.295, 14),
        (4, 2, 0.265, 13),
        (16, 20, 0.275, 12.5),
        (24, 36, 0.33, 12),
        (25, 43, 0.45, 12),
        (23, 45, 0.65, 11.5),
        (17, 45, 0.85, 11),
        (10, 42, 1.05, 10.5),
    ),
    "brachiocephalic artery": ((-8, -8, 0.27, 6.5), (-16, -6, 0.16, 6), (-22, 2, 0.02, 5), (-24, 4, -0.1, 5)),
    "left carotid": ((4, 2, 0.26, 4.5), (10, 4, 0.12, 4), (16, 6, -0.1, 4)),
    "left subclavian": ((13, 16, 0.27, 5), (22, 18, 0.14, 5), (34, 14, -0.02, 4.5), (60, 0, -0.06, 4)),
    "cava": ((-25, -14, 0.15, 9), (-28, -12, 0.3, 9.5), (-29, -8, 0.45, 10), (-29, -4, 0.58, 12)),
    "left brachiocephalic vein": ((48, -26, 0.03, 6), (22, -32, 0.12, 7), (-8, -27, 0.17, 7.5), (-25, -14, 0.21, 8)),
    "right brachiocephalic vein": ((-42, -22, 0.02, 6), (-30, -18, 0.09, 7.5), (-25, -14, 0.17, 8.5)),
    "trunk": ((8, -40, 0.60, 15), (17, -34, 0.54, 15), (23, -24, 0.49, 14.5), (22, -10, 0.455, 14)),
    "right main": (
        (21, -9, 0.46, 12),
        (8, 1, 0.465, 11.5),
        (-12, 4, 0.47, 11.5),
        (-32, 5, 0.48, 11),
        (-43, 8, 0.5, 10),
    ),
    "left main": ((22, -10, 0.455, 12.5), (33, 3, 0.43, 12), (43, 16, 0.425, 11), (50, 23, 0.45, 10)),
    "right interlobar": (
        (-43, 8, 0.5, 10),
        (-48, 13, 0.56, 9.2),
        (-51, 22, 0.64, 8.2),
        (-54, 33, 0.74, 6.5),
        (-57, 42, 0.82, 4.5),
    ),
    "left interlobar": (
        (50, 23, 0.45, 10),
        (54, 25, 0.53, 9.2),
        (56, 30, 0.62, 8),
        (59, 38, 0.72, 6.4),
        (62, 45, 0.81, 4.5),
    ),
    "right upper": ((-32, 2, 0.475, 8), (-44, -4, 0.42, 7.2), (-55, -8, 0.36, 6), (-62, -10, 0.28, 4.2)),
    "left upper": ((42, 14, 0.425, 8), (50, 6, 0.38, 7), (56, -4, 0.33, 5.8), (62, -10, 0.26, 4.2)),
    "trachea": ((0, 8, -0.1, 8.2), (-1, 16, 0.15, 8.5), (-2, 24, 0.36, 9)),
    "right bronchus": (
        (-3, 25, 0.37, 8),
        (-22, 24, 0.45, 7),
        (-38, 23, 0.52, 5.8),
        (-43, 33, 0.64, 4.6),
        (-47, 44, 0.78, 3),
    ),
    "left bronchus": (
        (1, 25, 0.37, 7.5),
        (24, 28, 0.47, 6.3),
        (42, 32, 0.54, 5),
        (47, 41, 0.66, 4),
        (52, 50, 0.78, 2.8),
    ),
    "right upper bronchus": ((-20, 23, 0.44, 5), (-42, 14, 0.42, 3.8), (-58, 6, 0.36, 2.4)),
    "left upper bronchus": ((38, 29, 0.51, 4.6), (48, 10, 0.47, 3.6), (58, -6, 0.42, 2.4)),
    "right superior vein": ((-18, 17, 0.57, 8), (-36, 0, 0.55, 6.5), (-50, -16, 0.5, 5), (-62, -26, 0.42, 3.2)),
    "left superior vein": ((22, 16, 0.56, 8), (38, 0, 0.53, 6.5), (50, -18, 0.48, 5), (60, -30, 0.42, 3.2)),
    "right inferior vein": ((-18, 28, 0.62, 8), (-38, 36, 0.65, 6.5), (-56, 46, 0.7, 4.4), (-66, 52, 0.76, 3)),
    "left inferior vein": ((22, 28, 0.61, 8), (40, 36, 0.64, 6.5), (58, 48, 0.69, 4.4), (70, 54, 0.76, 3)),
    "azygos": ((-9, 42, 0.42, 4), (-8, 46, 0.7, 3.8), (-8, 44, 1.05, 3.5)),
}
ARTERIES = ("trunk", "right main", "left main", "right interlobar", "left interlobar", "right upper", "left upper")
VEINS = tuple(name for name in PATHS if name.endswith("ior vein"))


@dataclass(frozen=True)
class Findings:
    """What a radiologist would report about one exam; the labels and the images follow from it."""

    left: bool = False
    right: bool = False
    central: bool = False
    chronic: bool = False
    acute: bool = False
    rv_lv_ratio: float = 0.8  # short-axis diameter of the right ventricle divided by that of the left
    indeterminate: bool = False
    motion: bool = False
    poor_contrast: bool = False
    flow_artifact: bool = False
    defect_not_pe: bool = False  # a filling defect in the left atrium, where no pulmonary embolus can be
    extent: float = 0.0  # mm along the body that each embolus has; 0 for as long as its artery

    @property
    def positive(self) -> bool:
        """Whether the exam shows an embolus anywhere."""
        return self.left or self.right or self.central

    @property
    def labels(self) -> dict[str, int]:
        """The labels of train.csv that all images of a study share."""
        wide = self.rv_lv_ratio >= 1
        labels = {
            "negative_exam_for_pe": not self.positive and not self.indeterminate,
            "qa_motion": self.motion,
            "qa_contrast": self.poor_contrast,
            "flow_artifact": self.flow_artifact,
            "rv_lv_ratio_gte_1": self.positive and wide,
            "rv_lv_ratio_lt_1": self.positive and not wide,
            "leftsided_pe": self.left,
            "chronic_pe": self.chronic and not self.acute,
            "true_filling_defect_not_pe": self.defect_not_pe,
            "rightsided_pe": self.right,
            "acute_and_chronic_pe": self.chronic and self.acute,
            "central_pe": self.central,
            "indeterminate": self.indeterminate,
        }
        return {name: int(value) for name, value in labels.items()}


@dataclass(frozen=True)
class Tubes:
    """Round vessels as chains of short segments: (n, 3) ends in mm and (n,) radii in mm."""

    start: np.ndarray
    end: np.ndarray
    start_radius: np.ndarray
    end_radius: np.ndarray

    @staticmethod
    def along(points: np.ndarray) -> "Tubes":
        """Make a chain of the (n, 4) points x, y, z, radius."""
        points = np.asarray(points, np.float32)
        return Tubes(points[:-1, :3], points[1:, :3], points[:-1, 3], points[1:, 3])

    @staticmethod
    def joined(parts: list["Tubes"]) -> "Tubes":
        """Put several chains into one."""
        names = ("start", "end", "start_radius", "end_radius")
        # float32, as the slices are: a single float64 number would double the size of every array it is combined with.
        return Tubes(*(np.concatenate([getattr(part, name) for part in parts], dtype=np.float32) for name in names))

    def near(self, z: float) -> list[tuple]:
        """Return the segments that a slice at z cuts."""
        low = np.minimum(self.start[:, 2] - self.start_radius, self.end[:, 2] - self.end_radius)
        high = np.maximum(self.start[:, 2] + self.start_radius, self.end[:, 2] + self.end_radius)
        hits = np.flatnonzero((low < z) & (z < high))
        return [(self.start[i], self.end[i], self.start_radius[i], self.end_radius[i]) for i in hits]


@dataclass(frozen=True)
class Embolus:
    """A clot in one artery. An acute one lies in the middle of the lumen, a chronic one along its wall."""

    clot: Tubes
    lumen: Tubes | None  # chronic: the channel that is left open
    calcium: Tubes | None
    hu: float
    extent: tuple[float, float] | None = None  # first and last z; None for all of the clot

    def at(self, z: float) -> bool:
        """Tell whether a slice at z may cut the clot."""
        return self.extent is None or self.extent[0] <= z < self.extent[1]


@dataclass(frozen=True)
class Chamber:
    """An ellipsoid of the heart, turned in the plane of the slice."""

    x: float
    y: float
    z: float
    long: float
    short: float
    height: float
    angle: float  # radians from +x towards +y

    def at(self, z: float) -> float:
        """Return the scale of the cross-section at z, 0 where the slice misses the chamber."""
        return float(np.sqrt(max(0.0, 1 - ((z - self.z) / self.height) ** 2)))


@dataclass(frozen=True)
class Patient:
    """Everything that one exam's slices have in common."""

    findings: Findings
    field_of_view: float  # mm
    turn: float  # radians
    shift: tuple[float, float]  # mm
    outline: dict[str, float]  # factors by which OUTLINES are scaled
    waves: np.ndarray  # (6, 5): amplitude (mm), kx, ky, kz (1/mm), phase: three bend x, three bend y
    breasts: float  # 0 for none
    fat: float  # mm added under the skin
    domes: tuple[float, float]  # levels of the right and left dome of the diaphragm
    chambers: dict[str, Chamber]
    vessels: dict[str, Tubes]
    emboli: list[Embolus]
    flow: Tubes | None
    contrast: dict[str, float]  # Hounsfield units
    opacities: list[tuple] = field(default_factory=list)  # consolidations in the lung: x, y, z, radius
    effusion: tuple[float, float] = (0.0, 0.0)  # mm of fluid behind the right and the left lung
    noise: float = 18.0  # HU
    air: float = -860.0  # HU of lung without vessels
    rib_phase: float = 0.0

    def measure(self, name: str, z: float) -> float:
        """Return one of OUTLINES at z, scaled to this patient."""
        return float(np.interp(z / HEIGHT, LEVELS, OUTLINES[name])) * self.outline.get(name, 1.0)


def smooth(points: np.ndarray, steps: int = 5) -> np.ndarray:
    """Return a Catmull-Rom curve through (n, 4) points, with `steps` points per span."""
    padded = np.concatenate([2 * points[:1] - points[1:2], points, 2 * points[-1:] - points[-2:-1]])
    t = np.linspace(0, 1, steps, endpoint=False)[:, None]
    spans = []
    for a, b, c, d in zip(padded[:-3], padded[1:-2], padded[2:-1], padded[3:], strict=True):
        spans.append(0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3))
    return np.concatenate([*spans, points[-1:]])


def lung_tree(rng: np.random.Generator, stems: list[np.ndarray], side: int, inside) -> Tubes:
    """Grow branches from the stems to points all over one lung; a vessel's width follows from how many it feeds."""
    targets = rng.uniform((0, -95, 0.03 * HEIGHT), (140, 100, 0.9 * HEIGHT), (1000, 3)) * (side, 1, 1)
    targets = targets[inside(targets)]
    stem = np.concatenate([stem[len(stem) // 3 :, :3] for stem in stems])
    targets = targets[np.argsort(np.linalg.norm(targets - stem.mean(0), axis=1))]
    count = len(stem)
    nodes, cost = np.zeros((count + 3 * len(targets), 3)), np.zeros(count + 3 * len(targets))
    nodes[:count] = stem
    parents = [-1] * count
    for target in targets:
        # A path along existing vessels costs less than a new one, so branches share trunks instead of fanning out.
        parent = int((np.linalg.norm(nodes[:count] - target, axis=1) + 0.45 * cost[:count]).argmin())
        start, span = nodes[parent], target - nodes[parent]
        wiggle = rng.normal(0, 0.03 * np.linalg.norm(span), (3, 3))
        for share, off in zip((0.35, 0.7, 1.0), wiggle, strict=True):
            nodes[count] = start + share * span + off
            cost[count] = cost[parent] + np.linalg.norm(nodes[count] - nodes[parent])
            parents.append(parent)
            parent, count = count, count + 1
    feeds = np.zeros(len(nodes))
    for node in range(len(nodes) - 1, -1, -1):
        feeds[node] = max(feeds[node], 1)
        if parents[node] >= 0:
            feeds[parents[node]] += feeds[node]
    radius = np.minimum(0.95 * feeds ** (1 / 2.7), 4.0)  # Murray's law, with the exponent measured in lungs
    grown = [node for node in range(len(nodes)) if parents[node] >= 0]
    above = [parents[node] for node in grown]
    return Tubes(nodes[above], nodes[grown], np.minimum(radius[above], radius[grown] * 1.25), radius[grown])


def place_emboli(rng: np.random.Generator, findings: Findings, paths: dict) -> list[Embolus]:
    """Place clots as the findings say: on each affected side, and in the trunk and main arteries if central."""
    sites = []  # artery, first and last share of its length
    for side, affected in (("right", findings.right), ("left", findings.left)):
        if not affected:
            continue
        sites.append((f"{side} interlobar", rng.uniform(0.0, 0.12), rng.uniform(0.6, 0.85)))
        if rng.random() < 0.6:
            sites.append((f"{side} upper", rng.uniform(0.0, 0.2), rng.uniform(0.5, 0.75)))
        if findings.central:
            sites.append((f"{side} main", rng.uniform(0.1, 0.3), rng.uniform(0.8, 1.0)))
    if findings.central:  # alone, or riding on the fork of the trunk
        sites.append(("trunk", rng.uniform(0.35, 0.5), 1.0))
    emboli = []
    for number, (artery, first, last) in enumerate(sites):
        path = paths[artery]
        part = path[int(first * (len(path) - 1)) : int(np.ceil(last * (len(path) - 1))) + 1]
        old = findings.chronic and (not findings.acute or number % 2 == 0)
        emboli.append(old_clot(rng, part) if old else fresh_clot(rng, part))
        if findings.extent:  # in the first half, where the artery is wide enough for it to be seen
            middle = part[int(rng.uniform(0.1, 0.5) * (len(part) - 1)), 2]
            extent = middle - findings.extent / 2, middle + findings.extent / 2
            emboli[-1] = replace(emboli[-1], extent=extent)
    return emboli


def fresh_clot(rng: np.random.Generator, path: np.ndarray) -> Embolus:
    """Fill the middle of an artery, with a rim of contrast around the clot; some clots fill and widen the artery."""
    clot = path.copy()
    if path[0, 3] > 10.5:  # a clot has the width of the leg vein it formed in, less than that of these arteries
        clot[:, 3] *= rng.uniform(0.62, 0.8)
    else:
        clot[:, 3] *= rng.uniform(0.74, 0.88) if rng.random() < 0.6 else rng.uniform(1.0, 1.12)
    return Embolus(Tubes.along(clot), None, None, rng.uniform(45, 70))


def old_clot(rng: np.random.Generator, path: np.ndarray) -> Embolus:
    """Line the wall of an artery, leaving an eccentric channel; half of these clots contain calcium."""
    angle = rng.uniform(0, 2 * np.pi)
    away = np.array([np.cos(angle), np.sin(angle), 0])
    clot, lumen, calcium = path.copy(), path.copy(), path[len(path) // 3 : 2 * len(path) // 3 + 2].copy()
    clot[:, 3] *= 1.03
    lumen[:, 3] *= rng.uniform(0.42, 0.55)
    lumen[:, :3] += away * (path[:, 3:] - lumen[:, 3:] - 0.5)
    calcium[:, :3] -= away * calcium[:, 3:] * 0.8
    calcium[:, 3] = 1.3
    chalk = Tubes.along(calcium) if rng.random() < 0.5 else None
    return Embolus(Tubes.along(clot), Tubes.along(lumen), chalk, rng.uniform(40, 60))


def make_heart(rng: np.random.Generator, ratio: float, scale: float) -> dict[str, Chamber]:
    """Place the four chambers so that the short axes of the ventricles have the given ratio."""
    turn = np.radians(rng.uniform(-42, -30))
    left = rng.uniform(18.5, 20.5) * scale
    if ratio >= 1:  # a strained right heart squeezes the left one
        left *= 0.9
    right = ratio * left
    along, across = np.array([np.cos(turn), np.sin(turn)]), np.array([np.sin(turn), -np.cos(turn)])
    septum = 9 * scale
    ventricle = np.array([38.0, 6.0]) * scale
    other = ventricle + across * (left + septum + right) - along * 6 * scale
    z = HEIGHT * np.array([0.735, 0.725, 0.675, 0.605]) + rng.normal(0, 2)
    return {
        "left ventricle": Chamber(*ventricle, z[0], 32 * scale, left, 0.165 * HEIGHT, turn),
        "right ventricle": Chamber(*other, z[1], 36 * scale, right, 0.18 * HEIGHT, turn),
        "right atrium": Chamber(-30 * scale, -4, z[2], 27 * scale, 21 * scale, 0.16 * HEIGHT, np.radians(100)),
        "left atrium": Chamber(0, 24, z[3], 34 * scale, 17 * scale, 0.095 * HEIGHT, 0.0),
    }


def make_patient(rng: np.random.Generator, findings: Findings) -> Patient:
    """Draw one patient who has the findings; everything else varies as patients do."""
    size = rng.normal(1, 0.05)
    width = size * rng.normal(1, 0.03)
    domes = (rng.uniform(0.77, 0.84), rng.uniform(0.81, 0.88))

    def inside(points):
        x, y, level = points[:, 0], points[:, 1], points[:, 2] / HEIGHT
        a = np.interp(level, LEVELS, OUTLINES["cavity_width"]) * width - 6
        b = np.interp(level, LEVELS, OUTLINES["cavity_depth"]) * size - 6
        from_middle = y - np.interp(level, LEVELS, OUTLINES["cavity_y"]) * size
        low = np.where(x < 0, *domes) + 0.35 * (np.hypot(np.abs(x) - 65, y) / 100) ** 2
        return (level < low) & ((x / a) ** 2 + (from_middle / b) ** 2 < 1) & (np.abs(x) > 26)

    strained = findings.rv_lv_ratio >= 1
    widths = {name: rng.normal(1, 0.05) for name in PATHS}
    for name in ARTERIES:
        clotted = findings.right if "right" in name else findings.left if "left" in name else False
        swollen = clotted and "main" not in name and not findings.extent  # else it would give a short clot away
        widths[name] *= (1.12 if strained else 1.0) * (1.22 if swollen else 1.0)
    shift = dict.fromkeys(PATHS, np.zeros(3)) | {n: rng.normal(0, 1.5, 3) for n in ("aorta", "cava", "azygos")}
    paths = {}
    for name, given in PATHS.items():
        points = np.array(given, float) * [1, 1, HEIGHT, widths[name]]
        points[:, :3] = points[:, :3] * [width, size, 1] + shift[name]
        paths[name] = smooth(points)
    artery = rng.uniform(120, 165) if findings.poor_contrast else rng.uniform(260, 400)
    left = artery * rng.uniform(0.55, 0.95)
    cava = rng.uniform(300, 420) if findings.poor_contrast else rng.uniform(420, 800)
    vessels = {name: Tubes.along(path) for name, path in paths.items()}
    vessels["arteries"] = Tubes.joined([vessels[name] for name in ARTERIES])
    vessels["veins"] = Tubes.joined([vessels[name] for name in VEINS])
    for kind, stems in (("arteries", ARTERIES[3:]), ("veins", VEINS)):
        sides = [([paths[name] for name in stems if word in name], side) for word, side in (("right", -1), ("left", 1))]
        vessels[f"lung {kind}"] = Tubes.joined([lung_tree(rng, of_side, side, inside) for of_side, side in sides])

    flow = None
    if findings.flow_artifact:
        path = paths[str(rng.choice(["right interlobar", "left interlobar", "trunk"]))].copy()
        flow = Tubes.along(path[2:-3] * [1, 1, 1, 0.9])

    def lung_side() -> float:
        if findings.positive and findings.left != findings.right:
            return 1.0 if findings.left else -1.0
        return rng.choice([-1.0, 1.0])

    opacities = []
    for _ in range(rng.poisson(1.3 if findings.positive else 0.15)):
        side, angle = lung_side(), rng.uniform(-0.2, 1.1)
        x, y = side * 122 * width * np.cos(angle), (8 + 76 * np.sin(angle)) * size
        opacities.append((x, y, HEIGHT * rng.uniform(0.45, 0.85), rng.uniform(22, 36)))
    fluid = [rng.uniform(10, 34) if rng.random() < (0.55 if findings.positive else 0.1) else 0.0 for _ in range(2)]
    wave = rng.uniform(0.012, 0.045, (6, 3)) * rng.choice([-1, 1], (6, 3)) * [1, 1, 0.6]
    waves = np.column_stack([rng.uniform(0.8, 2.2, 6), wave, rng.uniform(0, 6.28, 6)]).astype(np.float32)
    return Patient(
        findings=findings,
        field_of_view=rng.uniform(288, 318) * max(width, 0.98),
        turn=np.radians(rng.normal(0, 2.5)),
        shift=tuple(rng.normal(0, 4, 2)),
        outline={n: (width if n.endswith("width") else size) for n in OUTLINES} | {"mediastinum": rng.normal(1, 0.1)},
        waves=waves,
        breasts=rng.uniform(0.7, 1.15) if rng.random() < 0.45 else 0.0,
        fat=rng.uniform(-6, 10),
        domes=domes,
        chambers=make_heart(rng, findings.rv_lv_ratio, size * rng.normal(1, 0.04)),
        vessels=vessels,
        emboli=place_emboli(rng, findings, paths),
        flow=flow,
        contrast={
            "artery": artery,
            "left": left,
            "cava": cava,
            "muscle": rng.uniform(45, 65),
            "liver": rng.uniform(70, 110),
        },
        opacities=opacities,
        effusion=tuple(fluid),
        noise=rng.uniform(14, 26) * (1.5 if findings.indeterminate else 1.0),
        air=rng.uniform(-880, -800),
        rib_phase=rng.uniform(0, 1),
    )
