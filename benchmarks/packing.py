"""Measure the cost of the digest that a pack has of every image: pack with it, and without.

Both sides pack the same files in this process, in turn and each first every second time; without,
the one function that makes a digest gives zeros. The processor's time counts, because other
programs on a machine come and go, and the ratio of medians: at most 1.03. The start of the
processes in which `pack` does this otherwise would make it smaller.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

JPEGS = 240
PNGS = 60
SIDES = {"with": {}, "without": {"digest": lambda stored: bytes(8)}}


def main() -> None:
    """Measure, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="of both sides")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = draw(folder / "images")
        pack_once(folder, {})  # what is imported and read for the first time
        took = {side: [] for side in SIDES}
        for number in range(rounds):
            for side in list(SIDES)[:: 1 if number % 2 else -1]:
                took[side].append(pack_once(folder, SIDES[side]))
    medians = {side: statistics.median(times) for side, times in took.items()}
    ratio = medians["with"] / medians["without"]
    print(
        f"{JPEGS} JPEGs and {PNGS} PNGs, {size / 1e6:.0f} MB: seconds of a processor, the median "
        f"of {rounds}"
    )
    for side, times in took.items():
        print(
            f"  {side + ' digests':20}{medians[side]:8.3f}   {min(times):.3f} to {max(times):.3f}"
        )
    print(f"  {'times as long':20}{ratio:8.3f}   target <= 1.03")
    print(
        json.dumps(
            {
                "images": JPEGS + PNGS,
                "with": medians["with"],
                "without": medians["without"],
                "ratio": ratio,
            }
        )
    )


def draw(folder: Path) -> int:
    """Write pictures as smooth as photographs are, of 640 x 480 pixels; return their bytes."""
    import numpy
    from PIL import Image, ImageFilter

    random = numpy.random.default_rng(0)
    for number in range(JPEGS + PNGS):
        noise = Image.fromarray(random.integers(0, 256, (480, 640, 3), numpy.uint8))
        image = Image.blend(
            noise.filter(ImageFilter.GaussianBlur(12)),
            noise.filter(ImageFilter.GaussianBlur(2)),
            0.4,
        )
        file = folder / f"{number % 5}" / f"{number}.{'jpg' if number < JPEGS else 'png'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file, quality=90)
    return sum(file.stat().st_size for file in folder.rglob("*.*"))


def pack_once(folder: Path, without: dict) -> float:
    """Pack all images in this process; return the seconds that it took of a processor."""
    from tpukit.datasets import PackOptions, pack, pack_shards

    def here(task, jobs: list, **_) -> None:
        for job in jobs:
            task(job)

    shutil.rmtree(folder / "pack", ignore_errors=True)
    with (
        mock.patch.multiple(pack_shards, run_in_processes=here, **without),
        mock.patch("builtins.print"),
    ):
        began = time.process_time()
        pack(folder / "images", folder / "pack", options=PackOptions(workers=1), progress="off")
        return time.process_time() - began


if __name__ == "__main__":
    main()
