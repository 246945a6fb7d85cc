"""Draw an axial slice of a phantom's patient in Hounsfield units (HU), as a scanner would.

A slice is painted in layers: skin, then fat over it, then muscle, lungs, bones, heart, vessels and
clots. Every shape is an array of signed distances in mm, negative inside the shape. The `max` of
two shapes is their overlap, and `melt` is their union with a rounded joint.

    canvas.spot(Ellipse(0, 60, a=18, b=14.5), 95)      a disc of the spine: 95 HU, 36 x 29 mm

Lengths are in mm, in the axes of `anatomy`. Do not change the arithmetic or the order of random
numbers, because a seed must always give the same images. This module imports numpy and scipy, so
only the functions that draw a phantom import it.
"""

from typing import NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from tpukit.pe.phantoms.anatomy import HEIGHT, Chamber, Patient, Tubes

# Hounsfield units
FAT = -100
SKIN = 20
MARROW = 210
CORTEX = 620
MYOCARDIUM = 105
FLUID = 8
SMALLEST_CLOT = 60.0  # mm2; if the emboli of a slice have a smaller area, they are not drawn
_EVERYWHERE = (slice(None), slice(None))  # the window of all rows and columns
_BOTH = (-1, 1)  # the sign of x on the patient's right and left


class Ellipse(NamedTuple):
    """An ellipse in the plane of a slice; if `power` is more than 2, a squarer shape."""

    x: float
    y: float
    a: float  # half axis along x
    b: float  # half axis along y
    angle: float = 0.0  # radians, from +x towards +y
    power: float = 2.0

    def distance(self, x, y):
        """Return the signed distance of points to the edge in mm, exact only on the edge."""
        a = np.float32(self.a)
        b = np.float32(self.b)
        u = x - np.float32(self.x)
        v = y - np.float32(self.y)
        if self.angle:
            c = np.float32(np.cos(self.angle))
            s = np.float32(np.sin(self.angle))
            along = u * c + v * s
            v = v * c - u * s
            u = along
        u = np.abs(u) / a
        v = np.abs(v) / b
        # r is 1 on the edge. To first order, the distance is (r - 1) / |gradient of r|.
        tiny = np.float32(1e-9)
        if self.power == 2.0:
            r = np.sqrt(u * u + v * v) + np.float32(1e-6)
            return (r - 1) * r / (np.sqrt((u / a) ** 2 + (v / b) ** 2) + tiny)
        power = self.power
        pu = u ** np.float32(power - 1)
        pv = v ** np.float32(power - 1)
        r = (pu * u + pv * v + tiny) ** np.float32(1 / power)
        slope = np.sqrt((pu / a) ** 2 + (pv / b) ** 2) * r ** np.float32(1 - power)
        return (r - 1) / (slope + tiny)


def melt(first, second, radius: float):
    """Join two shapes with a joint rounded by this radius in mm.

    `first`, `second` and the result are signed distances in mm to the edge of a shape.
    """
    h = np.clip(0.5 + 0.5 * (second - first) / radius, 0, 1)
    return second * (1 - h) + first * h - radius * h * (1 - h)


