"""Count the cycles and bytes of a step of `fit` and of the tutorial's, by the TPU's compiler.

No TPU is needed.

The steps of the walkthrough: 128 images of 128 x 128 per core, ResNet-34 with ten labels, binary
cross-entropy, Adam, gradients averaged over all cores. The tutorial's is in float32 and gets
float32 images; that of `fit` has `bf16=True`, and gets uint8 images that it normalises on the
device. Each is recorded as one core of that TPU would send it to its compiler, and compiled by
libtpu: the tutorial's with torch_xla's own flags, that of `fit` with those of a launch. Counted are

- cycles: the sum of the compiler's estimates over the operations of the step. It gives none for
  collectives and for the backward pass of max-pooling, which are in both steps. It has never been
  compared with a chip by us, and says nothing about launches, waits, the input, and the time in
  which Python records the step.
- temporary bytes: HBM of a core beyond weights, optimiser and batch.

What it leaves out may be more than what it counts: before the chip begins, Python has to record the
step, see `benchmarks/recording.py`.

Weights, their gradients' sum and the optimiser's state are float32 in both. What was tried, for
v5e:2x4 with libtpu 0.0.21.1, and what is cheaper by these counts:

- bfloat16 autocast. XLA fuses BatchNorm and ReLU into the convolutions before and after them,
  forward and backward, and keeps no ReLU's output for the backward pass. Nothing is left there for
  a library to fuse.
- The stem pools before it normalises (`tpukit/pe/stem.py`), the same function. Convolution,
  BatchNorm, ReLU, pooling and one residual block: 3.80 M cycles and 138 MB before, 2.59 M and 88 MB
  after, with the next line's. The whole step has 15.10 M cycles without it.
- Images normalised as one array and not channel by channel: 0.13 M cycles before, 0.08 M after.
- 22 MiB of the fast memory (VMEM) for one operation, not 16 (xla_tpu_scoped_vmem_limit_kib, set by
  `tpukit/essentials/backends/xla.py`): the whole step 14.47 M cycles before, 13.99 M after. With 16
  the compiler finds that some fusions do not fit, and makes them again in small pieces: 455
  thousand cycles for one, not 253. With 17 MiB the step has 14.34 M, with 18 14.10, with 19 and 20
  14.08, with 21 14.02. The tutorial's has 15.96 M with 20 MiB and 16.29 with 22, for 16.10.
  LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=17408 before the command counts both with 17.
- Adam as one computation for each parameter (`tpukit/accelerators/adam.py`), made so for the host:
  13.85 M cycles for 13.99 with PyTorch's seven operations. One computation for all parameters has
  14.11 M: the compiler copies what it returns.

What is not in `fit`:

- BatchNorm as x * scale + shift with both computed once a channel: the same stem and block 3.90 M
  cycles for 3.80 M, and 173 MB for 138. XLA had fused its own better, and its cost is not the
  arithmetic.
- A stem by space-to-depth: the compiler does that itself.
- Donating buffers: torch_xla does it for weights and optimiser, all but 3 of their 139 MB in a
  ResNet-18.
- One all-reduce: it is one already, of all gradients, buffers and the loss. In bfloat16 it would be
  half as large; the compiler has no estimate of it, and gradients would be added up in bfloat16.
- bfloat16 weights kept in addition to the float32 ones: 14.67 M cycles for 14.47 M. The casts at
  the beginning of a step are gone, and the optimiser writes more. Temporaries fall from 494 to 419
  MB, arguments rise by 43.
- Still more of the fast memory for one operation: with 24 MiB a ResNet-10 has 4.38 M for 4.27 M
  with 20, with 64 the stem and one block 2.82 M for 2.59 M. The compiler has less left for what it
  fetches ahead.
- Weights' gradients of convolutions in float32 at once, not bfloat16 made float32: it saves the
  copies of gradients into the weights' layout, 0.19 M of 14.08 M, 0.12 ms. But a function of one's
  own for it costs the host 3.4 ms a step.
- The weights in the gradients' layout (torch_xla's XLA_LAYOUTS): as much saved, and nothing lost;
  but whether a real TPU's buffers then have that layout too is unknown, and if not no program would
  run.
- Two pixels of 64 channels as one of 128, for layers that half fill the multipliers: convolutions
  of a block alone 1.64 M for 1.76 M, but the changes of shape keep BatchNorm out of them: 3.16 M
  for 2.59 M in all.
- Gradients between blocks kept in bfloat16 by a barrier: 6.23 M for 5.11 M in three blocks.
- Each core keeps and updates an eighth of the weights and of Adam's state (ZeRO), gathered in
  bfloat16 at the beginning of a step: 14.92 M. Adam falls by 0.5 M; pads and copies around the
  collectives cost 0.9 M more.
- xla_jf_auto_cross_replica_sharding, which should do that by itself: no change.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # tpukit need not be installed

CHIPS = ("v5e-8", "v6e-8", "v3-8")
# as many steps as it may take until one comes back unchanged
RATE = 1e-4
STEPS = 8
TARGETS = {"cycles_vs_tutorial": 0.87, "bytes_vs_tutorial": 0.55}


@dataclass(frozen=True)
class Case:
    """A case: a torchvision model, images of (3, size, size), `batch` per core and step."""

    network: str = "resnet34"
    size: int = 128
    batch: int = 128
    labels: int = 10


def main() -> None:
    """Compile both steps for every chip; print the table and one line of JSON: `fit` on a v5e-8."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chips",
        default=",".join(CHIPS),
        help="such as v5e-8,v3-8; the first one's go into the JSON",
    )
    parser.add_argument(
        "--libtpu", help="the compiler's version; otherwise that of this machine's torch"
    )
    parser.add_argument("--network", default=Case.network, help="of torchvision")
    parser.add_argument("--size", type=int, default=Case.size)
    parser.add_argument("--batch", type=int, default=Case.batch)
    options = parser.parse_args()
    case = Case(options.network, options.size, options.batch)
    found = {name: measure(name, case, options.libtpu) for name in options.chips.split(",")}
    report(case, found)


