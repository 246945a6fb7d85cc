"""Compile a step of a GPT of 1.5 billion weights, too large for one chip, for eight chips.

No TPU is needed.

    python benchmarks/sharded.py [--layers 4] [--width 5120] [--length 1024] [--batch 8]

One step in bfloat16 with Adam, recorded as torch_xla would send it to a v5e-8 and compiled by
libtpu 0.0.21.1: once as an ordinary launch has it, every core with the whole model and `batch` / 8
sequences, and once with `shard="fsdp"`, with the same batch for the run. 4 layers of width 5,120
have as many weights as GPT-2 XL's 48 of 1,600, and are compiled in a tenth of the time.

The ideal that the cycles are compared with is the limit of the arithmetic: the operations that the
compiler counts, at the chip's peak in bfloat16. A step of one chip with an eighth of the batch
would be fairer, but it does not fit. The cycles have no collectives in them; what the chips send
each other in a step is printed as well.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
from torch import nn  # noqa: E402

import tpukit  # noqa: E402

LIBTPU = "0.0.21.1"
WORDS = 50_304  # GPT-2's 50,257, as many more as eight chips and a tile's 128 divide


class Block(nn.Module):
    """Attention, and a network for each place."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.looks = nn.Linear(width, 3 * width)
        self.joins = nn.Linear(width, width)
        self.thinks = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Return (B, L, width) of (B, L, width)."""
        parts = (
            self.looks(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.joins(seen.transpose(1, 2).flatten(2))
        return x + self.thinks(self.norms[1](x))


class GPT(nn.Module):
    """GPT-2's layout; the output layer is the embedding."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 128) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words):
        """Return (B, L, WORDS) logits of (B, L) words."""
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.norm(self.blocks(self.tokens(words) + self.places(places))))


def train(core, sizes, length, batch):
    """Train in a loop by hand: one graph a step."""
    model = core.model(GPT(*sizes, length))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    text = torch.utils.data.TensorDataset(*torch.zeros(2, 40 * batch, length, dtype=torch.int64))
    for words, targets in core.batches(
        text, batch_size=batch if core.chips > 1 else batch // core.world_size
    ):
        with core.step():
            with torch.autocast(core.device.type, dtype=torch.bfloat16):
                logits = model(words)
            nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
            core.optimizer_step(optimizer)


def main() -> int:
    """Print a table and a line of JSON; return 0 if the model fits eight chips and not one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 4), ("width", 5120), ("length", 1024), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with torch.device("meta"):
        count = sum(
            one.numel() for one in GPT(given.width, given.layers, given.length).parameters()
        )
    tpukit.preflight.fetch_libtpu(LIBTPU)
    arguments = ((given.width, given.layers), given.length, given.batch)
    options = {"libtpu": LIBTPU, "timeout": 7200.0}
    one = tpukit.preflight.preflight(train, *arguments, chip="v5e-8", **options)
    eight = one.cut or tpukit.preflight.preflight(
        train, *arguments, chip="v5e-8", shard="fsdp", **options
    )
    print(one, eight, sep="\n\n")
    found = {
        "gpt_params": count,
        "one_chip_gib": round(one.hbm_bytes / 2**30, 2),
        "fits_one": one.fits,
        "eight_chips_gib": round(eight.hbm_bytes / 2**30, 2),
        "fits_eight": eight.fits,
        "cycles_vs_ideal": round(1 / eight.flops_share, 2),
        "ideal": "the flops' limit in bfloat16",
        "sent_gib": round(eight.collective_bytes / 2**30, 2),
    }
    print(json.dumps(found))
    return 0 if eight.fits and not one.fits else 1


if __name__ == "__main__":
    sys.exit(main())
