"""A run over two hosts: two raylets of a real Ray cluster on this machine, one of which is killed."""

import builtins
import importlib.util
import threading
import time

import pytest

from tpukit.cloud.ray_train import MultiHostError, launch_on_hosts
from tpukit.essentials.launcher.launcher import launch

pytestmark = [  # of Ray itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SLICE = {"topology": "2x2x2", "accelerator": "TPU-V4"}  # of two hosts


def test_without_ray_the_message_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *args, **options):
        if name.partition(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(
        ImportError, match=r"pip install 'ray\[train\]>=2.54,<3', here and on every host"
    ):
        launch_on_hosts(print, hosts=2, storage="runs", name="a")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hosts": 1}, "a run over several hosts needs at least two, got hosts=1"),
        ({}, "got hosts=None and no topology"),
        ({"topology": "4x4"}, "there is no TPU slice topology='4x4', accelerator=None"),
        (
            {"hosts": 2, "accelerator": "TPU-V6E"},
            "accelerator='TPU-V6E' is the name of a slice, and topology= is missing",
        ),
        ({"topology": "5x5", "accelerator": "TPU-V6E"}, "there is no TPU slice topology='5x5'"),
        (
            {"topology": "4x4", "accelerator": "TPU-V6E", "hosts": 2},
            "a slice 4x4 of TPU-V6E has 4 hosts",
        ),
    ],
)
def test_what_is_no_slice_is_refused_before_anything_starts(arguments, said, ray):
    with pytest.raises(ValueError, match=said):
        launch_on_hosts(print, storage="runs", name="a", **arguments)


@pytest.fixture(scope="module")
def ray():
    """Skip what needs it where it is not installed, without importing it where it is."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("a run over hosts needs Ray Train: pip install 'ray[train]'")


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def undisturbed(ray):
    """What the same training brings on one host with two cores, before there is a Ray in this process."""
    run = launch(train_resnet, 0.0, cores=2, backend="xla:cpu", progress="off")
    return run.results


@pytest.fixture(scope="module")
def cluster(undisturbed):
    from doubles.ray_double import hosts_here

    with hosts_here(
        topology="2x2x2", accelerator="TPU-V4"
    ) as hosts:  # two hosts that say they have four chips each
        yield hosts


def train_resnet(core, pause):
    """Train the walkthrough's network on small images; a pause an epoch leaves time for a loss."""
    import torch
    from torchvision.models import resnet34

    from tpukit.training import FitOptions, fit

    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            numbers = torch.Generator().manual_seed(index)
            return torch.randn(3, 32, 32, generator=numbers), torch.rand(
                10, generator=numbers
            ).round()

    torch.manual_seed(0)
    model = core.model(resnet34(num_classes=10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = core.batches(Noise(), batch_size=4, shuffle=True, drop_last=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    history = fit(
        core,
        model,
        optimizer,
        loss,
        batches,
        epochs=4,
        checkpoints="checkpoints" if pause else None,
        options=FitOptions(log_every=2, on_epoch_end=lambda history: time.sleep(pause)),
    )
    weights = sum(weight.double().abs().sum() for weight in core.to_host([*model.parameters()]))
    return {
        "losses": [row["train_loss"] for row in history.epochs],
        "weights": float(weights),
        "device": str(core.device),
        "resumed": history.resumed,
        "seen": (core.rank, core.world_size),
    }


def test_a_host_that_is_killed_changes_no_digit_of_the_training(cluster, storage, undisturbed):
    killed = []

    def kill_and_replace():
        noted = (
            storage / "lost" / "checkpoint_manager_snapshot.json"
        )  # by Ray, when a checkpoint is there and whole
        while not (noted.exists() and "checkpoint_2" in noted.read_text()):
            time.sleep(0.1)
        killed.append(cluster.kill())
        cluster.add()

    thread = threading.Thread(target=kill_and_replace, daemon=True)
    thread.start()
    run = launch_on_hosts(
        train_resnet, 4.0, cores=1, backend="xla:cpu", storage=storage, name="lost", **SLICE
    )
    thread.join()
    assert killed[0] >= 4  # a raylet, its two agents, a Ray worker, and the core forked from it
    assert [one["seen"] for one in run.results] == [(0, 2), (1, 2)]
    assert {one["device"] for one in run.results} == {"xla:0"}
    assert all(one["resumed"] for one in run.results), (
        "the host was lost too late, or nothing was reported"
    )
    for one, other in zip(run.results, undisturbed, strict=True):
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]


def test_a_run_of_the_same_name_continues(cluster, storage, undisturbed):
    run = launch_on_hosts(
        train_resnet, 4.0, cores=1, backend="xla:cpu", storage=storage, name="lost", **SLICE
    )
    assert run.results[0]["resumed"]
    assert run.results[0]["weights"] == undisturbed[0]["weights"]


def test_an_error_on_one_host_is_told_with_the_host_and_the_line(cluster, storage):
    def stumble(core):
        core.barrier()
        if core.rank == 1:
            raise KeyError("SOPInstanceUID")
        core.barrier()

    with pytest.raises(
        MultiHostError,
        match=r"(?s)host \d of the run failed.*core 1 of 2 raised KeyError: 'SOPInstance",
    ):
        launch_on_hosts(
            stumble, hosts=2, cores=1, backend="cpu", storage=storage, name="error", failures=0
        )
