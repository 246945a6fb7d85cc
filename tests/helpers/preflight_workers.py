"""Worker functions for the tests of preflight: steps of every kind, small enough to be compiled in seconds."""

import torch
from torch import nn

import tpukit


class Drawn(torch.utils.data.Dataset):
    """(3, 8, 8) uint8 and ten labels, as many as one likes."""

    def __init__(self, count=100_000):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index % 256, dtype=torch.uint8), torch.full((10,), 0.5)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))


def by_hand(
    core, batch_size=4, change=lambda x: x.float() / 255, after=lambda loss: None, samples=100_000
):
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    for images, labels in core.batches(Drawn(samples), batch_size=batch_size, drop_last=True):
        with core.step():
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(change(images)).float(), labels
            )
            loss.backward()
            core.optimizer_step(optimizer)
            after(loss)


def raises(error, *, at):
    """What `by_hand` may do after a step: raise in step `at`."""
    losses = []

    def after(loss):
        losses.append(loss)
        if len(losses) == at:
            raise error

    return after


def notes_each_step(file):
    """What `by_hand` may do after a step: write a letter into a file that is open."""

    def after(_loss):
        file.write("x")
        file.flush()

    return after


def evaluates_larger_batches(core):
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        for batch, is_training in ((4, True), (4, True), (64, False)):
            inputs, targets = core.to_device([torch.zeros(batch, 192), torch.ones(batch, 10)])
            with core.step():
                loss = nn.functional.mse_loss(model(inputs), targets)
                if is_training:
                    loss.backward()
                    core.optimizer_step(optimizer)


def two_by_turns(core):
    """Train two networks that share nothing, as a GAN's: a step of the one, a step of the other."""
    models = [core.model(nn.Linear(192, width)) for width in (16, 32)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for _ in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            (inputs,) = core.to_device([torch.zeros(4, 192)])
            with core.step():
                model(inputs).square().mean().backward()
                core.optimizer_step(optimizer)


def by_fit(core, folder):
    def metric(outputs, targets):
        raise AssertionError("preflight evaluates nothing")

    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    train = core.batches(
        Drawn(96), batch_size=4, shuffle=True, drop_last=True
    )  # three steps an epoch on eight cores
    valid = core.batches(Drawn(20), batch_size=4)
    loss = nn.BCEWithLogitsLoss()
    tpukit.fit(
        core,
        model,
        optimizer,
        loss,
        train,
        valid,
        epochs=9,
        preprocess=lambda x: x / 255,
        metrics={"auroc": metric},
        monitor="valid_auroc",
        checkpoints=tpukit.Checkpoints(folder, save_every=0.01),
    )
    core.save({"weights": model.state_dict()}, folder / "saved.pt")


def wide(core, batch_size):
    """Take memory in proportion to the batch: 64 KiB a sample and a layer."""
    model = core.model(nn.Sequential(nn.Linear(64, 16384), nn.Tanh(), nn.Linear(16384, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        inputs, targets = core.to_device([torch.zeros(batch_size, 64), torch.ones(batch_size, 10)])
        with core.step():
            nn.functional.mse_loss(model(inputs), targets).backward()
            core.optimizer_step(optimizer)


def largest_of_int64(core):
    """Ask the compiler for what it does not have: the largest int64 of all cores."""
    import torch_xla.core.xla_model as xm

    (numbers,) = core.to_device([torch.arange(8)])
    for _ in range(4):
        with core.step():
            numbers = xm.all_reduce(xm.REDUCE_MAX, numbers)


def fails(core):
    raise KeyError("SOPInstanceUID")


def runs_nothing(core):
    return core.rank


def saves_by_itself(core, file):
    """Write the weights as most trainers do, before any step comes back."""
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        inputs, targets = core.to_device([torch.zeros(4, 192), torch.ones(4, 10)])
        with core.step():
            nn.functional.mse_loss(model(inputs), targets).backward()
            core.optimizer_step(optimizer)
        torch.save(core.to_host(model.state_dict()), file)


def adds_gradients_up(core):
    """Train on four batches a step, after a loop that looks at the inputs, and with a rate of the step's own."""
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    (covariance,) = core.to_device([torch.zeros(192, 192)])
    for _ in range(8):
        (inputs,) = core.to_device([torch.ones(4, 192)])
        with core.step():
            covariance.addmm_(inputs.T, inputs)
    for number, (images, labels) in enumerate(core.batches(Drawn(), batch_size=4), start=1):
        (rate,) = core.to_device([torch.tensor([0.1])])
        with core.step():
            (nn.functional.mse_loss(model(images.float()), labels) * rate / 4).backward()
            if number % 4 == 0:
                core.optimizer_step(optimizer)


def updates_by_hand(core):
    model = core.model(nn.Linear(192, 10))
    for _ in range(12):
        inputs, targets = core.to_device([torch.zeros(4, 192), torch.ones(4, 10)])
        with core.step():
            nn.functional.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def cuts_windows_out(core, places):
    """Cut each batch at a place that Python draws: another graph for each place."""
    model = core.model(nn.Linear(100, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(12):
        (inputs,) = core.to_device([torch.zeros(4, 192)])
        with core.step():
            start = number % places
            model(inputs[:, start : start + 100]).square().mean().backward()
            core.optimizer_step(optimizer)


class Texts(torch.utils.data.Dataset):
    """Texts of 10 and of 60 words, and a label."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.zeros(10 if index % 2 else 60, dtype=torch.int32), torch.zeros(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(8, 1)

    def forward(self, texts):
        return self.out(self.words(texts).mean(1))


def of_two_lengths(core):
    model = core.model(Words())
    optimizer = torch.optim.Adam(model.parameters())
    batches = core.batches(Texts(), batch_size=4, shuffle=True, drop_last=True, buckets=(16, 64))
    tpukit.fit(
        core,
        model,
        optimizer,
        lambda outputs, targets, mask: (outputs - targets).square().mean(),
        batches,
        epochs=2,
    )


def by_fit_of_four_batches(core):
    model = core.model(network())
    batches = core.batches(Drawn(), batch_size=4, shuffle=True, drop_last=True)
    options = {"preprocess": lambda x: x / 255, "epochs": 1, "accumulate_grad_batches": 4}
    tpukit.fit(
        core,
        model,
        torch.optim.Adam(model.parameters()),
        nn.BCEWithLogitsLoss(),
        batches,
        **options,
    )


def by_fit_with_a_weighted_loss(core):
    def loss(outputs, labels):
        total = nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction="sum")
        return total, (labels >= 0).sum()

    model = core.model(network())
    tpukit.fit(
        core,
        model,
        torch.optim.Adam(model.parameters()),
        loss,
        core.batches(Drawn(), batch_size=4, drop_last=True),
        preprocess=lambda images: images.float() / 255,
        accumulate_grad_batches=2,
    )


def denoises(core, falls_back=False):
    """Train on batches of (3, 8, 8), beside other inputs of their shape: noise, or a fallback."""
    model = core.model(nn.Conv2d(3, 3, 3, padding=1))
    optimizer = torch.optim.Adam(model.parameters())
    for images, _ in core.batches(Drawn(), batch_size=4, drop_last=True):
        images = images.float()
        if falls_back:
            there = torch.zeros(4, 8, 8, 2, device=core.device)
            inputs = nn.functional.grid_sample(images, there, align_corners=False)
        else:
            inputs = images + torch.randn(4, 3, 8, 8).to(core.device)
        with core.step():
            nn.functional.mse_loss(model(inputs), images).backward()
            core.optimizer_step(optimizer)
