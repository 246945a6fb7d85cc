"""Measure the sections of a U-Net's step, and the time that `fit` adds to a loop by hand.

A U-Net on a ResNet-34, with two decoders and 31 million parameters, trains on noise, 96 x 96, with
Adam. The time of a step does not depend on the contents of the images.

- By section: load, forward, backward and step of the loop by hand, each until the device is done
  with it (`tpukit.profiling.Stopwatch`), and the same loop without a stopwatch. The sum is larger:
  a wait after every section keeps the device from working ahead, and on XLA makes several graphs of
  one.
- `fit` and the loop by hand take turns in one process, on the same batches, in another order in
  every round, because the load on a machine changes. The figure is the median of the ratios within
  a round. The loss of both records when it is called: a step lasts from one call to the next, with
  everything in between.
"""

import argparse
import contextlib
import importlib.metadata
import io
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable

RATE = 3e-4
STEPS = 4  # in a turn; the first interval is left out


def main() -> None:
    """Measure, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="of both contestants; 12")
    parser.add_argument("--batch", type=int, default=8, help="images per core and step; 8")
    parser.add_argument("--size", type=int, default=96, help="pixels, a multiple of 32; 96")
    parser.add_argument("--backend", help="as for tpukit.launch; None for the best there is")
    options = parser.parse_args()
    from tpukit.essentials.environment.resources import cpus
    from tpukit.essentials.launcher.launcher import launch

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision")
    )
    print(f"{versions}; {cpus()} processors", flush=True)
    with contextlib.redirect_stdout(io.StringIO()):  # without the lines of every epoch
        run = launch(measure, options, cores=1, backend=options.backend, progress="off")
    print(
        f"one {run.device}, batches of {options.batch}, {options.size} x {options.size} pixels, "
        f"{run.seconds:.0f} s"
    )
    report(run.results[0], options.batch)


def measure(core, options) -> dict:
    """Return the seconds of every section, and of a step of both contestants in every round."""
    import torch

    from tpukit.profiling.stopwatch import Stopwatch

    torch.manual_seed(0)
    network = make_network()

    def contestant(make: Callable) -> tuple[Callable, "Clock"]:
        model = core.model(network)
        clock = Clock()
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        images = Noise(options.batch * STEPS * (options.rounds + 2), options.size)
        batches = core.batches(images, batch_size=options.batch, shuffle=True, drop_last=True)
        return make(core, model, optimizer, clock, batches), clock

    contestants = {"fit": contestant(with_fit), "hand_written": contestant(by_hand)}
    rounds = []
    for number in range(options.rounds + 1):
        order = random.Random(number).sample(list(contestants), len(contestants))
        rounds.append({name: a_turn(core, *contestants[name]) for name in order})
    watch = Stopwatch(core)
    sections, _ = contestant(lambda *parts: by_hand(*parts, watch=watch))
    for _ in range(4):
        sections()
    return {"rounds": rounds[1:], "sections": watch.medians(skip=3)}  # the first ones compile


class Noise:
    """A dataset of `(image, target)`: (3, size, size) and (1, size, size) uint8."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple:
        import torch

        generator = torch.Generator().manual_seed(index)
        shape = (4, self.size, self.size)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return pixels[:3], pixels[3:]


def make_network():
    """Return a U-Net: a ResNet-34 with two decoders that add its features to their own."""
    import torch
    import torchvision
    from torch import nn

    widths = (512, 256, 128, 64, 64)  # of the ResNet's stages, the last first

    def convolution(inputs: int, outputs: int) -> nn.Module:
        layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def twice_as_large(x: torch.Tensor) -> torch.Tensor:
        # interpolate is a custom call in torch_xla, which the simulator does not have.
        count, channels, height, width = x.shape
        copies = x[:, :, :, None, :, None].expand(count, channels, height, 2, width, 2)
        return copies.reshape(count, channels, 2 * height, 2 * width)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = convolution(widths[0], widths[0])
            pairs = list(itertools.pairwise(widths))
            self.narrow = nn.ModuleList(convolution(*pair) for pair in pairs)
            self.mix = nn.ModuleList(convolution(width, width) for width in widths[1:])
            self.last = nn.Sequential(convolution(widths[-1], 16), nn.Conv2d(16, 1, 1))

        def forward(self, features: list) -> torch.Tensor:
            x = self.first(features[-1])
            for number, (narrow, mix) in enumerate(zip(self.narrow, self.mix, strict=True)):
                x = mix(twice_as_large(narrow(x)) + features[-2 - number])
            return self.last(twice_as_large(x))

    class ResNetUNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = torchvision.models.resnet34(weights=None)
            first = nn.Sequential(net.conv1, net.bn1, net.relu)
            second = nn.Sequential(net.maxpool, net.layer1)
            self.stages = nn.ModuleList([first, second, net.layer2, net.layer3, net.layer4])
            self.decoders = nn.ModuleList([Decoder(), Decoder()])

        def forward(self, images: torch.Tensor) -> list:
            x = images / 127.5 - 1
            features = []
            for stage in self.stages:
                x = stage(x)
                features.append(x)
            return [decoder(features) for decoder in self.decoders]

    return ResNetUNet()


