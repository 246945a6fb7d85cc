"""Break tpukit on purpose, one mutant at a time, and see the self-test of tools/chip say no to each.

    python tests/mutants/mutation.py [--backend cpu] [--cores 2] [--only WORD]

Every mutant is a copy of tpukit/ and tools/ in which one text has become another. First the self-test has to pass on a
copy without a change. Only its parts that ask whether the answers are right are run. The last line is JSON; the exit
status is 1 where a mutant survives, or tpukit as it is does not pass.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = "launch,collectives,samples,by hand,fit,resume"


@dataclass(frozen=True)
class Mutant:
    """A mistake in tpukit.

    Attributes:
        name: in a few words.
        file: below tpukit/.
        old, new: a text that is in the file exactly once, and what stands there instead.
    """

    name: str
    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the copy of tpukit below a folder."""
        path = root / "tpukit" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {text.count(self.old)} times in {self.file}: {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new))
        compile(
            path.read_text(), str(path), "exec"
        )  # a mutant that is no Python would be caught by anything


RANDOM_NUMBERS = "essentials/launcher/random_numbers.py"
BATCHES, SAMPLER, CORE = (
    "essentials/data/batches.py",
    "essentials/data/sampler.py",
    "essentials/launcher/core.py",
)
GRADIENTS, STEP, TRAINER = (
    "essentials/launcher/gradients.py",
    "training/step.py",
    "training/trainer.py",
)
EVALUATION, PREDICTION, RESUME = (
    "training/evaluation.py",
    "training/prediction.py",
    "training/resume.py",
)
AVERAGE = "self._backend.average([*gradients, flags, *also])"