class Canvas:
    """A slice while it is painted.

    Later paint covers earlier paint. Edges are blurred over one pixel.

    Attributes:
        patient, z, size: the patient, the height of the slice in mm, and its pixels per side.
        pixel: mm per pixel.
        level: z as a share of HEIGHT.
        x, y: (size, size) mm, the position of each pixel in the patient. The patient is turned,
            shifted, and bent by long, shallow waves, so that no organ is a perfect ellipse.
        hu: (size, size) float32 Hounsfield units.
    """

    def __init__(self, patient: Patient, z: float, size: int):
        self.patient = patient
        self.z = z
        self.size = size
        self.level = z / HEIGHT
        self.pixel = patient.field_of_view / size
        axis = (np.arange(size, dtype=np.float32) - (size - 1) / 2) * self.pixel
        self._cos = np.cos(patient.turn, dtype=np.float32)
        self._sin = np.sin(patient.turn, dtype=np.float32)
        across = axis[None, :]
        down = axis[:, None]
        x = self._cos * across + self._sin * down - np.float32(patient.shift[0])
        y = self._cos * down - self._sin * across - np.float32(patient.shift[1])
        bends = []
        for amplitude, kx, ky, kz, phase in patient.waves:
            bends.append(amplitude * np.sin(kx * x + ky * y + (kz * np.float32(z) + phase)))
        self.x = x + sum(bends[:3])
        self.y = y + sum(bends[3:])
        # The most mm by which the waves move a pixel. `window` adds them to a shape's radius.
        bend = float(patient.waves[:, 0].reshape(2, 3).sum(1).max())
        self._reach = bend + 2 * self.pixel
        self.hu = np.full((size, size), -1000, np.float32)

    def window(self, x: float, y: float, radius: float) -> tuple[slice, slice]:
        """Return the rows and columns that can contain a shape at (x, y) of this radius in mm."""
        x = x + self.patient.shift[0]
        y = y + self.patient.shift[1]
        column = (self._cos * x - self._sin * y) / self.pixel + self.size / 2
        row = (self._sin * x + self._cos * y) / self.pixel + self.size / 2
        half = (radius + self._reach) / self.pixel
        return _clipped(row, half), _clipped(column, half)

    def distance(self, shape: Ellipse):
        """Return the signed distance of every pixel to an ellipse."""
        return shape.distance(self.x, self.y)

    def cover(self, distance):
        """Convert signed distances in mm into the covered share of each pixel, 0 to 1."""
        return np.clip(0.5 - distance / self.pixel, 0, 1)

    def paint(self, distance, value, *, window=_EVERYWHERE, limit=None, strength: float = 1.0):
        """Paint a value, or an array of values, on the pixels with a negative distance.

        Args:
            distance: the signed distance of each pixel of the window, in mm.
            value: Hounsfield units.
            window: the rows and columns to paint; the default is the whole slice.
            limit: (size, size), the coverage of another shape. Nothing is painted outside of that
                shape. None for no limit.
            strength: 0 to 1; values below 1 blend with earlier paint.
        """
        cover = self.cover(distance) * strength
        if limit is not None:
            cover = cover * limit[window]
        self.hu[window] += cover * (value - self.hu[window])

    def spot(self, shape: Ellipse, value, *, limit=None):
        """Paint an ellipse; `value` and `limit` are those of `paint`."""
        window = self.window(shape.x, shape.y, max(shape.a, shape.b))
        distance = shape.distance(self.x[window], self.y[window])
        self.paint(distance, value, window=window, limit=limit)

    def bone(self, shape: Ellipse, *, shell: float = 2.0, marrow: float = MARROW):
        """Paint an ellipse of `marrow` HU with a shell of dense bone, `shell` mm thick."""
        window = self.window(shape.x, shape.y, max(shape.a, shape.b))
        distance = shape.distance(self.x[window], self.y[window])
        self.paint(distance, CORTEX, window=window)
        self.paint(distance + shell, marrow, window=window)

    def tubes(self, tubes: Tubes, value, *, grow=0.0, limit=None, soft=0.0, strength=1.0):
        """Paint the cross-sections of vessels.

        Args:
            tubes: the vessels; only the segments near this slice are painted.
            value: Hounsfield units.
            grow: the mm by which the radius of vessels is increased.
            soft: edges are blurred over 1 + `soft` pixels.
            limit, strength: as for `paint`.
        """
        for start, end, start_radius, end_radius in tubes.near(self.z):
            low = np.minimum(start, end)
            high = np.maximum(start, end)
            middle = (low + high) / 2
            half = np.hypot(*(high - low)[:2]) / 2 + max(start_radius, end_radius) + grow
            window = self.window(middle[0], middle[1], half)
            x = self.x[window] - start[0]
            y = self.y[window] - start[1]
            z = self.z - start[2]
            # The nearest point of the centre line, as a share of the segment.
            along = end - start
            product = x * along[0] + y * along[1] + z * along[2]
            share = np.clip(product / (along @ along), 0, 1)
            above = z - share * along[2]
            squares = (x - share * along[0]) ** 2 + (y - share * along[1]) ** 2 + above**2
            radius = start_radius + grow + share * (end_radius - start_radius)
            distance = (np.sqrt(squares) - radius) / (1 + soft)
            self.paint(distance, value, window=window, limit=limit, strength=strength)


def _clipped(middle: float, half: float) -> slice:
    return slice(max(0, int(middle - half)), max(0, int(middle + half) + 2))


def _below(level: float, top: float, span: float) -> float:
    """Return 1 for levels up to `top - span`, 0 from `top` on, and a linear ramp between."""
    return np.clip((top - level) / span, 0, 1)


