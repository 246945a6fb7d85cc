"""Draw the four figures of the page "How tpukit works": docs/how_*.png.

python docs/how_it_works.py
"""

from pathlib import Path

from tpukit.essentials.display import figure_style as look

ROOT = Path(__file__).parents[1]
WIDTH = 10.0  # of a figure; all places are in this unit, from the upper left corner
INCHES = 0.8  # of the unit, so that the text is legible at the width of a page
HEIGHT = 0.62  # of a box of two lines
SMALL = 8  # points
TEXT = 9
ON_HOST = look.GRID
ON_DEVICE = "#dde8f5"  # a light form of look.COLORS[0], legible with the page's ink
DIFFERENT = "#f6d9d3"  # a light red, likewise


class Drawing:
    """A figure of boxes and arrows."""

    def __init__(self, height: float, alt: str):
        self.figure = look.new_figure(INCHES * WIDTH, INCHES * height)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()
        self.alt = alt

    def box(self, left, top, width, text, *, height=HEIGHT, color=ON_HOST, mono=False) -> None:
        """Draw a box with a text in its middle."""
        from matplotlib.patches import Rectangle

        frame = {"facecolor": color, "edgecolor": look.RULE, "linewidth": 1}
        self.axes.add_patch(Rectangle((left, top), width, height, **frame))
        font = {"fontsize": SMALL - 0.5, "family": "monospace"} if mono else {"fontsize": TEXT}
        place = (left + width / 2, top + height / 2)
        self.axes.text(*place, text, ha="center", va="center", linespacing=1.35, **font)

    def frame(self, left, top, width, height, title) -> None:
        """Draw a dashed frame with a title in its upper left corner."""
        from matplotlib.patches import Rectangle

        line = {"edgecolor": look.MUTED, "linestyle": (0, (4, 3)), "linewidth": 0.8}
        self.axes.add_patch(Rectangle((left, top), width, height, fill=False, **line))
        self.text(left + 0.1, top + 0.17, title, bold=True)

    def text(self, left, top, text, *, bold=False, middle=False) -> None:
        """Write a line of small text."""
        weight = "bold" if bold else "normal"
        align = "center" if middle else "left"
        self.axes.text(
            left, top, text, ha=align, va="center", fontsize=SMALL, weight=weight, color=look.MUTED
        )

    def arrow(self, begin, end, *, both=False, color=look.MUTED) -> None:
        """Draw an arrow between two points."""
        head = "<|-|>" if both else "-|>"
        style = {"arrowstyle": head, "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", xy=end, xytext=begin, arrowprops=style)

    def save(self, name: str) -> None:
        """Save the figure as docs/NAME.png."""
        look.describe(self.figure, self.alt)
        file = ROOT / "docs" / f"{name}.png"
        self.figure.savefig(file, facecolor=look.PAPER, dpi=look.DPI)
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1024:.0f} KB")


def processes() -> None:
    """Draw the kernel, its forked workers and their chips."""
    drawing = Drawing(4.5, "The kernel forks a worker per core, and only the workers use chips.")
    drawing.frame(0.15, 0.15, 9.7, 2.85, "host")
    drawing.frame(0.15, 3.2, 9.7, 1.15, "TPU")
    drawing.box(0.35, 0.95, 2.2, "kernel of the notebook\nshows progress, errors", height=0.9)
    drawing.text(1.45, 2.05, "never opens a chip", middle=True)
    for number, rank in enumerate(("0", "1", "2", "…", "7")):
        left = 3.65 + 1.24 * number
        drawing.box(left, 1.95, 1.1, f"worker {rank}\ntrain(core)")
        drawing.box(left, 3.5, 1.1, f"core {rank}", color=ON_DEVICE)
        drawing.arrow((left + 0.55, 2.57), (left + 0.55, 3.5), both=True)
        drawing.arrow((left + 0.55, 1.15), (left + 0.55, 1.95))
        if number:
            drawing.arrow((left - 0.14, 3.81), (left, 3.81), both=True, color=look.COLORS[0])
    drawing.axes.plot([2.55, 9.16], [1.15, 1.15], color=look.MUTED, linewidth=1.2)
    drawing.text(2.7, 0.97, "launch forks the workers, with the notebook's variables")
    drawing.axes.plot([3.55, 3.65], [2.3, 2.3], color=look.COLORS[1], linewidth=1.2)
    drawing.axes.plot([3.55, 3.55], [1.6, 2.3], color=look.COLORS[1], linewidth=1.2)
    drawing.arrow((3.55, 1.6), (2.55, 1.6), color=look.COLORS[1])
    drawing.text(2.62, 1.45, "results and logs")
    drawing.text(0.35, 3.75, "The chips average the gradients")
    drawing.text(0.35, 3.95, "over their own links.")
    drawing.save("how_processes")