MUTANTS = [
    # All cores train on the same share; the rest of the data is never seen.
    Mutant(
        "every core has core 0's samples",
        BATCHES,
        "rank=rank,\n",
        "rank=0,\n",
    ),
    # Each image comes with another's label, so a network learns nothing.
    Mutant(
        "labels of the image before",
        BATCHES,
        "return self._feed.arrange(tensors)",
        "images, labels, *others = self._feed.arrange(tensors)\n"
        "        return (images, labels.roll(1, 0), *others)",
    ),
    # Every epoch has the order of the first.
    Mutant(
        "shuffle without the epoch", SAMPLER, "default_rng((seed, epoch))", "default_rng((seed, 0))"
    ),
    # The mask says that samples which only fill the last step are real.
    Mutant(
        "padding counts as samples",
        BATCHES,
        "is_real=positions < self.sampler.count",
        "is_real=positions >= 0",
    ),
    # Some samples are seen twice in the epoch that was cut, others never.
    Mutant(
        "a resumed run starts its epoch over",
        BATCHES,
        'self._done = state["samples"]',
        "self._done = 0",
    ),
    # A step computes with the first half of its samples.
    Mutant(
        "half of every batch",
        STEP,
        "inputs = self.preprocess(inputs)",
        "inputs, targets = self.preprocess(inputs)[::2], targets[::2]",
    ),
    # The seed leaves the rank out: dropout and augmentation are alike, and do a part of their work.
    Mutant(
        "the same dropout on every core",
        RANDOM_NUMBERS,
        "*words, self._core.rank)))",
        "*words, 0)))",
    ),
    # The seed of a step leaves its number out.
    Mutant(
        "the same dropout in every step",
        TRAINER,
        "self.core.seed(*at.seed_words)",
        "self.core.seed(0)",
    ),
    # Each batch that a process makes is augmented by the random numbers of the one before.
    Mutant(
        "processes that read draw alike",
        "essentials/data/prefetch.py",
        "seed_host(seed)\n        elif",
        "seed_host(self.seed)\n        elif",
    ),
    # Those of matrices are the sum over the cores: SGD's steps are too long, and Adam hides it.
    Mutant(
        "gradients added, not averaged",
        GRADIENTS,
        AVERAGE,
        f"{AVERAGE}; [one.mul_(self._backend.world_size) for one in gradients if one.ndim > 1]",
    ),
    # Its gradients of matrices are thrown away, so its share of the data teaches nothing.
    Mutant(
        "the last core does not count",
        GRADIENTS,
        AVERAGE,
        "last = self._backend.rank == self._backend.world_size - 1; "
        f"[one.zero_() for one in gradients if last and one.ndim > 1]; {AVERAGE}",
    ),
    # Nothing is averaged, so every core trains a network of its own.
    Mutant(
        "gradients are each core's own", GRADIENTS, AVERAGE, "self._backend.average([flags, *also])"
    ),
    # Those of several batches are added up where their mean is meant.
    Mutant(
        "gradients scaled by the accumulation",
        STEP,
        "value = value / len(batches)",
        "value = value * 1",
    ),
    # Each core shortens its own gradient, and the mean of these is another, shorter one.
    Mutant(
        "clip before averaging",
        CORE,
        "self.average_gradients(optimizer, average_also=average_also)",
        "clip and torch.nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group['params']], "
        "clip); self.average_gradients(optimizer, average_also=average_also)",
    ),
    # Every weight's gradient is shortened by itself, which turns the direction of the step.
    Mutant(
        "clip of each tensor",
        CORE,
        "torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)",
        "[torch.nn.utils.clip_grad_norm_(one, clip) for one in parameters_of(optimizer)]",
    ),
    # The limit of the gradients is taken and not used.
    Mutant("fit forgets max_grad_norm", STEP, "clip=self.max_grad_norm", "clip=None"),
    # The forward pass stays in float32: right, and half as fast.
    Mutant(
        "bf16 that is not on",
        STEP,
        "    if bf16:\n        context = torch.autocast(",
        "    if bf16 and False:\n        context = torch.autocast(",
    ),
    # A learning rate that is to fall over a run has fallen after an eighth of it, on eight cores.
    Mutant(
        "schedule stepped once a core",
        STEP,
        "self.scheduler.step()",
        "[self.scheduler.step() for _ in range(self.core.world_size)]",
    ),
    # core.model leaves each core's own start weights, so the cores train different networks.
    Mutant(
        "weights not handed out",
        CORE,
        "self.backend.broadcast([*module.parameters(), *module.buffers()])",
        "self.backend.broadcast([one.detach().clone() for one in module.parameters()])",
    ),
    # BatchNorm's running statistics stay those of each core's share.
    Mutant(
        "fit leaves buffers alone",
        STEP,
        "averaged = [reduced, *self._buffers()]",
        "averaged = [reduced]",
    ),
    # After a loop of one's own each core evaluates another network.
    Mutant(
        "average_buffers does nothing",
        CORE,
        'with self.internal.together("average_buffers"):',
        'with self.internal.together("average_buffers"):\n            return',
    ),
    # What fit evaluates and keeps in place of the model was never trained.
    Mutant(
        "the averaged model stays at its start",
        STEP,
        "self._update_average(self.model)",
        "pass",
    ),
    # The history shows the loss of one core's share as if it were of all.
    Mutant(
        "the loss of core 0 alone",
        STEP,
        "return [local, reduced]",
        "return [local, torch.stack([local, reduced[1]])]",
    ),
    # Samples that do not fill a step are not in the validation's loss.
    Mutant(
        "evaluation drops the last batch",
        EVALUATION,
        "value = compute(outputs, targets, *further).mean",
        "full = max(1, len(targets) // batches.samples_per_step) * batches.samples_per_step\n"
        "            value = compute(outputs[:full], targets[:full]).mean",
    ),
    # With keep_outputs=False the samples that only fill the last step weigh in the loss.
    Mutant(
        "evaluation counts padding twice",
        EVALUATION,
        "sums.add(loss(outputs, targets, *further), samples=real)",
        "sums.add(loss(outputs, targets, *further), samples=len(positions))",
    ),
    # The outputs are those of other samples.
    Mutant(
        "predict in another order",
        PREDICTION,
        "outputs, _ = in_dataset_order(steps, batches.sampler)\n    return outputs",
        "outputs, _ = in_dataset_order(steps, batches.sampler)\n    return outputs.flip(0)",
    ),
    # BatchNorm uses each batch's statistics, and dropout is on.
    Mutant("evaluation in the mode of training", PREDICTION, "model.eval()", "model.train()"),
    # The best weights are written once and never again.
    Mutant(
        "best.pt of the first epoch",
        RESUME,
        'self._core.save(model.state_dict(), self._store.folder / "best.pt")',
        'path = self._store.folder / "best.pt"; path.exists() or self._core.save(model.state_dict(), path)',
    ),
    # Every epoch overwrites the best weights.
    Mutant(
        "best.pt of the last epoch",
        TRAINER,
        "if is_best:  # before the checkpoint",
        "if True:  # before the checkpoint",
    ),
    # Losses are compared the wrong way round.
    Mutant(
        "the worst epoch is the best",
        "training/checks.py",
        "return value < best if self.lower else value > best",
        "return value > best if self.lower else value < best",
    ),
    # A run that is resumed late goes on from the weights of its first checkpoint.
    Mutant(
        "checkpoints keep the first weights",
        "training/checkpoints.py",
        '_check_state(state, "state")\n        if step',
        'state = {**state, "model": self.__dict__.setdefault("first", state["model"])}\n        if step',
    ),
    # The newest checkpoint is an epoch older than what was trained.
    Mutant(
        "no checkpoint of the last epoch",
        RESUME,
        "if not self.is_kept:\n            return\n        if self._core.is_main:",
        'if not self.is_kept or self._parts["progress"].epoch > 2:\n            return\n        if self._core.is_main:',
    ),
    # The optimiser begins anew in the middle of a run.
    Mutant(
        "a resumed run forgets the momentum",
        RESUME,
        "if part is None or checkpoint.state.get(name) is None:",
        'if part is None or checkpoint.state.get(name) is None or name == "optimizer":',
    ),
    # With restore_best_weights=True the model is the last epoch's all the same.
    Mutant(
        "the best weights are not given back",
        TRAINER,
        "PlainNames(model).load_state_dict(weights)",
        "pass",
    ),
    # core.mean and core.all_reduce do not divide.
    Mutant(
        "a mean that is a sum",
        CORE,
        "return self.backend.all_reduce(tensor.detach(), op)",
        'return self.backend.all_reduce(tensor.detach(), "sum" if op == "mean" else op)',
    ),
    # A launch hands out its results in the wrong order of ranks.
    Mutant(
        "results of other cores",
        "essentials/launcher/launcher.py",
        "results=[group.results.get(rank) for rank in ranks],",
        "results=[group.results.get(rank) for rank in reversed(ranks)],",
    ),
]