def scan(patient: Patient, z: float, size: int, rng: np.random.Generator):
    """Draw the slice of a patient at z.

    Args:
        patient: the patient.
        z: the position of the slice in mm.
        size: height and width in pixels.
        rng: the random numbers of the exam.

    Returns:
        The slice, (size, size) float32 Hounsfield units; and the mask of emboli, (size, size) bool.
    """
    canvas = Canvas(patient, z, size)
    cavity = draw_wall(canvas)
    heart = heart_distance(canvas)
    lung = draw_lungs(canvas, cavity, heart)
    draw_bones(canvas, cavity)
    if heart is not None:
        draw_heart(canvas, heart)
    draw_vessels(canvas, canvas.cover(lung))
    embolus = draw_emboli(canvas)
    return expose(canvas, rng), embolus


def draw_wall(canvas: Canvas):
    """Paint the couch, skin, fat and muscle; return the distance to the inside of the rib cage."""
    p = canvas.patient
    z = canvas.z
    width = p.measure("body_width", z) + p.fat
    depth = p.measure("body_depth", z) + p.fat
    body = canvas.distance(Ellipse(0, 8, width, depth, power=2.5))
    _draw_table(canvas, back=8 + p.measure("body_depth", z) + p.fat)
    a = p.measure("cavity_width", z)
    b = p.measure("cavity_depth", z)
    middle = p.measure("cavity_y", z)
    cavity = canvas.distance(Ellipse(0, middle, a, b, power=2.25))
    front = middle - b
    swell = p.breasts * np.sqrt(max(0.0, 1 - ((canvas.level - 0.6) / 0.24) ** 2))
    has_breasts = swell > 0.15
    if has_breasts:
        for side in _BOTH:
            shape = Ellipse(side * 78, front - 20, 58 * swell, 40 * swell, angle=side * 0.3)
            body = melt(body, canvas.distance(shape), 14)
    canvas.paint(body, SKIN)
    canvas.paint(body + 2.2, FAT)
    if has_breasts:  # glandular tissue, over the fat, with a wavy edge
        for side in _BOTH:
            shape = Ellipse(side * 80, front - 24, 30 * swell, 17 * swell, angle=side * 0.4)
            lobes = 7 * np.sin(0.37 * canvas.x + 0.1 * z) * np.sin(0.41 * canvas.y)
            canvas.paint(canvas.distance(shape) + lobes + 3, -5, strength=0.7)
    canvas.paint(np.maximum(cavity - 15, body + 5), p.contrast["muscle"])
    _draw_muscles(canvas, canvas.cover(body + 6), a, front)
    return cavity


def _draw_table(canvas: Canvas, *, back: float) -> None:
    """Paint the table under the patient: an arc of foam with a shell.

    Args:
        canvas: the slice.
        back: y of the patient's back in mm.
    """
    middle = back + 4 - 420
    table = np.abs(np.hypot(canvas.x, canvas.y - middle) - 420 - 8)
    canvas.paint(table - 7, -880)  # foam
    canvas.paint(np.abs(table - 7) - 0.8, -250)  # its shell


def _draw_muscles(canvas: Canvas, within, a: float, front: float) -> None:
    """Paint the muscles around the rib cage, each over a layer of fat.

    These are the pectorals in front, latissimus and the muscles of the shoulder blade at the side,
    and the erectors next to the spine.

    Args:
        canvas: the slice.
        within: (size, size), the coverage of the body.
        a: half the width of the rib cage in mm.
        front: y of the front of the rib cage in mm.
    """
    muscle = canvas.patient.contrast["muscle"]
    spine = canvas.patient.measure("spine_y", canvas.z)
    upper = _below(canvas.level, 0.52, 0.15)
    high = _below(canvas.level, 0.3, 0.15)
    blade = max(a - 4, 94)
    for side in _BOTH:
        shapes = []
        if upper:
            outer = front - 14 - 4 * upper
            inner = front - 13 - 4 * upper
            shapes += [
                (Ellipse(side * 62, outer, 54, 5 + 8 * upper, angle=side * 0.24), FAT),
                (Ellipse(side * 66, inner, 54, 3 + 8 * upper, angle=side * 0.26), muscle),
                (Ellipse(side * blade, 50, 50, 6 + 20 * upper, angle=-side * 0.8), FAT),
                (Ellipse(side * blade, 50, 48, 2 + 20 * upper, angle=-side * 0.8), muscle),
                (Ellipse(side * 66, spine + 36, 58, 9 * high + 1, angle=-side * 0.22), muscle),
                (Ellipse(side * 152, 6, 40 * high + 1, 46 * high + 1), muscle),
            ]
        shapes += [
            (Ellipse(side * (a + 15), 12, 5.5, 48), FAT),
            (Ellipse(side * (a + 18), 18, 5, 46), muscle),
            (Ellipse(side * 24, spine + 40, 19, 12, angle=side * 0.25), muscle),
        ]
        for shape, value in shapes:
            canvas.spot(shape, value, limit=within)


