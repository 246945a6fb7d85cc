"""Draw the README's picture, docs/gallery.png: a slice of a phantom with a network's predictions.

    python docs/gallery.py [--studies 120] [--epochs 6]

The script trains a ResNet-18 for some minutes on phantoms. It holds out a fifth of the exams, and
draws a held-out slice with the probabilities of the ten labels. The last line is JSON with the
quality of the network on all held-out exams. The checkpoints are in runs/gallery; the same call
again only draws.
"""

import argparse
import functools
import io
import json
from pathlib import Path

import numpy
import torch
import torchvision
from PIL import Image
from sklearn.metrics import roc_auc_score

import tpukit
from tpukit import pe
from tpukit.essentials.display import figure_style as look

ROOT = Path(__file__).parents[1]
SIZE = 128  # pixels that the network sees; the picture shows all 256
WIDTH = 8.0  # inches, 150 dots each
HEIGHT = 3.7


def main() -> None:
    """Train, unless a finished run exists, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=120)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    folder = ROOT / "runs" / "gallery"
    size = f"{options.studies}-{options.slices}"
    data = pe.phantom(folder / f"phantoms-{size}", studies=options.studies, slices=options.slices)
    labels = pe.assign_folds(pe.index_images(pe.read_labels(data), data / "train-jpegs"), 5)
    apart = labels[labels.fold == 0]
    checkpoints = folder / f"{size}-{options.epochs}"
    run = tpukit.launch(functools.partial(train, folder=checkpoints, epochs=options.epochs), labels)
    outputs, loss = run.results[0]
    chances = outputs.sigmoid().numpy()
    truth = apart[list(pe.LABELS)].to_numpy()
    chosen = choose(chances, truth)
    image, _ = pe.PEImages(apart, None)[chosen]
    save(draw(image[1].numpy(), truth[chosen] == 1, chances[chosen]), ROOT / "docs" / "gallery.png")
    auroc = roc_auc_score(truth[:, 0], chances[:, 0])
    print(
        json.dumps(
            {
                "exams_apart": apart.StudyInstanceUID.nunique(),
                "loss": round(loss, 4),
                "auroc": round(auroc, 3),
            }
        )
    )


def train(core, labels, folder, epochs):
    """Train on four fifths; return the logits of the last fifth in row order, and their loss."""
    model = core.model(torchvision.models.resnet18(num_classes=len(pe.LABELS)))
    criterion = torch.nn.BCEWithLogitsLoss()
    batches = core.batches(
        pe.PEImages(labels[labels.fold != 0], SIZE), batch_size=32 // core.world_size, shuffle=True
    )
    valid = core.batches(pe.PEImages(labels[labels.fold == 0], SIZE), batch_size=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = tpukit.training.schedules.cosine(optimizer, epochs * len(batches))
    tpukit.fit(
        core,
        model,
        optimizer,
        criterion,
        batches,
        valid,
        epochs=epochs,
        scheduler=schedule,
        augment=pe.augment(),
        preprocess=pe.normalize,
        checkpoints=folder,
    )
    model.load_state_dict(torch.load(Path(folder) / "best.pt", weights_only=True))
    evaluated = tpukit.evaluate(core, model, criterion, valid, preprocess=pe.normalize)
    return evaluated.outputs, evaluated.loss


def choose(chances, truth) -> int:
    """Return the slice with an embolus and the best predictions: the picture shows a hit."""
    wrong = numpy.abs(chances - truth).mean(axis=1)
    return int(numpy.where(truth[:, 0] == 1, wrong, numpy.inf).argmin())


def draw(pixels, truth, chances):
    """Draw the slice in the embolism window, and a bar per label."""
    with look.style():
        figure = look.new_figure(WIDTH, HEIGHT)
        side = HEIGHT - 2 * look.MARGIN
        picture = look.axes_at(figure, look.MARGIN, look.MARGIN, side, side)
        picture.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="lanczos")
        picture.set_axis_off()
        axes = look.axes_at(
            figure, side + 2.2, look.MARGIN + 0.35, WIDTH - side - 2.85, side - 0.62
        )
        places = range(len(chances))
        axes.barh(places, 1, height=0.6, color=look.GRID, linewidth=0)
        fill = [look.COLORS[0] if true else look.PAPER for true in truth]
        axes.barh(places, chances, height=0.6, color=fill, edgecolor=look.COLORS[0], linewidth=1)
        axes.set(xlim=(0, 1), ylim=(len(places) - 0.5, -0.5), xticks=[])
        axes.set_yticks(places, pe.WORDS.values())
        axes.tick_params(length=0, pad=5, labelsize=9)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        for place, label, chance, true in zip(
            places, axes.get_yticklabels(), chances, truth, strict=True
        ):
            label.set(
                color=look.INK if true else look.MUTED, fontweight="bold" if true else "normal"
            )
            axes.text(
                1.04, place, f"{chance:.2f}", va="center", fontsize=9, color=label.get_color()
            )
        left = (side + 2 * look.MARGIN) / WIDTH
        title = "What the network says of this slice"
        figure.text(left, 1 - 0.3 / HEIGHT, title, fontsize=10, fontweight="bold", color=look.INK)
        legend = "filled, bold: true of this phantom    hollow: not true"
        figure.text(left, 0.22 / HEIGHT, legend, fontsize=8, color=look.MUTED)
    return figure


def save(figure, file: Path) -> None:
    """Save the figure in 256 colours: enough for grey and two blues, a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=look.PAPER)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    print(
        f"{file.relative_to(ROOT)}: {image.width} x {image.height}, "
        f"{file.stat().st_size / 1024:.0f} KB"
    )


if __name__ == "__main__":
    main()
