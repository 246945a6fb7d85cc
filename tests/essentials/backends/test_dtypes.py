"""Collectives of every dtype that a TPU has, on CPU processes as on the simulated TPU."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tpukit
from tpukit.essentials.backends.dtypes import as_numbers, from_numbers

WHOLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
NOT_ON_TPUS = (torch.float8_e4m3fn, torch.float8_e5m2)


def expected(dtype):
    """Return the results for the numbers [0, 1] of core 0 and [1, 1] of core 1."""
    mean_dtype = torch.float64 if dtype in WHOLE else dtype
    results = {
        "gather": torch.tensor([0, 1, 1, 1]).to(dtype),
        "broadcast": torch.tensor([0, 1]).to(dtype),
        "sum": torch.tensor([1, 2]).to(dtype),
        "mean": torch.tensor([0.5, 1]).to(mean_dtype),
    }
    if not dtype.is_complex:
        results |= {"min": torch.tensor([0, 1]).to(dtype), "max": torch.tensor([1, 1]).to(dtype)}
    return results


def collectives(core, dtypes):
    found = {}
    for dtype in dtypes:
        (mine,) = core.to_device([torch.tensor([core.rank, 1]).to(dtype)])
        results = {"gather": core.gather(mine), "broadcast": mine.clone()}
        core.backend.broadcast([results["broadcast"]])
        ops = ("sum", "mean") if dtype.is_complex else ("sum", "mean", "min", "max")
        for op in ops:
            results[op] = core.all_reduce(mine, op)
        found[dtype] = {name: core.to_host(result) for name, result in results.items()}
    return found


def test_cpu_processes_have_the_collectives_of_every_dtype():
    dtypes = (*WHOLE, *FRACTIONS, *COMPLEX, *NOT_ON_TPUS)
    run = tpukit.launch(collectives, dtypes, cores=2, backend="cpu", progress="off")
    for found in run.results:
        for dtype in dtypes:
            for name, value in expected(dtype).items():
                assert found[dtype][name].dtype == value.dtype, (dtype, name)
                assert found[dtype][name].tolist() == value.tolist(), (dtype, name)


BACKENDS = ["cpu", pytest.param("xla:simulator", marks=pytest.mark.xla)]
NAN = float("nan")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_minimum_and_the_maximum_are_nan_if_the_number_of_a_core_is(backend, dtype):
    def work(core):
        mine = torch.tensor([[NAN, 1.0, 2.0], [1.0, NAN, 3.0]][core.rank], dtype=dtype)
        (mine,) = core.to_device([mine])
        return core.to_host([core.all_reduce(mine, "min"), core.all_reduce(mine, "max")])

    run = tpukit.launch(work, cores=2, backend=backend, progress="off")
    for least, most in run.results:
        assert least.dtype == most.dtype == dtype
        assert repr(least.tolist()) == "[nan, nan, 2.0]"
        assert repr(most.tolist()) == "[nan, nan, 3.0]"


@pytest.mark.parametrize("backend", BACKENDS)
def test_complex_numbers_have_a_mean_and_no_minimum(backend):
    def work(core):
        (signal,) = core.to_device([torch.tensor([1 + 2j * core.rank, core.rank + 1j])])
        with pytest.raises(ValueError, match="op='min' is not supported for complex numbers"):
            core.all_reduce(signal, "min")
        return core.to_host([core.all_reduce(signal, "mean"), core.gather(signal)])

    for mean, rows in tpukit.launch(work, cores=2, backend=backend, progress="off").results:
        assert mean.tolist() == [1 + 1j, 0.5 + 1j]
        assert rows.tolist() == [1, 1j, 1 + 2j, 1 + 1j]


def test_int16_targets_are_evaluated_on_cpu_processes():
    units = torch.randint(-1000, 1000, (8, 3), generator=torch.Generator().manual_seed(0))
    units = units.short()
    data = TensorDataset(units.float(), units)

    def score(core):
        def loss(outputs, targets):
            return (outputs - targets.float()).abs().mean()

        model = core.model(nn.Identity())
        found = tpukit.evaluate(core, model, loss, core.batches(data, batch_size=2))
        return found.loss, found.targets

    for loss, targets in tpukit.launch(score, cores=2, backend="cpu", progress="off").results:
        assert loss == 0
        assert targets.dtype == torch.int16
        assert torch.equal(targets, units)


@pytest.mark.parametrize(
    ("op", "reduce", "expected"),
    [("sum", torch.sum, 2**64 - 1), ("min", torch.amin, 1), ("max", torch.amax, 2**64 - 2)],
)
def test_unsigned_numbers_beyond_the_signed_ones_keep_their_order(op, reduce, expected):
    numbers = as_numbers(torch.tensor([2**64 - 2, 1], dtype=torch.uint64), op)
    assert from_numbers(reduce(numbers, 0), torch.uint64, op).item() == expected
