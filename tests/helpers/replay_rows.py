"""What a step that is run again has to compute like a recorded one, and what it may not be run again for."""

import copy
import gc
import random
import secrets
import time
from pathlib import Path

import numpy
import torch
from helpers.replay_workers import Trained, net
from helpers.workers import Pairs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tpukit import Augment, Buckets
from tpukit.training import LARS, schedules


def scheduled(core, make=schedules.cosine, options=None, **settings):
    one = Trained(core, **settings)
    one.options = {"scheduler": make(one.optimizer, 300), **(options or {})}
    return one


def averaged(core, how, **settings):
    one = scheduled(core, **settings)
    one.options["averaged_model"] = AveragedModel(one.model, **how)
    return one


def augmented(core):
    one = Trained(core, net(dropout=0.4))
    one.data, augment = Photos(64 * core.world_size), Augment()
    one.options = {"augment": augment, "preprocess": lambda images: images.float() / 255}
    return one


class OnHost(nn.Module):
    """An augmentation whose buffers stay on the host: a flag, and numbers whose difference from themselves is NaN."""

    def __init__(self, toggles=False):
        super().__init__()
        self.toggles = toggles
        self.register_buffer("is_on", torch.tensor(True))
        self.register_buffer("limits", torch.tensor([float("-inf"), float("nan")]))

    def forward(self, images, targets):
        self.is_on ^= self.toggles
        return images, targets


def augmented_on_host(core, toggles=False):
    one = Trained(core)
    one.options = {"augment": OnHost(toggles)}
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
    one.data = Packed(64 * core.world_size)
    return one


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, words, attention_mask):
        return self.head((self.embed(words) * attention_mask[..., None]).mean(1))


class Sentences:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"words": torch.full((3 + index % 9,), index % 8), "labels": torch.tensor(index % 2)}


def in_buckets(core):
    one = Trained(core, Words())
    one.loss, one.data = nn.CrossEntropyLoss(), Sentences(64 * core.world_size)
    one.options = {"log_every": 50, "steps_per_epoch": 12}
    one.batches["buckets"] = Buckets((6, 12), pad={"words": 0})
    return one


class Helped(nn.Module):
    """What docs/from_pytorch.md offers in place of Python: drawn there, counted in a buffer, set by `on_epoch_end`."""

    def __init__(self):
        super().__init__()
        self.inner = net(norm=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("weight", torch.ones(()))

    def forward(self, images):
        self.count += 1
        drawn = torch.rand((), device=self.count.device).lt(0.5)
        return self.inner(images) * drawn * self.weight * torch.where(self.count > 9, 2.0, 0.5)


def helped(core):
    one = Trained(core, Helped())
    one.options = {
        "on_epoch_end": lambda history: one.model.weight.fill_(0.5 * len(history.epochs)) and None
    }
    return one


def taught_by_copies(core):
    """The weights as they were, by which the loss keeps the new ones near, as L2-SP and FedProx do."""
    one = Trained(core)
    old = copy.deepcopy(one.model).requires_grad_(False)

    def loss(outputs, targets):
        pairs = zip(one.model.parameters(), old.parameters(), strict=True)
        return nn.functional.mse_loss(outputs, targets) + 0.1 * sum(
            (new - was).square().sum() for new, was in pairs
        )

    one.loss = loss
    return looking_at(one, lambda: old[0].weight)


def copied_after_an_epoch(core):
    one, kept = Trained(core), []

    def note_epoch(history):
        kept.append(copy.deepcopy(one.model))
        core.sync()

    one.options = {"on_epoch_end": note_epoch}
    run = one.run
    one.run = lambda *how: (
        (found := run(*how))
        | {"state": [found["state"], core.to_host([x[0].weight for x in kept])]}
    )
    return one


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, left, right):
        return self.left(left) - self.right(right)


class InAnyOrder(Pairs):
    """Every second batch of four has its entries in another order."""

    def __getitem__(self, index):
        left, right = self.images[index, 0, 0, :4], self.images[index, 0, 1, :4]
        entries = {"left": left, "right": right, "labels": self.targets[index]}
        return entries if index % 8 < 4 else dict(reversed(entries.items()))


def in_any_order(core):
    one = Trained(core, Both())
    one.data = InAnyOrder(64 * core.world_size)
    one.batches = {"batch_size": 4, "drop_last": True}
    return one


def evaluated(core):
    one = Trained(core, net(norm=False))
    one.options = {
        "valid": core.batches(Pairs(16), batch_size=4),
        "metrics": {"error": nn.functional.l1_loss},
    }
    return one


class Reading(Pairs):
    model = None

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image, target + float(self.model[-1].bias.detach().cpu().sum())


