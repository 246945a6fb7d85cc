"""The scanner of a phantom: one axial slice of a patient, in Hounsfield units.

Loads numpy and scipy, so only the functions that draw a phantom import it.
"""

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from tpukit.pe.phantoms.anatomy import HEIGHT, Patient, Tubes

FAT, SKIN, MARROW, CORTEX, MYOCARDIUM, FLUID = -100, 20, 210, 620, 105, 8
SMALLEST_CLOT = 60.0  # mm2 that must change for a slice to count as showing an embolus; less is not drawn at all


class Canvas:
    """A slice while it is painted: later paint covers earlier paint, with edges that are soft over one pixel."""

    def __init__(self, patient: Patient, z: float, size: int):
        self.patient, self.z, self.size = patient, z, size
        self.pixel = patient.field_of_view / size
        axis = (np.arange(size, dtype=np.float32) - (size - 1) / 2) * self.pixel
        c, s = self.turn = np.cos(patient.turn, dtype=np.float32), np.sin(patient.turn, dtype=np.float32)
        x = c * axis[None, :] + s * axis[:, None] - np.float32(patient.shift[0])
        y = c * axis[:, None] - s * axis[None, :] - np.float32(patient.shift[1])
        # Long, shallow waves bend the grid, so that no organ is a perfect ellipse.
        bends = [a * np.sin(kx * x + ky * y + (kz * np.float32(z) + phase)) for a, kx, ky, kz, phase in patient.waves]
        self.x, self.y = x + sum(bends[:3]), y + sum(bends[3:])
        self.reach = float(patient.waves[:, 0].reshape(2, 3).sum(1).max()) + 2 * self.pixel
        self.hu = np.full((size, size), -1000, np.float32)

    def window(self, x: float, y: float, radius: float) -> tuple[slice, slice]:
        """Return the rows and columns that can contain a shape of this radius."""
        c, s = self.turn
        x, y, half = x + self.patient.shift[0], y + self.patient.shift[1], radius + self.reach
        column, row = (c * x - s * y) / self.pixel + self.size / 2, (s * x + c * y) / self.pixel + self.size / 2
        half = half / self.pixel
        return tuple(slice(max(0, int(v - half)), max(0, int(v + half) + 2)) for v in (row, column))

    def cover(self, distance):
        """Convert signed distances in mm (negative inside) into coverage, 0 to 1."""
        return np.clip(0.5 - distance / self.pixel, 0, 1)

    def paint(self, distance, value, window=(slice(None), slice(None)), limit=None, strength: float = 1.0):
        """Paint a value, or an array of values, where the distance is negative."""
        cover = self.cover(distance) * strength
        if limit is not None:
            cover = cover * limit[window]
        self.hu[window] += cover * (value - self.hu[window])

    def ellipse(self, x, y, a, b, angle: float = 0.0, power: float = 2.0):
        """Return the window and the signed distances of an ellipse; a higher power gives a squarer shape."""
        window = self.window(x, y, max(a, b))
        return window, ellipse(self.x[window], self.y[window], x, y, a, b, angle, power)

    def spot(self, x, y, a, b, value, angle: float = 0.0, power: float = 2.0, limit=None):
        """Paint one ellipse."""
        window, distance = self.ellipse(x, y, a, b, angle, power)
        self.paint(distance, value, window, limit)

    def bone(self, x, y, a, b, angle: float = 0.0, power: float = 2.0, shell: float = 2.0, marrow: float = MARROW):
        """Paint one ellipse of marrow with a shell of dense bone."""
        window, distance = self.ellipse(x, y, a, b, angle, power)
        self.paint(distance, CORTEX, window)
        self.paint(distance + shell, marrow, window)

    def tubes(self, tubes: Tubes, value: float, grow: float = 0.0, limit=None, soft: float = 0.0, strength=1.0):
        """Paint the cross-sections of vessels, widened by `grow` mm, soft over 1 + `soft` pixels at the edges."""
        for start, end, r0, r1 in tubes.near(self.z):
            low, high = np.minimum(start, end), np.maximum(start, end)
            half = np.hypot(*(high - low)[:2]) / 2 + max(r0, r1) + grow
            window = self.window(*((low + high) / 2)[:2], half)
            x, y = self.x[window] - start[0], self.y[window] - start[1]
            along = end - start
            share = np.clip((x * along[0] + y * along[1] + (self.z - start[2]) * along[2]) / (along @ along), 0, 1)
            above = self.z - start[2] - share * along[2]
            away = np.sqrt((x - share * along[0]) ** 2 + (y - share * along[1]) ** 2 + above**2)
            distance = away - (r0 + grow + share * (r1 - r0))
            self.paint(distance / (1 + soft), value, window, limit, strength)