def draw_lungs(canvas: Canvas, cavity, heart):
    """Paint the inside of the rib cage except heart and vessels.

    Args:
        canvas: the slice.
        cavity: the distance to the inside of the rib cage.
        heart: the distance to the heart; None if the slice misses the heart.

    Returns:
        The distance to the lungs.
    """
    p = canvas.patient
    z = canvas.z
    x = canvas.x
    y = canvas.y
    canvas.paint(cavity, FAT + 10 * np.sin(x * 0.21 + z * 0.1) * np.sin(y * 0.17))
    lung = np.maximum(cavity + 1.2, -_mediastinum(canvas, heart))
    organs = _organs(canvas)
    for organ in organs.values():
        lung = np.maximum(lung, -organ)
    canvas.paint(lung - 1.2, 20)  # pleura
    for side, depth in zip(_BOTH, p.effusion, strict=True):
        fluid = depth * np.clip((canvas.level - 0.4) / 0.35, 0, 1)
        if fluid > 2:
            back = p.measure("cavity_y", z) + p.measure("cavity_depth", z)
            edge = (back - 6 - fluid) + 0.0012 * (x - side * 70) ** 2 - y
            pool = np.maximum(edge, -side * x)
            canvas.paint(np.maximum(pool, lung - 2), FLUID)
            lung = np.maximum(lung, -pool)
    for opacity in p.opacities:
        scale = np.sqrt(max(0.0, 1 - ((z - opacity.z) / opacity.radius) ** 2))
        if scale > 0.2:
            ragged = 5 * np.sin(x * 0.14 + opacity.z) * np.sin(y * 0.17 + z * 0.1)
            ragged += 1.5 * np.sin(x * 0.5) * np.sin(y * 0.43 + z)
            radius = opacity.radius * scale
            shape = Ellipse(opacity.x, opacity.y, radius, radius * 0.8)
            solid = canvas.distance(shape) + ragged
            canvas.paint(np.maximum(solid, lung - 2), 25)  # consolidated lung
            lung = np.maximum(lung, -solid)
    clouds = 14 * np.sin(x * 0.05 + z * 0.04) * np.sin(y * 0.06 + z * 0.03)
    canvas.paint(lung, p.air + 45 * (y / 90) + clouds)
    if organs:
        draw_belly(canvas, cavity, organs)
    return lung


def _mediastinum(canvas: Canvas, heart):
    """Return the distance to everything between the lungs."""
    p = canvas.patient
    spine = p.measure("spine_y", canvas.z)
    column = canvas.distance(Ellipse(2, 6, p.measure("mediastinum", canvas.z), 54, power=2.3))
    from_edge = np.abs(canvas.x - 3) - 3.5 - 16 * _below(canvas.level, 0.24, 0.1)
    column = melt(column, np.maximum(from_edge, canvas.y - 10), 18)
    column = melt(column, canvas.distance(Ellipse(0, spine + 6, 24, 27)), 10)
    column = melt(column, canvas.distance(Ellipse(0, spine + 32, 30, 30)), 8)
    if heart is not None:
        column = melt(column, heart - 5, 12)
    return column


def _organs(canvas: Canvas) -> dict:
    """Return the distances to the organs under the domes of the diaphragm that the slice cuts."""
    organs = {}
    for side, dome in zip(_BOTH, canvas.patient.domes, strict=True):
        rise = 1 - ((1.22 - canvas.level) / (1.22 - dome)) ** 2
        if rise > 0:
            r = np.sqrt(rise)
            organs[side] = canvas.distance(Ellipse(side * 62, -6, 118 * r, 108 * r))
    return organs