def copy_kit(root: Path) -> None:
    """Copy what the self-test runs below a folder."""
    for name in ("tpukit", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))


def self_test(mutant: Mutant | None, *, backend: str, cores: int, parts: str = PARTS) -> str | None:
    """Run the self-test on a copy of tpukit with this mistake; return what it says no with, None where all passes.

    Raises:
        RuntimeError: it has not come to an end.
    """
    with tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as folder:  # what is ended may still write there
        copy_kit(Path(folder))
        if mutant is not None:
            mutant.apply(Path(folder))
        # A mistake may make cores wait for each other for ever.
        command = [
            sys.executable,
            "-m",
            "tools.chip",
            "--backend",
            backend,
            "--cores",
            str(cores),
            "--parts",
            parts,
        ]
        process = subprocess.Popen(
            [*command, "--seconds", "100"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            part, in_traceback, lines = "", False, []
            for line in process.stdout:
                lines.append(line)
                part = (
                    line.partition(":")[0].removeprefix("---- ")
                    if line.startswith("---- ")
                    else part
                )
                if (
                    in_traceback and line[0] not in " \n"
                ):  # how the part failed: the parts after it add nothing
                    process.terminate()
                    return f"{part}: {line.strip()}"
                in_traceback |= line.startswith("Traceback (most recent call last):")
                if re.match(".*: FAILED: ", line):  # its process has ended
                    return line.strip()
        if process.returncode or "passed" not in "".join(lines[-1:]):
            raise RuntimeError(f"the self-test has not run: {''.join(lines)[-2000:]}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu", help="cpu, xla:cpu or xla:simulator")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default="", help="a word of the names of some")
    given = parser.parse_args()
    chosen = [one for one in MUTANTS if given.only in one.name]
    survived, longest = [], 0.0
    for mutant in (None, *chosen):
        began = time.monotonic()
        failed = self_test(mutant, backend=given.backend, cores=given.cores)
        longest = max(longest, time.monotonic() - began)
        if mutant is None and failed:
            print(f"tpukit as it is does not pass: {failed}")
            return 1
        if mutant is not None and not failed:
            survived.append(mutant.name)
        said = failed or ("SURVIVED" if mutant else "passes")
        print(f"{mutant.name if mutant else 'tpukit as it is':<44}{said[:120]}", flush=True)
    print(f"on {given.backend}; the longest took {longest:.0f} s")
    print(json.dumps({"mutants": len(chosen), "caught": len(chosen) - len(survived)}))
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