def data() -> None:
    """Draw the path of a sample from the dataset to the device."""
    drawing = Drawing(2.75, "From the dataset through shares and batches to the device.")
    steps = (
        ("dataset", "pack, cache,\nor any Dataset"),
        ("order", "one shuffle,\nsame on all cores"),
        ("share", "each core takes\nits own part"),
        ("batch", "bytes, one shape,\nread ahead"),
        ("device", "preprocess and\naugment"),
    )
    for number, (title, text) in enumerate(steps):
        left = 0.2 + 1.96 * number
        color = ON_DEVICE if title == "device" else ON_HOST
        drawing.text(left + 0.82, 0.3, title, bold=True, middle=True)
        drawing.box(left, 0.5, 1.64, text, height=0.75, color=color)
        if number:
            drawing.arrow((left - 0.32, 0.875), (left, 0.875))
    drawing.text(0.2, 1.62, "Example: 10 samples, 2 cores, batch_size=2")
    drawing.box(0.2, 1.8, 1.64, "0 1 2 3 4 5 6 7 8 9", height=0.6, mono=True)
    drawing.box(2.16, 1.8, 1.64, "4 6 3 5 8 1 2 7 9 0", height=0.6, mono=True)
    drawing.box(4.12, 1.8, 1.64, "core 0: 4 6 3 5 8 1\ncore 1: 2 7 9 0", height=0.6, mono=True)
    drawing.box(6.08, 1.8, 1.64, "[4 6] [3 5] [8 1]\n[2 7] [9 0] [· ·]", height=0.6, mono=True)
    drawing.text(7.9, 1.95, "· repeats a sample:")
    drawing.text(7.9, 2.13, "evaluate and predict")
    drawing.text(7.9, 2.31, "do not count it")
    for left in (1.84, 3.8, 5.76):
        drawing.arrow((left, 2.1), (left + 0.32, 2.1))
    drawing.save("how_data")


def replay() -> None:
    """Draw a step that is captured and then replayed."""
    drawing = Drawing(3.3, "A step is compiled once; later steps run the program again.")
    drawing.text(0.2, 0.3, "first step", bold=True)
    drawing.box(1.3, 0.2, 1.9, "Python runs the step:\nforward, backward", height=0.7)
    drawing.box(3.75, 0.2, 1.9, "operations become\na graph", height=0.7)
    drawing.box(6.2, 0.2, 1.5, "XLA compiles:\nminutes", height=0.7)
    drawing.box(8.25, 0.2, 1.55, "program runs\non the chip", height=0.7, color=ON_DEVICE)
    drawing.text(0.2, 1.35, "later steps", bold=True)
    drawing.box(1.3, 1.25, 1.9, "Python runs it again:\n14 ms of the host", height=0.7)
    drawing.box(3.75, 1.25, 1.9, "graph is equal:\nnot compiled", height=0.7)
    drawing.box(8.25, 1.25, 1.55, "program runs\non the chip: 9 ms", height=0.7, color=ON_DEVICE)
    drawing.text(0.2, 2.4, "replay=True", bold=True)
    drawing.box(3.75, 2.3, 1.9, "the next batch:\n5.5 ms of the host", height=0.7)
    drawing.box(8.25, 2.3, 1.55, "program runs\non the chip: 9 ms", height=0.7, color=ON_DEVICE)
    for top in (0.55, 1.6):
        drawing.arrow((3.2, top), (3.75, top))
    drawing.arrow((5.65, 0.55), (6.2, 0.55))
    drawing.arrow((7.7, 0.55), (8.25, 0.55))
    for top in (1.6, 2.65):
        drawing.arrow((5.65, top), (8.25, top))
    drawing.text(1.3, 2.65, "no Python of the step")
    drawing.text(5.9, 1.45, "the chip waits for the host")
    drawing.text(5.9, 2.5, "the host is ahead")
    drawing.save("how_replay")


def in_sync() -> None:
    """Draw what is compared between cores."""
    drawing = Drawing(3.45, "The checksums of all cores are compared.")
    parts = (
        ("weights, buffers, layers", "e3b0", "e3b0", "9f27"),
        ("optimizer and scheduler", "a41c", "a41c", "a41c"),
        ("data and their order", "77d2", "77d2", "77d2"),
        ("arguments of fit, seed", "05be", "05be", "05be"),
    )
    drawing.text(0.2, 0.3, "compared", bold=True)
    for number in range(3):
        drawing.text(3.55 + 1.25 * number, 0.3, f"core {number}", bold=True, middle=True)
    for row, (name, *sums) in enumerate(parts):
        top = 0.5 + 0.5 * row
        drawing.text(0.2, top + 0.2, name)
        for number, checksum in enumerate(sums):
            is_other = checksum != sums[0]
            color = DIFFERENT if is_other else ON_DEVICE
            left = 3.0 + 1.25 * number
            drawing.box(left, top, 1.1, checksum, height=0.4, color=color, mono=True)
    drawing.arrow((6.65, 0.7), (7.15, 0.7))
    text = "OutOfSyncError: weights;\ncore 2 differs"
    drawing.box(7.15, 0.4, 2.65, text, color=DIFFERENT)
    drawing.arrow((6.65, 1.7), (7.15, 1.7))
    drawing.box(7.15, 1.4, 2.65, "equal on all cores:\nthe run continues")
    drawing.text(0.2, 2.75, "fit compares", bold=True)
    moments = ("before and after\nthe first step", "after each epoch", "before a checkpoint")
    for number, moment in enumerate(moments):
        drawing.box(1.3 + 2.1 * number, 2.6, 1.95, moment)
    drawing.text(7.65, 2.8, "Each core sends checksums;")
    drawing.text(7.65, 3.0, "all cores compare them.")
    drawing.save("how_in_sync")


def main() -> None:
    """Draw and save the four figures."""
    with look.style():
        processes()
        data()
        replay()
        in_sync()


if __name__ == "__main__":
    main()