def read_by_dataset(core):
    one = Trained(core)
    one.data = Reading(64 * core.world_size)
    one.data.model = one.model
    return one


def decayed(core):
    one = Trained(core, optimizer=torch.optim.AdamW, weight_decay=0.1)

    def rate(step):
        for group in one.optimizer.param_groups:
            group["weight_decay"] = 0.1 + 0.001 * step
        return 1.0

    one.options = {"scheduler": torch.optim.lr_scheduler.LambdaLR(one.optimizer, rate)}
    return one


def right():
    sgd, adamw = {"optimizer": torch.optim.SGD, "momentum": 0.9}, {"optimizer": torch.optim.AdamW}
    return {
        "Adam, a rate for each step, clip": lambda core: scheduled(
            core, options={"max_grad_norm": 0.5}
        ),
        "AdamW, bf16, two batches a step": lambda core: scheduled(
            core, **adamw, options={"bf16": True, "accumulate_grad_batches": 2}
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
        "a moving average, buffers too": lambda core: averaged(
            core, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
        ),
        "random images, dropout": augmented,
        "random images of a pack": packed,
        "a flag, -inf and NaN on the host": augmented_on_host,
        "buckets, a program for each length": in_buckets,
        "on the device what Python did": helped,
        "copies made before": taught_by_copies,
        "keys in another order": in_any_order,
        "a hook on a layer": hooked,
        "metrics and an evaluation": evaluated,
        "weights that the dataset reads": read_by_dataset,
        "a copy made after an epoch": copied_after_an_epoch,
        "weight decay by a schedule": decayed,
        "a rate that falls after an epoch": lambda core: scheduled(
            core,
            lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5),
            lr=0.1,
            **sgd,
        ),
    }


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


def in_own(act):
    return lambda core: Trained(core, Own(act))


def by_threshold(self, images):
    return gc.get_threshold()[0] - 698.0


def with_threshold(core):
    """A number that only C holds, which an epoch changes."""
    gc.set_threshold(700, 10, 10)
    one = Trained(core, Own(by_threshold))

    def note_epoch(history):
        gc.set_threshold(701, 10, 10)

    one.options = {
        "on_epoch_end": note_epoch,
        "log_every": 4,
    }  # so that of an epoch's six steps 4 and 6 are replayed
    return one


def after_an_epoch(change):
    """Return a row in which something of the run is changed after each epoch."""

    def make(core):
        one = Trained(core)
        one.options = {"on_epoch_end": lambda history: change(one) and None}
        return one

    return make


class Phases(Pairs):
    """Samples that change a number of the model before the tenth batch, in the middle of an epoch."""

    model, left = None, 4 * 9

    def __getitem__(self, index):
        self.left -= 1
        self.model.calls = 2.0 if self.left < 0 else 0.5
        return super().__getitem__(index)


def changed_by_the_dataset(core):
    one = Trained(core, Own(lambda self, images: self.calls))
    one.data = Phases(64)
    one.data.model = one.model
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
    one.options = {"on_epoch_end": lambda history: seen.append(look().detach().cpu())}
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
            one.options["scheduler"].lr_lambdas.append(rate)
            one.options["scheduler"].base_lrs.append(0.01)
        return 1.0

    one.options = {"scheduler": torch.optim.lr_scheduler.LambdaLR(one.optimizer, rate)}
    return one