def ellipse(x, y, cx, cy, a, b, angle: float = 0.0, power: float = 2.0):
    """Return the signed distance to an ellipse, to first order (exact on its edge)."""
    u, v = x - np.float32(cx), y - np.float32(cy)
    if angle:
        c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        u, v = u * c + v * s, v * c - u * s
    u, v = np.abs(u) / np.float32(a), np.abs(v) / np.float32(b)
    if power == 2.0:
        r = np.sqrt(u * u + v * v) + np.float32(1e-6)
        return (r - 1) * r / (np.sqrt((u / np.float32(a)) ** 2 + (v / np.float32(b)) ** 2) + np.float32(1e-9))
    pu, pv = u ** np.float32(power - 1), v ** np.float32(power - 1)
    r = (pu * u + pv * v + np.float32(1e-9)) ** np.float32(1 / power)
    slope = np.sqrt((pu / np.float32(a)) ** 2 + (pv / np.float32(b)) ** 2) * r ** np.float32(1 - power)
    return (r - 1) / (slope + np.float32(1e-9))


def melt(first, second, radius: float):
    """Join two shapes given by their distances, with a fillet of this radius."""
    h = np.clip(0.5 + 0.5 * (second - first) / radius, 0, 1)
    return second * (1 - h) + first * h - radius * h * (1 - h)


def scan(patient: Patient, z: float, size: int, rng: np.random.Generator):
    """Draw the slice at z; return (size, size) float32 Hounsfield units, and (size, size) bool: what is embolus."""
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
    """Paint the table, skin, fat and muscle, and return the distance to the inside of the rib cage."""
    p, z = canvas.patient, canvas.z
    level, x, y = z / HEIGHT, canvas.x, canvas.y
    a, b, cy = p.measure("cavity_width", z), p.measure("cavity_depth", z), p.measure("cavity_y", z)
    body = ellipse(x, y, 0, 8, p.measure("body_width", z) + p.fat, p.measure("body_depth", z) + p.fat, power=2.5)
    back = 8 + p.measure("body_depth", z) + p.fat
    table = np.abs(np.hypot(x, y - (back + 4 - 420)) - 420 - 8)
    canvas.paint(table - 7, -880)
    canvas.paint(np.abs(table - 7) - 0.8, -250)
    cavity = ellipse(x, y, 0, cy, a, b, power=2.25)
    front = cy - b
    swell = p.breasts * np.sqrt(max(0.0, 1 - ((level - 0.6) / 0.24) ** 2))
    if swell > 0.15:
        for side in (-1, 1):
            breast = ellipse(x, y, side * 78, front - 20, 58 * swell, 40 * swell, side * 0.3)
            body = melt(body, breast, 14)
    canvas.paint(body, SKIN)
    canvas.paint(body + 2.2, FAT)
    if swell > 0.15:
        for side in (-1, 1):
            gland = ellipse(x, y, side * 80, front - 24, 30 * swell, 17 * swell, side * 0.4)
            canvas.paint(gland + 7 * np.sin(0.37 * x + 0.1 * z) * np.sin(0.41 * y) + 3, -5, strength=0.7)
    muscle = p.contrast["muscle"]
    canvas.paint(np.maximum(cavity - 15, body + 5), muscle)
    within = canvas.cover(body + 6)
    upper = np.clip((0.52 - level) / 0.15, 0, 1)
    for side in (-1, 1):
        # Pectorals in front, the shoulder blade's muscles and latissimus at the side, the erectors beside the spine.
        if upper:
            canvas.spot(side * 62, front - 14 - 4 * upper, 54, 5 + 8 * upper, FAT, side * 0.24, limit=within)
            canvas.spot(side * 66, front - 13 - 4 * upper, 54, 3 + 8 * upper, muscle, side * 0.26, limit=within)
            blade = max(a - 4, 94)
            canvas.spot(side * blade, 50, 50, 6 + 20 * upper, FAT, -side * 0.8, limit=within)
            canvas.spot(side * blade, 50, 48, 2 + 20 * upper, muscle, -side * 0.8, limit=within)
            high = np.clip((0.3 - level) / 0.15, 0, 1)
            canvas.spot(side * 66, p.measure("spine_y", z) + 36, 58, 9 * high + 1, muscle, -side * 0.22, limit=within)
            canvas.spot(side * 152, 6, 40 * high + 1, 46 * high + 1, muscle, limit=within)
        canvas.spot(side * (a + 15), 12, 5.5, 48, FAT, limit=within)
        canvas.spot(side * (a + 18), 18, 5, 46, muscle, limit=within)
        canvas.spot(side * 24, p.measure("spine_y", z) + 40, 19, 12, muscle, side * 0.25, limit=within)
    return cavity