def draw_belly(canvas: Canvas, cavity, organs: dict):
    """Paint the organs below the diaphragm: liver on the right, stomach and spleen on the left."""
    z = canvas.z
    x = canvas.x
    y = canvas.y
    within = canvas.cover(cavity + 3)
    liver = canvas.patient.contrast["liver"]
    right, left = _BOTH
    if right in organs:
        canvas.paint(np.maximum(organs[right], x - 8), liver, limit=within)
        for k in range(5):
            vein_x = -95 + 17 * k + 6 * np.sin(k * 9 + z * 0.05)
            vein_y = 12 * np.sin(k * 5.1 + z * 0.03)
            canvas.spot(Ellipse(vein_x, vein_y, 4, 2.5, angle=k), liver + 30, limit=within)
    if left in organs:
        canvas.paint(np.maximum(organs[left], 8 - x), FAT, limit=within)
        deeper = organs[left] + 5
        spleen = np.maximum(deeper, canvas.distance(Ellipse(105, 38, 44, 36, angle=0.9)))
        spots = 18 * np.sin(x * 0.35 + z) * np.sin(y * 0.3)
        canvas.paint(spleen, liver + 45 + spots, limit=within)
        stomach = np.maximum(deeper, canvas.distance(Ellipse(58, -14, 42, 38)))
        canvas.paint(stomach, 45, limit=within)  # muscle
        canvas.paint(stomach + 4, 15, limit=within)  # contents
        # Air collects in front, because the patient lies on the back.
        canvas.paint(np.maximum(stomach + 4, y + 28), -950, limit=within)


def _cross_section(chamber: Chamber, z: float, *, wall: float = 0.0) -> Ellipse:
    """Return the cross-section of a chamber at z, enlarged by a wall in mm."""
    scale = chamber.at(z)
    a = chamber.long * scale + wall
    b = chamber.short * scale + wall
    return Ellipse(chamber.x, chamber.y, a, b, angle=chamber.angle)


def _is_cut(chamber: Chamber, z: float) -> bool:
    return chamber.at(z) >= 0.1


def heart_distance(canvas: Canvas):
    """Return the distance to the heart, or None if the slice misses it."""
    heart = None
    for name, chamber in canvas.patient.chambers.items():
        if not _is_cut(chamber, canvas.z):
            continue
        wall = 11 if name == "left ventricle" else 3
        outside = canvas.distance(_cross_section(chamber, canvas.z, wall=wall))
        heart = outside if heart is None else melt(heart, outside, 10)
    return heart


def draw_heart(canvas: Canvas, heart):
    """Paint pericardium, fat, muscle and the blood in the four chambers."""
    p = canvas.patient
    canvas.paint(heart - 5, 30)  # pericardium
    canvas.paint(heart - 4, FAT + 10)  # fat under it
    canvas.paint(heart, MYOCARDIUM)
    right = {
        "right ventricle": p.contrast["artery"],
        "right atrium": 1.08 * p.contrast["artery"],
    }
    for name, chamber in p.chambers.items():
        if _is_cut(chamber, canvas.z):
            blood = right.get(name, p.contrast["left"])
            canvas.spot(_cross_section(chamber, canvas.z), blood)
            if name == "left ventricle":
                _draw_papillary_muscles(canvas, chamber)
    left = p.chambers["left atrium"]
    scale = left.at(canvas.z)
    if p.findings.defect_not_pe and scale > 0.3:
        canvas.spot(Ellipse(left.x + 17, left.y - 3, 10 * scale, 8 * scale), 60)


def _draw_papillary_muscles(canvas: Canvas, chamber: Chamber) -> None:
    scale = chamber.at(canvas.z)
    if scale <= 0.5:  # the ends of the chamber are too narrow for them
        return
    c = np.cos(chamber.angle)
    s = np.sin(chamber.angle)
    for along, across in ((8, 0.55), (12, -0.5)):
        off = across * chamber.short * scale
        x = chamber.x + c * along - s * off
        y = chamber.y + s * along + c * off
        canvas.spot(Ellipse(x, y, 4.5, 3, angle=chamber.angle), MYOCARDIUM)


