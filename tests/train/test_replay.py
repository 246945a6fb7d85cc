"""A step that `Programs` runs again computes what a recorded one does, to the last bit; what cannot be is said."""

import functools
import gc
import random
import re

import pytest
import torch
from replay_workers import STEPS, Trained, assert_same, both, net
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from workers import Pairs

from tpukit import Augment, Buckets, launch
from tpukit.train import LARS, schedules
from tpukit.train.replay import Replay

pytestmark = pytest.mark.xla
REPLAYED = r"the step is replayed from step 4 on: \d+\.\d ms of the host instead of \d+\.\d"


@functools.cache
def launched(which, steps, cores=1, backend="xla:cpu"):
    return launch(both, which(), steps, cores=cores, backend=backend, progress="off", seed=5).results


# ---- right -----------------------------------------------------------------------------------------------------


def scheduled(core, make=schedules.cosine, options=None, **settings):
    one = Trained(core, **settings)
    one.options = {"schedule": make(one.optimizer, 300), **(options or {})}
    return one


def averaged(core, how, **settings):
    one = scheduled(core, **settings)
    one.options["average"] = AveragedModel(one.model, **how)
    return one


def augmented(core):
    one = Trained(core, net(dropout=0.4))
    one.data, augment = Photos(), Augment()
    one.options = {"augment": augment, "prepare": lambda images: images.float() / 255}
    return one


class Photos(Pairs):
    def __getitem__(self, index):
        return (self.images[index] * 40 + 128).clamp(0, 255).to(torch.uint8), self.targets[index]


class Packed(Photos):
    """The same as a source of whole batches, as records and caches are: the channels come last."""

    shape = (8, 8, 3)

    @property
    def labels(self):
        return self.targets.numpy()

    def take(self, indices, out=None):
        images = torch.stack([self[int(index)][0] for index in indices]).permute(0, 2, 3, 1).numpy()
        if out is None:
            return images.copy()
        out[:] = images
        return out


def packed(core):
    one = augmented(core)
    one.data = Packed()
    return one


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, words, attention_mask):
        return self.head((self.embed(words) * attention_mask[..., None]).mean(1))


class Sentences:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"words": torch.full((3 + index % 9,), index % 8), "labels": torch.tensor(index % 2)}


def in_buckets(core):
    one = Trained(core, Words())
    one.loss, one.data, one.options = nn.CrossEntropyLoss(), Sentences(), {"log_every": 50, "steps_per_epoch": 12}
    one.batches["buckets"] = Buckets((6, 12), pad={"words": 0})
    return one


def right():
    sgd, adamw = {"optimizer": torch.optim.SGD, "momentum": 0.9}, {"optimizer": torch.optim.AdamW}
    return {
        "Adam, a rate for each step, clip": lambda core: scheduled(core, options={"clip": 0.5}),
        "AdamW, bf16, two batches a step": lambda core: scheduled(
            core, **adamw, options={"bf16": True, "accumulate": 2}
        ),
        "SGD whose momentum changes, too": lambda core: scheduled(
            core,
            lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps),
            **sgd,
            weight_decay=1e-3,
        ),
        "LARS, a moving average": lambda core: averaged(
            core, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, optimizer=LARS, lr=1.0
        ),
        "a plain average, of a count": lambda core: averaged(core, {}),
        "random images, dropout": augmented,
        "random images of a pack": packed,
        "buckets, a program for each length": in_buckets,
        "a rate that falls after an epoch": lambda core: scheduled(
            core, lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5), lr=0.1, **sgd
        ),
    }