def draw_lungs(canvas: Canvas, cavity, heart):
    """Paint the inside of the rib cage except heart and vessels, and return the distance to the lungs."""
    p, z, x, y = canvas.patient, canvas.z, canvas.x, canvas.y
    level, spine = z / HEIGHT, p.measure("spine_y", z)
    width = p.measure("mediastinum", z)
    cy, b = p.measure("cavity_y", z), p.measure("cavity_depth", z)
    column = ellipse(x, y, 2, 6, width, 54, power=2.3)
    strip = np.maximum(np.abs(x - 3) - 3.5 - 16 * np.clip((0.24 - level) / 0.1, 0, 1), y - 10)
    column = melt(column, strip, 18)
    column = melt(column, ellipse(x, y, 0, spine + 6, 24, 27), 10)
    column = melt(column, ellipse(x, y, 0, spine + 32, 30, 30), 8)
    if heart is not None:
        column = melt(column, heart - 5, 12)
    organs = {}
    for side, dome in ((-1, p.domes[0]), (1, p.domes[1])):
        rise = 1 - ((1.22 - level) / (1.22 - dome)) ** 2
        if rise > 0:
            r = np.sqrt(rise)
            organs[side] = ellipse(x, y, side * 62, -6, 118 * r, 108 * r)
    canvas.paint(cavity, FAT + 10 * np.sin(x * 0.21 + z * 0.1) * np.sin(y * 0.17))
    lung = np.maximum(cavity + 1.2, -column)
    for organ in organs.values():
        lung = np.maximum(lung, -organ)
    canvas.paint(lung - 1.2, 20)  # pleura
    for side, depth in zip((-1, 1), p.effusion, strict=True):
        fluid = depth * np.clip((level - 0.4) / 0.35, 0, 1)
        if fluid > 2:
            edge = (cy + b - 6 - fluid) + 0.0012 * (x - side * 70) ** 2 - y
            pool = np.maximum(edge, -side * x)
            canvas.paint(np.maximum(pool, lung - 2), FLUID)
            lung = np.maximum(lung, -pool)
    for ox, oy, oz, r in p.opacities:
        scale = np.sqrt(max(0.0, 1 - ((z - oz) / r) ** 2))
        if scale > 0.2:
            ragged = 5 * np.sin(x * 0.14 + oz) * np.sin(y * 0.17 + z * 0.1)
            ragged += 1.5 * np.sin(x * 0.5) * np.sin(y * 0.43 + z)
            solid = ellipse(x, y, ox, oy, r * scale, r * scale * 0.8) + ragged
            canvas.paint(np.maximum(solid, lung - 2), 25)
            lung = np.maximum(lung, -solid)
    air = p.air + 45 * (y / 90) + 14 * np.sin(x * 0.05 + z * 0.04) * np.sin(y * 0.06 + z * 0.03)
    canvas.paint(lung, air)
    if organs:
        draw_belly(canvas, cavity, organs)
    return lung