class Lookahead(torch.optim.SGD):
    """Goes half of the way back every five steps."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state.setdefault("slow", weight.detach().clone())
            state["count"] = state.get("count", 0) + 1
            if state["count"] % 5 == 0:
                weight.copy_(state["slow"].lerp_(weight, 0.5))


def with_loss_that_reads(find):
    """Return a row whose loss decides by a number that `find` gets from a run, in every seventh step or so."""

    def make(core):
        one = scheduled(core)
        found = find(one)
        one.loss = lambda outputs, targets: (
            nn.functional.mse_loss(outputs, targets) * (4.0 if found() > 6 else 1.0)
        )
        return one

    return make


def count_of(one):
    weight = one.model[0].weight
    return lambda: int(one.optimizer.state[weight]["step"]) if weight in one.optimizer.state else 0


def kept_count_of(one):
    """The count itself, which the loss has kept from its second step on."""
    kept = []

    def count():
        kept.extend(
            [one.optimizer.state[one.model[0].weight]["step"]]
            if one.optimizer.state and not kept
            else []
        )
        return float(kept[0]) if kept else 0

    return count


class Final(torch.optim.lr_scheduler.LambdaLR):
    """A schedule of a class from which none is derived, so that nobody can notice reads of it."""

    def __init_subclass__(cls):
        raise TypeError("Final is final")


def with_final_schedule(core):
    one = scheduled(core, lambda optimizer, _: Final(optimizer, lambda step: 1.0))
    one.loss = lambda outputs, targets: (
        nn.functional.mse_loss(outputs, targets)
        * (4.0 if one.options["scheduler"].last_epoch > 6 else 1.0)
    )
    return one


def augmented_by(draw):
    """Return a row whose augmentation doubles images if a fresh generator says so: never, so that runs are equal."""

    def make(core):
        one = Trained(core)
        one.options = {
            "augment": lambda images, targets: (images * (2.0 if draw() > 2 else 1.0), targets)
        }
        return one

    return make


def with_hook_of_optimizer(core):
    one = Trained(core)
    one.optimizer.register_step_post_hook(lambda *_: None)
    return one


def with_step_of_ones_own(core):
    one = Trained(core)
    one.optimizer.step = lambda closure=None: torch.optim.Adam.step(one.optimizer)
    return one


def guarded():
    step, epoch = "every step is captured: ", "every step is captured from step 7 on: "
    entropy = step + "the step asks the operating system for random numbers"
    reads = step + "the model or the loss reads the optimizer, a count or the schedule"
    return {
        "a number that grows": (in_own(counted), step + "a number of the host was .* and is .*"),
        "a flag that changes on the host": (
            lambda core: augmented_on_host(core, toggles=True),
            step + "'is_on' changes on the host, and not as a counter of torch.optim does",
        ),
        "a layer left out at random": (
            in_own(lambda self, images: 1.0 if random.random() < 0.5 else 2.0),
            step + "the step draws random numbers on the host",
        ),
        "a tensor that is kept": (
            keeping,
            step + "a tensor that the step computes still exists after the step",
        ),
        "a loss that keeps itself": (
            keeping_the_loss,
            step + "another tensor shares the memory of a tensor of the step",
        ),
        "weights that are held twice": (
            weights_twice,
            step + "another tensor shares the memory of a tensor of the step",
        ),
        "a tensor that is looked at": (
            reading,
            step + "the step reads from the device, or runs a part of its operations early",
        ),
        "a parameter that is frozen": (
            after_an_epoch(lambda one: one.model[0].requires_grad_(False)),
            epoch + "other step counters have grown on the host than before$",
        ),
        "a number that an epoch changes": (
            with_threshold,
            epoch + "a number of the host was 2 and is 3$",
        ),
        "an optimizer with numbers of its own": (
            lambda core: Trained(core, amsgrad=True),
            step + "a number of the host was .* and is .*",
        ),
        "a class of optimizer of one's own": (
            lambda core: Trained(core, optimizer=Lookahead),
            step + "helpers.replay_rows.Lookahead is not one of torch.optim's own optimizers",
        ),
        "a hook of the optimizer": (with_hook_of_optimizer, step + "Adam has a hook"),
        "another step of the optimizer": (
            with_step_of_ones_own,
            step + "the step of Adam is replaced",
        ),
        "an average with a function of its own": (
            lambda core: averaged(
                core, {"avg_fn": lambda old, new, count: old + (new - old) / (count + 1)}
            ),
            step + "the averaged model or its averaging function is not torch's own",
        ),
        "the count of the optimizer": (with_loss_that_reads(count_of), reads),
        "the same, kept elsewhere": (with_loss_that_reads(kept_count_of), reads),
        "the rate, by the schedule": (
            with_loss_that_reads(
                lambda one: lambda: 100 * one.options["scheduler"].get_last_lr()[0]
            ),
            reads,
        ),
        "the count of the schedule": (
            with_loss_that_reads(lambda one: lambda: one.options["scheduler"].last_epoch),
            reads,
        ),
        "a schedule of a class that is final": (
            with_final_schedule,
            step + "reads of Final by the model or the loss cannot be noticed$",
        ),
        "numpy without a seed": (
            augmented_by(lambda: numpy.random.default_rng().random()),
            entropy,
        ),
        "old numpy without a seed": (
            augmented_by(lambda: numpy.random.RandomState().random_sample()),
            entropy,
        ),
        "Python without a seed": (augmented_by(lambda: random.Random().random()), entropy),
        "the system's random numbers": (
            augmented_by(lambda: random.SystemRandom().random()),
            entropy,
        ),
        "secrets": (augmented_by(lambda: secrets.randbelow(2)), entropy),
        "a generator of torch without a seed": (
            augmented_by(lambda: torch.Generator().seed() * 0),
            entropy,
        ),
        "the clock": (
            augmented_by(lambda: time.monotonic() * 0),
            step + "the step asks time.monotonic",
        ),
        "a file": (
            augmented_by(lambda: Path("/no/such/file").exists()),
            step + "the step asks pathlib.*",
        ),
    }


def guarded_rows():
    return {name: make for name, (make, _) in guarded().items()}