def model_of(case: Case):
    """Return the model, from random weights."""
    from torchvision import models

    return getattr(models, case.network)(weights=None, num_classes=case.labels)


def tutorial(core, case: Case) -> None:
    """Train as the tutorial does, in today's calls."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    model = core.model(model_of(case)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    loss_of = torch.nn.BCEWithLogitsLoss()
    for _ in range(STEPS):
        inputs, targets = core.to_device(
            [torch.zeros(case.batch, 3, case.size, case.size), torch.zeros(case.batch, case.labels)]
        )
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()


def with_fit(core, case: Case) -> None:
    """Train with `fit`, as the walkthrough does."""
    import torch
    from torchvision.models.resnet import ResNet

    from tpukit import fit
    from tpukit.pe import normalize
    from tpukit.pe.stem import PoolingFirst

    model = model_of(case)
    if isinstance(model, ResNet):  # as `tpukit.pe.resnet34(pool_first=True)` makes it
        model.__class__ = PoolingFirst
    model = core.model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    batches = core.batches(
        Images(case, case.batch * core.world_size * STEPS), batch_size=case.batch, drop_last=True
    )
    fit(
        core,
        model,
        optimizer,
        torch.nn.BCEWithLogitsLoss(),
        batches,
        preprocess=normalize,
        bf16=True,
    )


class Images:
    """(3, size, size) uint8 images without content, and their labels; only shapes matter."""

    def __init__(self, case: Case, length: int):
        self.case = case
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple:
        import torch

        return torch.zeros(3, self.case.size, self.case.size, dtype=torch.uint8), torch.zeros(
            self.case.labels
        )


def measure(chip_name: str, case: Case, libtpu: str | None) -> dict:
    """Return what the compiler made of each step, by the step's name."""
    from tpukit.preflight.compiler import compile_graph
    from tpukit.preflight.libtpu import fetch_libtpu
    from tpukit.preflight.recording import record
    from tpukit.profiling import find_tpu
    from tpukit.simulator.recording_runtime import libtpu_flags

    fetch_libtpu(libtpu)
    chip = find_tpu(chip_name)
    made = {}
    pytorchs_adam = mock.patch("tpukit.accelerators.shorten_adam")
    for name, step in {"fit": with_fit, "the tutorial": tutorial}.items():
        with contextlib.nullcontext() if name == "fit" else pytorchs_adam:
            recorded = record(step, case, chip=chip, progress="off")
        if not recorded.is_steady or len(recorded.graphs) != 1:
            raise RuntimeError(
                f"a step of {name} is one graph, got {len(recorded.graphs)}, {recorded.is_steady=}"
            )
        flags = recorded.flags if name == "fit" else libtpu_flags(chip.accelerator_type, "")
        made[name] = compile_graph(
            recorded.graphs[0], chip, libtpu=libtpu, flags=flags, label=f"a step of {name}"
        )
    return dict(reversed(made.items()))


def without_estimate(compiled) -> str:
    """Name the operations that compute and have no estimate."""
    wanted = ("all-reduce", "all-reduce-start", "select-and-scatter")
    names = {
        one.opcode.removesuffix("-start")
        for one in compiled.program.operations
        if one.opcode in wanted
    }
    return ", ".join(sorted(names)) or "none"


def report(case: Case, found: dict[str, dict]) -> None:
    """Print a line per chip and step, and last the JSON of the first chip."""
    print(
        f"{case.network}, {case.batch} images of {case.size} x {case.size} per core, Adam; "
        "the compiler's own estimates,"
    )
    print("which have never been compared with a chip\n")
    heads = (
        "M cycles",
        "ms",
        "temporaries MB",
        "of tutorial",
        "compiled in s",
        "without an estimate",
    )
    print(f"{'':24}" + "".join(f"{head:>16}" for head in heads[:-1]) + f"   {heads[-1]}")
    shares = {}
    for chip, made in found.items():
        first = made["the tutorial"]
        for name, one in made.items():
            shares[chip] = one.cycles / first.cycles, one.temporary_bytes / first.temporary_bytes
            cells = (
                f"{one.cycles / 1e6:.2f}",
                f"{1000 * one.cycles / one.chip.clock:.1f}",
                f"{one.temporary_bytes / 1e6:,.0f}",
                f"{shares[chip][0]:.2f}, {shares[chip][1]:.2f}",
                f"{one.seconds:.0f}",
            )
            print(
                f"{chip + ' ' + name:24}"
                + "".join(f"{cell:>16}" for cell in cells)
                + f"   {without_estimate(one)}"
            )
    fit = next(iter(found.values()))["fit"]
    cycles, temporary = next(iter(shares.values()))
    print(f"\nlibtpu {fit.libtpu}; targets on a v5e-8: {TARGETS}")
    numbers = {"cycles": fit.cycles, "temporary_bytes": fit.temporary_bytes}
    numbers |= {"cycles_vs_tutorial": round(cycles, 3), "bytes_vs_tutorial": round(temporary, 3)}
    print(json.dumps(numbers | {"compile_seconds": round(fit.seconds, 1)}))


if __name__ == "__main__":
    main()