def draw_belly(canvas: Canvas, cavity, organs: dict):
    """Paint the liver on the right, the stomach and spleen on the left, each under its dome."""
    p, z, x, y = canvas.patient, canvas.z, canvas.x, canvas.y
    within = canvas.cover(cavity + 3)
    liver = p.contrast["liver"]
    if -1 in organs:
        canvas.paint(np.maximum(organs[-1], x - 8), liver, limit=within)
        for k in range(5):
            vein = -95 + 17 * k + 6 * np.sin(k * 9 + z * 0.05), 12 * np.sin(k * 5.1 + z * 0.03)
            canvas.spot(*vein, 4, 2.5, liver + 30, k, limit=within)
    if 1 in organs:
        canvas.paint(np.maximum(organs[1], 8 - x), FAT, limit=within)
        deeper = organs[1] + 5
        spleen = np.maximum(deeper, ellipse(x, y, 105, 38, 44, 36, 0.9))
        canvas.paint(spleen, p.contrast["liver"] + 45 + 18 * np.sin(x * 0.35 + z) * np.sin(y * 0.3), limit=within)
        stomach = np.maximum(deeper, ellipse(x, y, 58, -14, 42, 38))
        canvas.paint(stomach, 45, limit=within)
        canvas.paint(stomach + 4, 15, limit=within)
        canvas.paint(np.maximum(stomach + 4, y + 28), -950, limit=within)


def heart_distance(canvas: Canvas):
    """Return the distance to the heart, or None where the slice misses it."""
    heart = None
    for name, chamber in canvas.patient.chambers.items():
        scale = chamber.at(canvas.z)
        if scale < 0.1:
            continue
        wall = 11 if name == "left ventricle" else 3
        a, b = chamber.long * scale + wall, chamber.short * scale + wall
        outside = ellipse(canvas.x, canvas.y, chamber.x, chamber.y, a, b, chamber.angle)
        heart = outside if heart is None else melt(heart, outside, 10)
    return heart


def draw_heart(canvas: Canvas, heart):
    """Paint pericardium, fat, muscle and the blood in the four chambers."""
    p = canvas.patient
    canvas.paint(heart - 5, 30)
    canvas.paint(heart - 4, FAT + 10)
    canvas.paint(heart, MYOCARDIUM)
    right = {"right ventricle": p.contrast["artery"], "right atrium": 1.08 * p.contrast["artery"]}
    for name, chamber in p.chambers.items():
        scale = chamber.at(canvas.z)
        if scale >= 0.1:
            blood = right.get(name, p.contrast["left"])
            canvas.spot(chamber.x, chamber.y, chamber.long * scale, chamber.short * scale, blood, chamber.angle)
            if name == "left ventricle" and scale > 0.5:  # papillary muscles
                c, s = np.cos(chamber.angle), np.sin(chamber.angle)
                for along, across in ((8, 0.55), (12, -0.5)):
                    off = across * chamber.short * scale
                    x, y = chamber.x + c * along - s * off, chamber.y + s * along + c * off
                    canvas.spot(x, y, 4.5, 3, MYOCARDIUM, chamber.angle)
    left = p.chambers["left atrium"]
    if p.findings.defect_not_pe and left.at(canvas.z) > 0.3:
        canvas.spot(left.x + 17, left.y - 3, 10 * left.at(canvas.z), 8 * left.at(canvas.z), 60)


