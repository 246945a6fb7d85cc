"""Does the walkthrough's network hold on images from elsewhere? Another field of view, mirrored,
paler, worse files.

    python benchmarks/robustness.py runs/robustness

Notebook 05 trains twice on the same phantoms, as it stands and without its augmentation. Then both
networks see other exams, as they are, and changed in six ways. These are drawn for it: on the
notebook's own validation fold the network without augmentation has chosen the best of four epochs,
the other one of one. A change is made to the file of 256 pixels, as if it had come from elsewhere
so, and the file is then prepared as all others are. What is compared is the AUROC of
`pe_present_on_image`, since no change alters that label: a mirrored slice shows its embolus, on the
other side. The intervals are of resampled exams, for both networks the same; other seeds of the
training are not in them.

A network that has been trained is kept; another folder, or an empty one, trains anew.
"""

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "05_resnet_on_slices.ipynb"
PIXELS = 64  # that the networks see
NETWORKS = {"augmented": {}, "plain": {"plain_epochs": 999}}  # by parameters of the notebook


def main() -> None:
    """Train both networks, predict the changed images, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "to", type=Path, help="a folder to make; networks that were trained there are kept"
    )
    parser.add_argument(
        "--studies",
        type=int,
        default=300,
        help="phantom exams to train on, and others to ask about",
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import tpukit
    from tpukit import pe

    options.to.mkdir(parents=True, exist_ok=True)
    for name, parameters in NETWORKS.items():
        if not (options.to / name / "metrics.json").is_file():
            train(options.to, name, studies=options.studies, image_size=PIXELS, **parameters)
    others = pe.phantom(
        options.to / "others" / str(options.studies), options.studies, slices=6, seed=1
    )
    labels = pe.index_images(pe.read_labels(others), others / "train-jpegs")
    files = [Path(path) for path in labels.path]
    rows = {}
    for change in CHANGES:
        pixels = prepared(files, change)
        said = []
        for name in NETWORKS:
            weights = options.to / name / "checkpoints" / "best.pt"
            said.append(
                tpukit.launch(ask, weights, pixels, progress="off").results[0][:, 0].numpy()
            )
        rows[change] = compare(labels.pe_present_on_image, labels.StudyInstanceUID, *said)
    print(f"\nAUROC of {len(files):,} slices of {options.studies} other exams")
    print(f"{'':24}" + "".join(f"{name:>24}" for name in (*NETWORKS, "the first less the other")))
    for change, row in rows.items():
        print(
            f"{change:24}"
            + "".join(f"{f'{at:.3f} ({low:.3f} to {high:.3f})':>24}" for at, low, high in row)
        )
    print(
        json.dumps(
            {
                change: [[round(value, 3) for value in one] for one in row]
                for change, row in rows.items()
            }
        )
    )


def train(to: Path, name: str, **parameters) -> None:
    """Run notebook 05 with these parameters in a new folder; phantoms and pack are shared."""
    where = {"phantom_path": "phantoms", "records_path": "records", "run_path": name}
    command = [
        sys.executable,
        "-m",
        "papermill",
        NOTEBOOK,
        f"{name}.ipynb",
        "--kernel",
        "python3",
        "--no-progress-bar",
    ]
    for parameter, value in {**where, **parameters}.items():
        command += ["-p", parameter, str(value)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run([*map(str, command)], cwd=to, env=environment, check=True)


def compare(present, exams, first, other, draws: int = 500) -> list[list[float]]:
    """Return the AUROCs of two networks and the difference, with 95 % intervals over exams."""
    import numpy
    from sklearn.metrics import roc_auc_score

    exam = numpy.unique(exams, return_inverse=True)[1]
    random = numpy.random.default_rng(0)
    found = []
    for draw in range(1 + draws):
        count = random.multinomial(exam.max() + 1, numpy.full(exam.max() + 1, 1 / (exam.max() + 1)))
        weights = count[exam] if draw else numpy.ones(len(exam))
        one, two = (roc_auc_score(present, said, sample_weight=weights) for said in (first, other))
        found.append([one, two, one - two])
    low, high = numpy.quantile(found[1:], [0.025, 0.975], axis=0)
    return numpy.transpose([found[0], low, high]).tolist()


def wider(image):
    """Enlarge the field of view by a quarter: the patient is smaller, with air around."""
    from PIL import Image

    size = round(image.width / 1.25)
    around = Image.new("RGB", image.size)
    around.paste(
        image.resize((size, size), Image.Resampling.BILINEAR), ((image.width - size) // 2,) * 2
    )
    return around


def mirrored(image):
    """Exchange left and right."""
    from PIL import ImageOps

    return ImageOps.mirror(image)


def paler(image):
    """Bring every grey level a fifth nearer to the middle."""
    return image.point(lambda level: round(127.5 + 0.8 * (level - 127.5)))


def noisy(image):
    """Add noise with a standard deviation of 20 of 255 grey levels to every pixel and window."""
    import numpy
    from PIL import Image

    pixels = numpy.asarray(image, numpy.float32)
    grain = numpy.random.default_rng(int(pixels.sum())).normal(0, 20, pixels.shape)
    return Image.fromarray((pixels + grain).round().clip(0, 255).astype(numpy.uint8))


def blurred(image):
    """Blur by a Gaussian of 2 of 256 pixels."""
    from PIL import ImageFilter

    return image.filter(ImageFilter.GaussianBlur(2))


# what is done to the pixels, and the quality of the file
CHANGES: dict[str, tuple[Callable | None, int]] = {
    "home": (None, 95),
    "field of view +25 %": (wider, 95),
    "mirrored": (mirrored, 95),
    "contrast -20 %": (paler, 95),
    "noise": (noisy, 95),
    "blur": (blurred, 95),
    "JPEG 30": (lambda image: image, 30),
}


def prepared(files: list[Path], change: str):
    """Return the changed files, (N, 64, 64, 3) uint8, as the walkthrough prepares them."""
    import numpy
    from PIL import Image

    from tpukit.datasets import decode

    alter, quality = CHANGES[change]
    made = []
    for file in files:
        data = file.read_bytes()
        if alter:
            stored = io.BytesIO()
            alter(Image.open(io.BytesIO(data)).convert("RGB")).save(stored, "JPEG", quality=quality)
            data = stored.getvalue()
        made.append(decode(data, PIXELS))
    return numpy.stack(made)


def ask(core, weights: Path, pixels):
    """Return the logits of a network that notebook 05 trained, (N, 10)."""
    import torch
    from torch.utils.data import TensorDataset

    import tpukit
    from tpukit import pe

    model = core.model(pe.resnet34(weights))
    images = TensorDataset(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.zeros(len(pixels)))
    return tpukit.predict(core, model, core.batches(images, batch_size=60), preprocess=pe.normalize)


if __name__ == "__main__":
    main()
