"""A call of launch that cannot work: what is said, and that what `fix:` says works."""

import functools
import re
from pathlib import Path

import pytest
import torch

import tpukit
from tpukit.essentials.display import InvalidTypeError

launch = functools.partial(tpukit.launch, cores=2, backend="cpu", progress="off")


def train(core, config=None):
    return config


def no_core():
    return "trained"


def no_core_but_config(config):
    return config


def rate_by_keyword(core, *, rate):
    return rate


def two_settings(core, config, rate):
    return config, rate


def of_fix(error):
    """Return the line of code with which a fix begins."""
    return re.split(r"(?<=\)): |(?<=\)), (?=[a-z])", error.value.fix)[0]


def test_the_words_of_other_launchers_are_translated():
    with pytest.raises(InvalidTypeError, match="no option 'nprocs'") as error:
        tpukit.launch(train, nprocs=8)
    assert "partial" not in error.value.fix
    run = eval(
        of_fix(error), {"launch": functools.partial(tpukit.launch, progress="off"), "train": train}
    )
    assert run.results == [None] * run.cores
    assert (
        launch(
            train, **dict([re.search(r"(cores)=(1)", error.value.fix).groups()]) | {"cores": 1}
        ).cores
        == 1
    )
    with pytest.raises(InvalidTypeError, match="no option 'args'") as error:
        tpukit.launch(train, args=({"rate": 1},))
    run = eval(of_fix(error), {"launch": launch, "train": train, "config": {"rate": 1}})
    assert run.results == [{"rate": 1}] * 2


def test_what_is_meant_for_the_function_is_still_passed_on():
    with pytest.raises(InvalidTypeError) as error:
        tpukit.launch(rate_by_keyword, rate=1)
    assert error.value.fix.startswith("launch(functools.partial(rate_by_keyword, rate=...), ...)")
    assert launch(functools.partial(rate_by_keyword, rate=1)).results == [1, 1]


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (no_core, (), "no_core() cannot be called with (core): too many"),
        (no_core_but_config, (3,), "cannot be called with (core, int)"),
        (no_core, (3, 4), "cannot be called with (core, int, int)"),
        (two_settings, (3,), "missing a required argument: 'rate'"),
        (rate_by_keyword, (), "argument: 'rate'"),  # Python 3.12 adds "keyword-only"
        (lambda core: 1, (3,), "cannot be called"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_before_anything_is_forked(fn, args, said):
    with pytest.raises(InvalidTypeError, match=re.escape(said)) as error:
        launch(fn, *args)
    assert error.value.fix.startswith(f"def {fn.__name__}(core, ...): ")


def test_a_call_that_fits_as_the_fix_says_runs():
    assert launch(train, 3).results == [3, 3]
    assert launch(two_settings, 3, 4).results == [(3, 4)] * 2
    assert launch(functools.partial(rate_by_keyword, rate=0.1)).results == [0.1, 0.1]


def test_jobs_are_told_the_same():
    with pytest.raises(InvalidTypeError, match=r"cannot be called with \(core, int\)"):
        tpukit.launch_each(no_core, [1, 2], progress="off")
    jobs = tpukit.launch_each(train, [1, 2], cores=1, backend="cpu", progress="off")
    assert [run.results for run in jobs.runs] == [[1], [2]]


@pytest.mark.parametrize(("given", "name"), [(None, "None"), ({"loss": 1}, "a dict")])
def test_what_a_function_returned_is_no_function(given, name):
    with pytest.raises(
        InvalidTypeError,
        match=f"launch runs a function, got {name}$|launch runs a function, got {name}\n",
    ) as error:
        launch(given)
    assert eval(of_fix(error), {"launch": launch, "train": train}).results == [None, None]


def test_functions_that_do_not_tell_what_they_take_are_tried():
    launch(type)  # has no signature


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason=".cuda() works here")
def test_cuda_in_a_worker_is_answered_with_the_call_that_any_device_takes():
    def for_a_gpu(core):
        return torch.nn.Linear(2, 1).cuda().weight.device.type

    def tensor_for_a_gpu(core):
        return torch.zeros(2).to("cuda").device.type

    for fn in (for_a_gpu, tensor_for_a_gpu, for_a_gpu):
        with pytest.raises(tpukit.WorkerError) as error:
            launch(fn)
        fix = re.search(r"^  fix:   (.*)", str(error.value), re.MULTILINE)[1]
        assert fix.startswith(
            "core.model(model) in place of model.cuda(), and tensor.to(core.device) in place of tensor.cuda()"
        )
        torch.cuda.is_available()  # as in many first cells; torch then says of a fork that it should be spawned

    def for_any(core):
        model, inputs = core.model(torch.nn.Linear(2, 1)), torch.zeros(3, 2).to(core.device)
        return tuple(model(inputs).shape)

    assert launch(for_any).results == [(3, 1)] * 2


@pytest.mark.parametrize(
    "words",
    [
        "Torch not compiled with CUDA enabled",  # of a CPU build: Colab's TPU image
        "Found no NVIDIA driver on your system.",
        "No CUDA GPUs are available",
        "Cannot re-initialize CUDA in forked subprocess.",
    ],
)
def test_torch_says_in_several_ways_that_there_is_no_gpu(words):
    def fail(core):
        raise AssertionError(words)

    with pytest.raises(tpukit.WorkerError, match=r"fix:   core\.model\(model\) in place"):
        launch(fail)