def draw_vessels(canvas: Canvas, inside):
    """Paint airways, the vessels of the lung and the great vessels, the arteries of the lung last."""
    p, blood = canvas.patient, canvas.patient.contrast
    tubes = p.vessels
    spine = p.measure("spine_y", canvas.z)
    canvas.tubes(tubes["lung veins"], blood["left"], limit=inside)
    canvas.tubes(tubes["lung arteries"], blood["artery"], limit=inside)
    canvas.spot(5, spine - 26, 8, 5.5, 45)  # oesophagus
    canvas.spot(6, spine - 26, 2.5, 1.2, -500)
    canvas.tubes(tubes["azygos"], blood["left"] * 0.7)
    airways = [tubes[name] for name in tubes if "trachea" in name or "bronchus" in name]
    for airway in airways:
        canvas.tubes(airway, 30, grow=1.3)
    for airway in airways:
        canvas.tubes(airway, -990)
    for name in ("right brachiocephalic vein", "left brachiocephalic vein", "cava"):
        strength = 0.55 if name.startswith("right") else 1.0  # contrast comes from one arm
        canvas.tubes(tubes[name], blood["cava"] * strength)
    canvas.tubes(tubes["veins"], blood["left"])
    for name in ("brachiocephalic artery", "left carotid", "left subclavian", "aorta"):
        canvas.tubes(tubes[name], 60, grow=1.2)
        canvas.tubes(tubes[name], blood["left"])
    canvas.tubes(tubes["arteries"], 50, grow=1.0)
    canvas.tubes(tubes["arteries"], blood["artery"])
    if p.flow is not None:  # blood without contrast so far: darker, but blurred, and never as dark as a clot
        canvas.tubes(p.flow, 0.62 * blood["artery"], soft=3.0, strength=0.8)


def draw_emboli(canvas: Canvas):
    """Paint clots, and return the mask of what they changed: all False, and nothing painted, if too little of it."""
    before = canvas.hu.copy()
    artery = canvas.patient.contrast["artery"]
    for embolus in (one for one in canvas.patient.emboli if one.at(canvas.z)):
        canvas.tubes(embolus.clot, embolus.hu)
        if embolus.lumen is not None:
            canvas.tubes(embolus.lumen, artery)
        if embolus.calcium is not None:
            canvas.tubes(embolus.calcium, 450)
    mask = np.abs(canvas.hu - before) > 60
    if np.count_nonzero(mask) * canvas.pixel**2 < SMALLEST_CLOT:
        canvas.hu, mask = before, np.zeros_like(mask)
    return mask


def draw_bones(canvas: Canvas, cavity):
    """Paint ribs, breastbone, shoulder blades, collar bones and the spine."""
    p, z, x, y = canvas.patient, canvas.z, canvas.x, canvas.y
    level, spine = z / HEIGHT, p.measure("spine_y", z)
    a, b, cy = p.measure("cavity_width", z), p.measure("cavity_depth", z), p.measure("cavity_y", z)
    # One formula for all ribs: each descends 75 mm from back to front, and they are 25 mm apart.
    from_back = np.arctan2(np.abs(x), (y - cy)) / np.pi
    turns = (z - 75 * from_back) / 25 + p.rib_phase
    gap = (turns - np.round(turns)) * 25
    rib = (np.hypot((cavity - 6.5) / 4.2, gap / 6.8) - 1) * 4.2
    rib = np.maximum(rib, np.maximum(0.12 - from_back, from_back - 0.9) * 300)
    chalky = from_back > 0.78  # cartilage towards the breastbone
    canvas.paint(rib, np.where(chalky, 110, CORTEX))
    canvas.paint(rib + 1.9, np.where(chalky, 90, MARROW))
    if 0.13 < level < 0.86:
        wide = 15 + 14 * np.clip((0.32 - level) / 0.12, 0, 1)
        canvas.bone(0, cy - b - 7, wide, 6.5, power=2.6, shell=1.6, marrow=130)
    if level < 0.17:
        for side in (-1, 1):
            drop = (0.17 - level) / 0.17
            canvas.bone(side * (24 + 70 * drop), cy - b - 8 - 4 * drop, 15 + 8 * drop, 6.5, side * 0.35, shell=2)
    if level < 0.5:
        for side in (-1, 1):
            shrink = np.clip((0.55 - level) / 0.3, 0.25, 1)
            blade = max(a - 2, 96)
            canvas.bone(side * blade, 50, 36 * shrink, 3.2, -side * 0.8, shell=1.4)
            if level < 0.24:
                canvas.bone(side * (blade + 16), 56, 26, 3.4, side * 0.3, shell=1.4)
                canvas.bone(side * (blade + 30), 24, 11, 9, -side * 0.6, shell=2)
            if level < 0.08:
                canvas.bone(side * 156, 0, 21, 20, shell=2.5)
    draw_spine(canvas, spine)