def draw_vessels(canvas: Canvas, inside):
    """Paint airways, the vessels of the lung and the great vessels; pulmonary arteries come last.

    Args:
        canvas: the slice.
        inside: (size, size), the coverage of the lungs, outside of which small vessels are not
            painted.
    """
    p = canvas.patient
    blood = p.contrast
    tubes = p.vessels
    spine = p.measure("spine_y", canvas.z)
    canvas.tubes(tubes["lung veins"], blood["left"], limit=inside)
    canvas.tubes(tubes["lung arteries"], blood["artery"], limit=inside)
    canvas.spot(Ellipse(5, spine - 26, 8, 5.5), 45)  # oesophagus
    canvas.spot(Ellipse(6, spine - 26, 2.5, 1.2), -500)  # a little air in it
    canvas.tubes(tubes["azygos"], blood["left"] * 0.7)
    airways = [tubes[name] for name in tubes if "trachea" in name or "bronchus" in name]
    for airway in airways:
        canvas.tubes(airway, 30, grow=1.3)
    # The air after the walls of all airways, so that no wall closes an airway where they branch.
    for airway in airways:
        canvas.tubes(airway, -990)
    # Contrast is injected into the left arm, so the vein of the right arm is darker.
    canvas.tubes(tubes["right brachiocephalic vein"], blood["cava"] * 0.55)
    for name in ("left brachiocephalic vein", "cava"):
        canvas.tubes(tubes[name], blood["cava"])
    canvas.tubes(tubes["veins"], blood["left"])
    for name in ("brachiocephalic artery", "left carotid", "left subclavian", "aorta"):
        canvas.tubes(tubes[name], 60, grow=1.2)
        canvas.tubes(tubes[name], blood["left"])
    # The wall of the arteries: 1 mm of tissue around the blood.
    canvas.tubes(tubes["arteries"], 50, grow=1.0)
    canvas.tubes(tubes["arteries"], blood["artery"])
    if p.flow is not None:
        # Blood that contrast has not reached yet: darker and blurred, but never as dark as a clot.
        canvas.tubes(p.flow, 0.62 * blood["artery"], soft=3.0, strength=0.8)


def draw_emboli(canvas: Canvas):
    """Paint the clots of a slice, and return the mask of visible changes, (size, size) bool.

    If the mask has a smaller area than SMALLEST_CLOT, the slice is not changed, and the mask is
    False everywhere.
    """
    before = canvas.hu.copy()
    artery = canvas.patient.contrast["artery"]
    for embolus in canvas.patient.emboli:
        if not embolus.at(canvas.z):
            continue
        canvas.tubes(embolus.clot, embolus.hu)
        if embolus.lumen is not None:
            canvas.tubes(embolus.lumen, artery)
        if embolus.calcium is not None:
            canvas.tubes(embolus.calcium, 450)
    mask = np.abs(canvas.hu - before) > 60  # HU; a smaller change would not be visible in the noise
    area = np.count_nonzero(mask) * canvas.pixel**2
    if area < SMALLEST_CLOT:
        canvas.hu = before
        return np.zeros_like(mask)
    return mask


def draw_bones(canvas: Canvas, cavity):
    """Paint ribs, breastbone, shoulder blades, collar bones and the spine."""
    p = canvas.patient
    level = canvas.level
    a = p.measure("cavity_width", canvas.z)
    middle = p.measure("cavity_y", canvas.z)
    front = middle - p.measure("cavity_depth", canvas.z)
    _draw_ribs(canvas, cavity, middle)
    if 0.13 < level < 0.86:  # breastbone
        wide = 15 + 14 * _below(level, 0.32, 0.12)
        canvas.bone(Ellipse(0, front - 7, wide, 6.5, power=2.6), shell=1.6, marrow=130)
    if level < 0.17:  # collar bones
        for side in _BOTH:
            drop = (0.17 - level) / 0.17
            x = side * (24 + 70 * drop)
            y = front - 8 - 4 * drop
            canvas.bone(Ellipse(x, y, 15 + 8 * drop, 6.5, angle=side * 0.35), shell=2)
    if level < 0.5:
        for side in _BOTH:
            _draw_shoulder(canvas, side, max(a - 2, 96))
    draw_spine(canvas, p.measure("spine_y", canvas.z))


def _draw_ribs(canvas: Canvas, cavity, middle: float) -> None:
    """Paint all ribs by one formula: they are 25 mm apart, and descend 75 mm to the front."""
    from_back = np.arctan2(np.abs(canvas.x), (canvas.y - middle)) / np.pi
    turns = (canvas.z - 75 * from_back) / 25 + canvas.patient.rib_phase
    gap = (turns - np.round(turns)) * 25
    rib = (np.hypot((cavity - 6.5) / 4.2, gap / 6.8) - 1) * 4.2
    rib = np.maximum(rib, np.maximum(0.12 - from_back, from_back - 0.9) * 300)
    is_cartilage = from_back > 0.78  # next to the breastbone
    canvas.paint(rib, np.where(is_cartilage, 110, CORTEX))
    canvas.paint(rib + 1.9, np.where(is_cartilage, 90, MARROW))