@pytest.mark.parametrize("row", right())
def test_a_replayed_run_equals_the_recorded_one_to_the_last_bit(row):
    replayed, recorded = launched(right, STEPS)[0][row]
    assert_same(replayed, recorded)
    said = [line for line in replayed["lines"] if "replayed" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.fullmatch(REPLAYED.replace("step 4", r"step \d+"), said[0])
    assert not any("recorded" in line for line in replayed["lines"])
    assert not any("replayed" in line for line in recorded["lines"])


# ---- guarded ---------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A network whose forward does something on the host."""

    def __init__(self, act=lambda self, images: 1.0):
        super().__init__()
        self.inner, self.calls, self.kept, self.act = net(norm=False), 0, [], act

    def forward(self, images):
        return self.inner(images) * self.act(self, images)


def counted(self, images):
    self.calls += 1
    return self.calls / 10


def branched(self, images):
    self.calls += 1
    return 2.0 if self.calls > 9 else 0.5


def in_own(act):
    return lambda core: Trained(core, Own(act))


def by_threshold(self, images):
    return gc.get_threshold()[0] - 698.0


def with_threshold(core):
    """A number that only C holds, which an epoch changes."""
    gc.set_threshold(700, 10, 10)
    one = Trained(core, Own(by_threshold))

    def on_epoch(history):
        gc.set_threshold(701, 10, 10)

    one.options = {"on_epoch": on_epoch, "log_every": 4}  # so that of an epoch's six steps 4 and 6 are replayed
    return one


def frozen(core):
    one = Trained(core)
    one.options = {"on_epoch": lambda history: one.model[0].requires_grad_(False) and None}
    return one


def hooked(core):
    one = Trained(core)
    one.model[1].register_forward_hook(lambda layer, given, found: found * 1.5)
    return one


def keeping(core):
    kept = []

    def loss(outputs, targets):
        kept.append(outputs.detach().mean())
        return nn.functional.mse_loss(outputs, targets)

    one = Trained(core)
    one.loss = loss
    return one


class KeepsItself(nn.MSELoss):
    def forward(self, outputs, targets):
        self.last = super().forward(outputs, targets)
        return self.last


def keeping_the_loss(core):
    one = Trained(core)
    one.loss = KeepsItself()
    return looking_at(one, lambda: one.loss.last)


def weights_twice(core):
    """Weights of which a second tensor holds the memory, as `param.data` in a list of one's own."""
    one = Trained(core)
    second = one.model[-1].bias.detach()
    return looking_at(one, lambda: second)


def looking_at(one, look):
    """Have what somebody sees between epochs be a part of what is compared."""
    seen = []
    one.options = {"on_epoch": lambda history: seen.append(look().detach().cpu())}
    run = one.run
    one.run = lambda *how: (found := run(*how)) | {"state": [found["state"], seen]}
    return one


def reading(core):
    one = Trained(core)
    one.loss = lambda outputs, targets: (
        nn.functional.mse_loss(outputs, targets) * (2.0 if outputs.mean().item() > 0 else 0.5)
    )
    return one


def growing(core):
    """A schedule that gives the optimiser another group in the middle of an epoch."""
    one = Trained(core)
    late = one.model[-1]
    one.optimizer = torch.optim.SGD(one.model[0].parameters(), lr=0.01)

    def rate(step):
        if step == 9 and len(one.optimizer.param_groups) == 1:
            one.optimizer.add_param_group({"params": list(late.parameters()), "initial_lr": 0.01})
            one.options["schedule"].lr_lambdas.append(rate)
            one.options["schedule"].base_lrs.append(0.01)
        return 1.0

    one.options = {"schedule": torch.optim.lr_scheduler.LambdaLR(one.optimizer, rate)}
    return one


def guarded():
    step, epoch = "every step is recorded: ", "every step is recorded from step 7 on: "
    return {
        "a number that grows": (in_own(counted), step + "model.calls was 0 and is 1"),
        "a branch on the step": (in_own(branched), step + "model.calls was 0 and is 1"),
        "a layer left out at random": (
            in_own(lambda self, images: 1.0 if random.random() < 0.5 else 2.0),
            step + "it draws random numbers on the host",
        ),
        "a hook": (hooked, step + "BatchNorm2d has a hook"),
        "a tensor that is kept": (keeping, step + "a tensor that it computes is kept"),
        "a loss that keeps itself": (keeping_the_loss, step + "a tensor of it is held a second time"),
        "weights that are held twice": (weights_twice, step + "a tensor of it is held a second time"),
        "a tensor that is looked at": (reading, step + "it reads from the device, or runs a part of its work"),
        "a parameter that is frozen": (
            frozen,
            epoch + r"model.0.\w+ was 'trained, \(.*\)' and is 'not trained, \(.*\)'",
        ),
        "a number that nobody can see": (with_threshold, epoch + "a number of the host was 2 and is 3"),
        "an optimiser with numbers of its own": (
            lambda core: Trained(core, amsgrad=True),
            step + "a number of the host was .* and is .*",
        ),
    }


@pytest.mark.parametrize("row", guarded())
def test_what_cannot_be_replayed_is_recorded_with_the_right_numbers_and_said_once(row):
    replayed, recorded = launched(guarded_rows, 12)[0][row]
    assert_same(replayed, recorded)
    said = [line for line in replayed["lines"] if "every step is recorded" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.match(guarded()[row][1], said[0]), said[0]


def guarded_rows():
    return {name: make for name, (make, _) in guarded().items()}


def test_a_step_says_since_when_it_was_replayed_if_it_may_not_be():
    line = launched(guarded_rows, 12)[0]["a number that nobody can see"][0]["lines"][-1]
    assert line.endswith("; steps 6 to 6 were replayed as step 5 was"), line


def unchecked(core):
    """Train where nothing is looked at again after an epoch; return what came out, and of the recorded run."""
    write_back = Replay.write_back

    def lazy(self, *, and_check=False):
        state = self._state
        write_back(self)
        self._state = state

    Replay.write_back = lazy
    found = with_threshold(core).run(None, 12)
    Replay.write_back = write_back
    return found, with_threshold(core).run(False, 12)


def test_without_the_look_after_each_interval_a_number_would_be_wrong_in_silence():
    replayed, recorded = launch(unchecked, cores=1, backend="xla:cpu", progress="off", seed=5).results[0]
    assert replayed["losses"] != recorded["losses"]
    assert not any("every step is recorded" in line for line in replayed["lines"])


def test_another_group_in_the_optimiser_is_another_program():
    replayed, recorded = launched(lambda: {"growing": growing}, 24)[0]["growing"]
    assert_same(replayed, recorded)


# ---- ended in the middle, and resumed ----------------------------------------------------------------------------


class Ending(Pairs):
    """Samples that end the run with an exception after so many."""

    def __init__(self, after, error=KeyboardInterrupt):
        super().__init__()
        self.after, self.error = after, error

    def __getitem__(self, index):
        self.after -= 1
        if self.after < 0:
            raise self.error
        return super().__getitem__(index)


def ended(core, folder):
    """Return states: of runs that an interrupt ended, replayed and recorded, and of one resumed and one not."""
    left = []
    for replay in (None, False):
        one = scheduled(core)
        one.data, one.options = Ending(4 * 9), one.options | {"log_every": 50}
        with pytest.raises(KeyboardInterrupt):
            one.run(replay)
        own = [dict(state) for state in one.optimizer.state.values()]
        left.append({"losses": [], "state": core.to_host([dict(one.model.state_dict()), own])})
    for steps, error in ((8, ValueError), (7, KeyboardInterrupt)):
        one = scheduled(core)
        one.data = Ending(4 * steps, error)
        one.options |= {"log_every": 2, "save_every": 0, "folder": folder}
        with pytest.raises(error):
            one.run(None, 24)
    ends = []
    for where in ({"folder": folder}, {}):
        one = scheduled(core)
        one.options |= {"log_every": 2, **where}
        ends.append(one.run(None, 24))
    return left, ends


def test_weights_are_right_after_an_interrupt_and_a_resumed_run_equals_the_uninterrupted(tmp_path):
    left, ends = launch(ended, tmp_path / "run", cores=1, backend="xla:cpu", progress="off", seed=5).results[0]
    assert_same(*left)
    assert_same(*ends)
    assert any("replayed" in line for line in ends[0]["lines"])