def draw_spine(canvas: Canvas, spine: float):
    """Paint a vertebra, or the disc between two, with its arch, processes and canal."""
    phase = (canvas.z / 23 + canvas.patient.rib_phase) % 1
    disc = phase < 0.2
    if phase < 0.55:
        for side in (-1, 1):
            canvas.bone(side * 27, spine + 24, 15, 5, side * 0.35, shell=1.8)
    canvas.bone(0, spine + 38, 3.4, 17, shell=1.5)
    for side in (-1, 1):
        canvas.bone(side * 11, spine + 27, 13, 4.2, side * 0.6, shell=1.5)
        if not disc:
            canvas.bone(side * 12, spine + 15, 4.5, 8, shell=1.6)
    if disc:
        canvas.spot(0, spine, 18, 14.5, 95, power=2.3)
    else:
        canvas.bone(0, spine, 18, 14.5, power=2.3, shell=1.9, marrow=170)
    canvas.spot(0, spine + 19, 9.5, 7.5, -10)
    canvas.spot(0, spine + 19, 6, 4.8, 35)


def expose(canvas: Canvas, rng: np.random.Generator):
    """Add what a real scanner adds: streaks, blur, motion and grainy noise."""
    p, size, pixel, hu = canvas.patient, canvas.size, canvas.pixel, canvas.hu
    level = canvas.z / HEIGHT
    if 0.1 < level < 0.5:  # dense contrast in the vena cava causes streaks
        x, y = canvas.x + 28, canvas.y + 12
        fan = np.sin(np.arctan2(y, x) * 14 + rng.uniform(0, 6)) + np.sin(np.arctan2(y, x) * 22 + rng.uniform(0, 6))
        hu += fan * (p.contrast["cava"] / 45) * np.exp(-np.hypot(x, y) / 30)
    hu = gaussian_filter(hu, 0.75 / pixel)
    if p.findings.motion:
        step = rng.uniform(3, 7, 2) / pixel * rng.choice([-1, 1], 2)
        hu = 0.5 * hu + 0.5 * np.roll(hu, tuple(np.round(step).astype(int)), (0, 1))
        hu = gaussian_filter(hu, 1.3 / pixel)
    grain = gaussian_filter(rng.standard_normal((size, size), np.float32), 0.8)
    grain = grain / grain.std() + 0.35 * rng.standard_normal((size, size), np.float32)
    shoulder = np.clip((0.2 - level) / 0.2, 0, 1)
    if shoulder:
        lines = gaussian_filter1d(rng.standard_normal((size, size), np.float32), 14, axis=1)
        grain += 1.5 * shoulder * lines / lines.std()
    middle = 0.7 + 0.6 * np.exp(-(canvas.x**2 + canvas.y**2) / 110**2)  # most rays are absorbed in the middle
    return hu + p.noise * middle * grain