class Clock:
    """The loss of both contestants, which records when it is called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, outputs, targets):
        """Return the sum of the losses of both decoders."""
        from torch.nn import functional

        self.times.append(time.perf_counter())
        mask, depth = outputs
        mask_loss = functional.binary_cross_entropy_with_logits(mask, (targets > 127).float())
        return mask_loss + functional.l1_loss(depth.sigmoid(), targets.float() / 255)


def with_fit(core, model, optimizer, loss, batches) -> Callable[[], object]:
    """Call `fit` for every turn, with one model and one optimiser."""
    from tpukit.training import FitOptions, fit

    options = {"steps_per_epoch": STEPS, "options": FitOptions(log_every=STEPS)}
    return lambda: fit(core, model, optimizer, loss, batches, **options)


def by_hand(core, model, optimizer, loss, batches, *, watch=None) -> Callable[[], object]:
    """Train in the loop of somebody who knows the device; the losses are read once a turn."""
    import torch

    section = watch.section if watch else lambda name: contextlib.nullcontext()

    def endless():
        while True:
            yield from batches

    stream = watch.each("load", endless()) if watch else endless()

    def turn() -> None:
        losses = []
        for inputs, targets in itertools.islice(stream, STEPS):
            with section("forward"):
                value = loss(model(inputs), targets)
            with section("backward"):
                value.backward()
            with section("step"):
                optimizer.step()
                optimizer.zero_grad()
                losses.append(value.detach())
                core.backend.sync()
        core.to_host(torch.stack(losses).mean())

    return turn


def a_turn(core, turn: Callable, clock: Clock) -> float:
    """Return the seconds per step of a turn, without the first, which begins with idle queues."""
    clock.times.clear()
    turn()
    core.backend.wait()
    return (clock.times[-1] - clock.times[1]) / (len(clock.times) - 2)


def report(found: dict, batch: int) -> None:
    """Print the sections, both contestants and the ratio, and last the JSON."""
    sections = found["sections"]
    rounds = found["rounds"]
    by_hand = statistics.median(times["hand_written"] for times in rounds)
    whole = statistics.median(times["fit"] for times in rounds)
    ratio = statistics.median(times["fit"] / times["hand_written"] for times in rounds)
    print(f"\n{'section, by hand':34}{'ms':>10}{'of the sum':>12}")
    total = sum(sections.values())
    for name, seconds in sections.items():
        print(f"{name:34}{1000 * seconds:10,.1f}{seconds / total:12.0%}")
    print(f"{'the sum, with a wait after each':34}{1000 * total:10,.1f}")
    print(f"\n{'a step, without the stopwatch':34}{'ms':>10}{'images/s':>12}")
    for name, seconds in (("by hand", by_hand), ("tpukit.fit", whole)):
        print(f"{name:34}{1000 * seconds:10,.1f}{batch / seconds:12,.1f}")
    ratios = sorted(times["fit"] / times["hand_written"] for times in rounds)
    print(
        f"\nfit over the loop by hand, median of {len(rounds)} rounds: {ratio:.3f} "
        f"[{ratios[0]:.3f}..{ratios[-1]:.3f}]"
    )
    print(
        json.dumps(
            {"images_per_second": round(batch / whole, 1), "vs_hand_written": round(ratio, 3)}
        )
    )


if __name__ == "__main__":
    main()