def _draw_shoulder(canvas: Canvas, side: int, blade: float) -> None:
    """Paint the shoulder blade, and higher up the joint and the arm."""
    shrink = np.clip((0.55 - canvas.level) / 0.3, 0.25, 1)
    canvas.bone(Ellipse(side * blade, 50, 36 * shrink, 3.2, angle=-side * 0.8), shell=1.4)
    if canvas.level < 0.24:
        canvas.bone(Ellipse(side * (blade + 16), 56, 26, 3.4, angle=side * 0.3), shell=1.4)
        canvas.bone(Ellipse(side * (blade + 30), 24, 11, 9, angle=-side * 0.6), shell=2)
    if canvas.level < 0.08:
        canvas.bone(Ellipse(side * 156, 0, 21, 20), shell=2.5)


def draw_spine(canvas: Canvas, spine: float):
    """Paint a vertebra with arch, processes and canal, or the disc between two vertebrae."""
    phase = (canvas.z / 23 + canvas.patient.rib_phase) % 1
    is_disc = phase < 0.2
    if phase < 0.55:
        for side in _BOTH:
            canvas.bone(Ellipse(side * 27, spine + 24, 15, 5, angle=side * 0.35), shell=1.8)
    canvas.bone(Ellipse(0, spine + 38, 3.4, 17), shell=1.5)
    for side in _BOTH:
        canvas.bone(Ellipse(side * 11, spine + 27, 13, 4.2, angle=side * 0.6), shell=1.5)
        if not is_disc:
            canvas.bone(Ellipse(side * 12, spine + 15, 4.5, 8), shell=1.6)
    body = Ellipse(0, spine, 18, 14.5, power=2.3)
    if is_disc:
        canvas.spot(body, 95)  # denser than muscle, softer than bone
    else:
        canvas.bone(body, shell=1.9, marrow=170)
    canvas.spot(Ellipse(0, spine + 19, 9.5, 7.5), -10)  # canal
    canvas.spot(Ellipse(0, spine + 19, 6, 4.8), 35)  # spinal cord


def expose(canvas: Canvas, rng: np.random.Generator):
    """Return the slice in HU with the artefacts of a real scanner: streaks, blur, motion, noise."""
    p = canvas.patient
    pixel = canvas.pixel
    hu = canvas.hu
    if 0.1 < canvas.level < 0.5:  # dense contrast in the vena cava causes streaks
        x = canvas.x + 28
        y = canvas.y + 12
        angle = np.arctan2(y, x)
        fan = np.sin(angle * 14 + rng.uniform(0, 6)) + np.sin(angle * 22 + rng.uniform(0, 6))
        hu += fan * (p.contrast["cava"] / 45) * np.exp(-np.hypot(x, y) / 30)
    hu = gaussian_filter(hu, 0.75 / pixel)
    if p.findings.motion:
        step = rng.uniform(3, 7, 2) / pixel * rng.choice([-1, 1], 2)
        # A patient who breathed: two positions, each seen by half of the rays.
        moved = np.roll(hu, tuple(np.round(step).astype(int)), (0, 1))
        hu = gaussian_filter(0.5 * hu + 0.5 * moved, 1.3 / pixel)
    # The body absorbs most rays in its middle, so the noise is strongest there.
    middle = 0.7 + 0.6 * np.exp(-(canvas.x**2 + canvas.y**2) / 110**2)
    return hu + p.noise * middle * _grain(canvas, rng)


def _grain(canvas: Canvas, rng: np.random.Generator):
    """Return noise of about 1 HU, with horizontal lines in slices at the shoulders."""
    shape = (canvas.size, canvas.size)
    grain = gaussian_filter(rng.standard_normal(shape, np.float32), 0.8)
    grain = grain / grain.std() + 0.35 * rng.standard_normal(shape, np.float32)
    shoulder = _below(canvas.level, 0.2, 0.2)
    if shoulder:
        lines = gaussian_filter1d(rng.standard_normal(shape, np.float32), 14, axis=1)
        grain += 1.5 * shoulder * lines / lines.std()
    return grain
