"""An operation in place raises on XLA tensors what it raises on the CPU, and an optimiser's is checked at once."""

import cProfile
import pstats

import pytest
import torch

from tpukit import launch

WRONG = {
    "a sum of losses": lambda ones: torch.zeros(3, device=ones.device).add_(ones),
    "a sum, by its sign": lambda ones: torch.zeros(1, device=ones.device).__iadd__(ones[0]),
    "a number to integers": lambda ones: torch.zeros(3, dtype=torch.int64, device=ones.device).add_(0.5),
    "products": lambda ones: torch.zeros(3, device=ones.device).addcmul_(ones, tensor2=ones),
    "a larger copy": lambda ones: torch.zeros(3, device=ones.device).copy_(ones.cpu()),
}
pytestmark = pytest.mark.xla


def refused(core):
    """Return the names of the operations that raise."""

    def raises(wrong):
        try:
            wrong(torch.ones(2, 3, device=core.device))
        except RuntimeError:
            return True
        return False

    return [name for name, wrong in WRONG.items() if raises(wrong)]


def on_xla(work, *args):
    return launch(work, *args, cores=1, backend="xla:cpu", progress="off").results[0]


def test_what_raises_on_the_cpu_raises_on_xla():
    assert launch(refused, cores=1, backend="cpu", progress="off").results[0] == list(WRONG)
    assert on_xla(refused) == list(WRONG)


def test_views_are_checked_as_ever():
    def work(core):
        with pytest.raises(RuntimeError, match="split"):
            torch.zeros(3, 4, device=core.device).split([1, 5])
        with pytest.raises(RuntimeError, match="split"):
            torch.zeros(3, 4, device=core.device).split(-1)
        return True

    assert on_xla(work)


def test_operations_that_are_right_are_as_they_were():
    def work(core):
        x = torch.zeros(2, 3, device=core.device)
        x += 1
        x.add_(torch.ones(3, device=core.device)).mul_(torch.tensor(2.0, dtype=torch.float64))
        x[0] = 7
        x[x > 6] += 1
        x.index_add_(0, torch.tensor([1], device=core.device), torch.ones(1, 3, device=core.device))
        x.masked_fill_(x == 5, 6.0).t_().squeeze_()
        counts = torch.zeros(3, dtype=torch.int64, device=core.device)
        counts.add_(2).bitwise_or_(counts)
        return x.cpu().tolist(), counts.cpu().tolist()

    assert on_xla(work) == launch(work, cores=1, backend="cpu", progress="off").results[0]
    assert on_xla(work) == ([[8.0, 6.0]] * 3, [2, 2, 2])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_step_of_an_optimiser_asks_python_for_no_shapes(name):
    def work(core):
        weights = [torch.zeros(3, device=core.device, requires_grad=True) for _ in range(5)]
        optimizer = getattr(torch.optim, name)(weights, lr=0.1, weight_decay=0.1)
        for weight in weights:
            weight.grad = torch.ones(3, device=core.device)
        optimizer.step()
        profile = cProfile.Profile()
        profile.runcall(optimizer.step)
        return sorted({file for file, *_ in pstats.Stats(profile).stats if "_refs" in file or "_meta" in file})

    assert on_xla(work) == []
