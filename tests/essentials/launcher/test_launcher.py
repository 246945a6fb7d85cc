import dataclasses
import gc
import importlib.util
import inspect
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
from helpers.launching import children
from helpers.machines import on_machine

import tpukit
from tpukit import WorkerError, launch
from tpukit.essentials import backends
from tpukit.essentials.backends import Cpu
from tpukit.essentials.backends.cpu import CpuRuntime
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.launcher import core_lookup
from tpukit.essentials.launcher.topology import choose_device, choose_topology, refuse_if_in_use
from tpukit.essentials.launcher.worker_group import WorkerGroup
from tpukit.essentials.launcher.worker_process import WorkerProcess


def quietly(fn, *args, **options):
    return launch(fn, *args, progress="off", **options)


@pytest.fixture(autouse=True)
def _no_process_is_left_behind():
    before = set(children())
    yield
    assert set(children()) <= before


def test_every_rank_returns_its_own_result_with_types_intact():
    def work(core):
        return {
            "rank": core.rank,
            "array": numpy.arange(3),
            "tensor": torch.ones(2, requires_grad=True) * core.rank,
            "nested": [(core.world_size, "text", None)],
        }

    run = quietly(work, cores=3)
    assert [result["rank"] for result in run.results] == [0, 1, 2]
    assert run.results[2]["tensor"].tolist() == [2, 2]
    assert type(run.results[1]["array"]) is numpy.ndarray
    assert run.results[0]["nested"] == [(3, "text", None)]
    assert run.cores == 3
    assert len(run.memory) == 3
    assert all(50 * 2**20 < peak < 8 * 2**30 for peak in run.memory)
    assert run.seconds > 0


def test_the_worker_sees_the_notebook_and_changes_nothing_in_it():
    seen = {"value": 41}

    def work(core):
        seen["value"] += 1
        return seen["value"]

    assert quietly(work, cores=2).results == [42, 42]
    assert seen == {"value": 41}


def test_arguments_arrive_unpickled():
    run = quietly(lambda core, f, n: f(n), lambda n: n * 2, 21, cores=2)
    assert run.results == [42, 42]


def test_a_large_result_comes_back_whole():
    run = quietly(lambda core: torch.full((25_000_000,), float(core.rank)), cores=2)
    assert [float(result.sum()) for result in run.results] == [0, 25_000_000]


def test_half_a_gigabyte_is_held_once_by_the_worker_and_once_by_the_kernel():
    out = in_python(
        """
        import torch, tpukit

        def peak():
            return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

        def work(core, mib):
            return {f"layer {n}": torch.ones(mib * 2**20 // 40) for n in range(10)}  # ten tensors of float32

        small = tpukit.launch(work, 1, cores=1, progress="off")
        before = peak()
        large = tpukit.launch(work, 500, cores=1, progress="off")
        assert sum(float(tensor.sum()) for tensor in large.results[0].values()) > 1.3e8
        print(peak() - before, (large.memory[0] - small.memory[0]) / 2**20)
        """
    )
    kernel, worker = map(float, out.splitlines()[-1].split())
    assert 480 < kernel < 540
    assert 480 < worker < 540


def test_log_rows_come_back_in_order_and_from_core_0_alone():
    def work(core):
        for step in range(300):
            core.log(step, loss=torch.tensor(1.0) / (step + 1), rank=core.rank)

    log = quietly(work, cores=2).log
    assert [row["step"] for row in log] == list(range(300))
    assert {row["rank"] for row in log} == {0}
    assert log[3]["loss"] == pytest.approx(0.25)


def test_the_same_seed_draws_the_same_numbers_on_every_core():
    def work(core):
        return torch.rand(3), numpy.random.rand(3)  # noqa: NPY002

    first, second, other = (quietly(work, cores=2, seed=seed).results for seed in (0, 0, 5))
    assert torch.equal(first[0][0], second[0][0])
    assert first[0][1].tolist() == second[0][1].tolist()
    assert torch.equal(
        first[0][0], first[1][0]
    )  # each core's own begin with its first step: test_same.py
    assert not torch.equal(first[0][0], other[0][0])


def test_whole_lines_arrive_however_many_cores_print(capsys):
    def work(core):
        for _ in range(40):
            print("a", "b", core.rank)
        os.system("echo from a child process")
        core.print("once")
        core.print("each", everywhere=True)

    quietly(work, cores=3)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(3):
        assert lines.count(f"[core {rank}] a b {rank}") == 40
        assert lines.count(f"[core {rank}] from a child process") == 1
        assert lines.count(f"[core {rank}] each") == 1
    assert lines.count("once") == 1


@pytest.fixture
def at_end(monkeypatch) -> dict[threading.Thread, list]:
    """The exit codes of the workers as the kernel makes sure of their end, None for one that it has to kill."""
    at_end = {}
    kill = WorkerProcess.kill

    def note(self):
        at_end.setdefault(threading.current_thread(), []).append(self.process.exitcode)
        kill(self)

    monkeypatch.setattr(WorkerProcess, "kill", note)
    return at_end


def test_a_launch_in_another_thread_does_not_hold_up_the_end_of_this_one(at_end):
    """Its workers, forked in between, have the control pipes of this run open, whose end would say that it is over."""
    other = threading.Timer(0.5, quietly, [lambda core: time.sleep(6)], {"cores": 2})
    other.start()
    quietly(lambda core: time.sleep(2), cores=2)
    other.join()
    assert at_end[threading.current_thread()] == [0, 0]


def test_a_worker_that_is_slow_to_end_after_its_result_is_let_end(at_end, monkeypatch):
    """SIGKILL would leave a chip busy for seconds, and the next launch without it."""
    monkeypatch.setattr(core_lookup, "leave", lambda: time.sleep(0.3))
    assert quietly(lambda core: core.rank, cores=2).results == [0, 1]
    assert at_end[threading.current_thread()] == [0, 0]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_rank_that_failed_first_is_named_though_the_others_fail_in_a_collective(culprit):
    def work(core):
        core.barrier()
        if core.rank == culprit:
            raise KeyError("SOPInstanceUID")
        core.all_reduce(torch.ones(3))

    with pytest.raises(WorkerError) as caught:
        quietly(work, cores=3)
    error = caught.value
    assert error.rank == culprit
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith(
        f"core {culprit} of 3 raised KeyError: 'SOPInstanceUID' (the other 2 were ended)"
    )
    assert error.found.splitlines()[-1].startswith("work(), ")
    assert error.fix == "correct that line and run the cell again; the kernel need not be restarted"
    assert error.details == f"its traceback:\n{error.traceback}"
    assert 'raise KeyError("SOPInstanceUID")' in error.traceback
    first = error.traceback.splitlines()[1]
    assert first.startswith(f'  File "{__file__}", line ')  # the reader's own function comes first


def test_of_two_failures_the_earlier_is_told():
    def work(core):
        time.sleep(0.2 * core.rank)
        raise ValueError(f"from {core.rank}")

    with pytest.raises(WorkerError, match="core 0 of 2 raised ValueError: from 0"):
        quietly(work, cores=2)


def test_a_run_works_again_after_a_failure_and_keeps_what_had_come():
    def work(core, fail):
        core.log(loss=0.5)
        if fail and core.rank == 1:
            time.sleep(0.3)
            raise RuntimeError("once")
        return core.rank

    assert quietly(work, False, cores=2).results == [0, 1]
    with pytest.raises(WorkerError) as caught:
        quietly(work, True, cores=2)
    assert caught.value.run.results == [0, None]
    assert caught.value.run.log == [{"step": 1, "loss": 0.5}]
    assert quietly(work, False, cores=2).results == [0, 1]


FOUND = "3 of 4\nand one more"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            InvalidValueError("it is wrong", found=FOUND, fix="take four"),
            "it is wrong (sample 3) (the other was ended)\n"
            "  found: 3 of 4\n         and one more\n         {place}\n  fix:   take four\n",
        ),
        (
            InvalidValueError("it is wrong", found=FOUND),
            "it is wrong (sample 3) (the other was ended)\n"
            "  found: 3 of 4\n         and one more\n         {place}\n  fix:   correct that",
        ),
        (
            ValueError("it is wrong\nand more"),
            "it is wrong and more (sample 3) (the other was ended)\n  found: {place}\n  fix:   correct that",
        ),
        (ValueError("Traceback:\nFile a\nFile b\n  fix:   take four"), "Traceback: ... "),
        (ValueError(""), "(sample 3)"),
    ],
)
def test_the_parts_of_an_error_that_a_core_raises_are_those_of_the_workers_error(error, said):
    def work(core):
        if core.rank:
            error.add_note("sample 3")
            raise error
        core.barrier()

    with pytest.raises(WorkerError) as caught:
        quietly(work, cores=2)
    message = caught.value.summary
    place = caught.value.found.splitlines()[-1]
    assert re.fullmatch(r"work\(\), .*, line \d+", place)
    assert f"core 1 of 2 raised ValueError: {said.format(place=place)}" in f"{message}\n"
    assert sum(line.startswith("  fix:") for line in message.splitlines()) == 1


def test_an_unpicklable_result_names_the_part_and_its_fix_works():
    def work(core, fixed):
        result = {"weights": torch.ones(2), "model": [lambda: 0]}
        return result["weights"] if fixed else result

    with pytest.raises(WorkerError) as caught:
        quietly(work, False, cores=2)
    message = str(caught.value)
    assert "the value['model'][0] (a function) cannot be pickled" in message
    assert "fix:   return tensors, arrays, numbers and containers of them" in message
    assert len(quietly(work, True, cores=2).results) == 2


def test_a_result_whose_own_method_refuses_pickling_is_named():
    def work(core):
        return {"model": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))}

    with pytest.raises(WorkerError) as caught:
        quietly(work, cores=1)
    message = str(caught.value)
    assert "the value['model'] (a ParametrizedLinear) cannot be pickled: Serial" in message
    assert "fix:   return tensors, arrays, numbers and containers of them" in message


class OfTheWorker:
    """Unpickles only in the process that made it."""

    def __init__(self):
        self.process = os.getpid()

    def __setstate__(self, state):
        if state["process"] != os.getpid():
            raise ImportError("only the worker has this module")


def test_a_result_that_the_kernel_cannot_unpickle_has_a_fix():
    with pytest.raises(WorkerError) as caught:
        quietly(lambda core: OfTheWorker(), cores=1)
    message = str(caught.value)
    assert "the kernel cannot unpickle: ImportError: only the worker has this module" in message
    assert "fix:   return tensors, arrays, numbers and containers of them" in message


def machine(**facts):
    return dataclasses.replace(tpukit.machine_info(), **facts)


EIGHT = {"platform": "Kaggle", "chips": 8, "generation": "v5e"}
V3 = {"platform": "TPU VM", "chips": 4, "generation": "v3"}
NO_XLA = {"torch": "2.9.0", "torch_xla": None, "python": "3.12.3"}
WITH_XLA = {"torch": "2.9.0", "torch_xla": "2.9.0", "python": "3.12.3"}


@pytest.mark.parametrize(
    ("facts", "asked", "expected"),
    [
        (EIGHT, {}, ("xla", False, 8, 8)),
        (EIGHT, {"cores": 8}, ("xla", False, 8, 8)),
        (EIGHT, {"cores": 1}, ("xla", False, 1, 1)),
        (EIGHT, {"backend": "cpu", "cores": 3}, ("cpu", True, 3, 3)),
        (V3, {}, ("xla", False, 8, 4)),
        ({"chips": 1, "generation": "v6e"}, {}, ("xla", False, 1, 1)),
        ({"chips": 0, "cpus": 4}, {}, ("cpu", True, 4, 4)),
        ({"chips": 0, "cpus": 96}, {}, ("cpu", True, 8, 8)),
        ({"chips": 0, "cpus": 1}, {}, ("cpu", True, 2, 2)),
        ({"chips": 0, "cpus": 2}, {"backend": "xla:cpu"}, ("xla:cpu", True, 2, 2)),
    ],
)
def test_a_run_has_a_process_per_chip_and_a_rank_per_core(facts, asked, expected):
    chosen = choose_topology(
        machine(**facts, versions=WITH_XLA), asked.get("cores"), asked.get("backend")
    )
    assert (chosen.backend, chosen.is_dry_run, chosen.cores, chosen.processes) == expected


def test_a_chosen_device_is_one_core_of_that_number():
    chosen = choose_device(machine(**EIGHT, versions=WITH_XLA), 5, None, None)
    assert (chosen.backend, chosen.cores, chosen.processes, chosen.device_number) == (
        "xla",
        1,
        1,
        5,
    )
    assert quietly(lambda core: core.world_size, device=1).results == [1]


def test_numbers_of_numpy_are_numbers():
    options = {"timeout": numpy.int64(600), "limits": tpukit.Limits(stall=numpy.float32(600))}
    options["seed"] = numpy.int64(7)
    assert quietly(lambda core: core.world_size, cores=numpy.int64(2), **options).results == [2, 2]
    assert quietly(lambda core: core.world_size, device=numpy.int64(1)).results == [1]


@pytest.mark.parametrize("seed", [1.5, True, -1, "7"])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises((TypeError, ValueError), match="seed must be"):
        quietly(lambda core: core.world_size, cores=1, seed=seed)


@pytest.mark.parametrize(
    ("obstacle", "expected"), [(None, "xla:simulator"), ("no C compiler is here", "xla:cpu")]
)
def test_xla_without_a_chip_runs_on_the_simulator_if_it_is_installed(
    obstacle, expected, monkeypatch
):
    monkeypatch.setattr("tpukit.simulator.runtime.why_not", lambda: obstacle)
    assert choose_topology(machine(chips=0, versions=WITH_XLA), None, "xla").backend == expected
    assert choose_topology(machine(**EIGHT, versions=WITH_XLA), None, "xla").backend == "xla"
    assert choose_topology(machine(chips=0, versions=WITH_XLA), None, None).backend == "cpu"


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        (
            EIGHT,
            {"cores": 3},
            r"cores=3 is not supported: torch_xla uses 1 core or all 8\n  found: 8 v5e chips",
        ),
        (V3, {"cores": 4}, r"all 8\n  found: 4 v3 chips"),
        ({"chips": 0}, {"cores": 0}, "at least 1, or None for all, got 0"),
        ({"chips": 0}, {"cores": -2}, "got -2"),
        ({"chips": 0}, {"cores": True}, "got True"),
        ({"chips": 0}, {"cores": "8"}, "got '8'"),
        (
            {"chips": 0},
            {"backend": "tpu"},
            "backend must be one of None, 'cpu', 'cuda', 'torch_tpu', 'torch_tpu:cpu', 'torch_tpu:simulator', "
            "'xla', 'xla:cpu', 'xla:simulator'; got 'tpu'",
        ),
        ({"chips": 0}, {"backend": "cuda", "cores": 64}, "cores=64 is not supported"),
        (
            {"chips": 0, "versions": NO_XLA, "system": "Linux x86_64"},
            {"backend": "xla"},
            "xla backend needs torch_xla(.|\n)*fix:   pip install torch_xla==2.9.0; or backend='cpu'",
        ),
        (
            {"chips": 0, "versions": NO_XLA, "system": "Darwin arm64"},
            {"backend": "xla"},
            "fix:   Linux on x86-64, Python 3.11 to 3.13 and torch 2.8 or 2.9: torch_xla has no other wheels; or",
        ),
        (
            EIGHT,
            {"device": 8},
            r"a chip, 0 to 7, and cores must be 1 or None\n  found: device=8, cores=None\n  fix:",
        ),
        (EIGHT, {"device": 2, "cores": 8}, "found: device=2, cores=8"),
        ({"chips": 0}, {"device": -1}, "found: device=-1"),
        ({"chips": 0}, {"device": True}, "found: device=True"),
        (
            {"chips": 0},
            {"timeout": 0},
            "timeout must be a number of seconds above 0, got 0\n  fix:",
        ),
        (
            {"chips": 0},
            {"limits": {"stall": "1h"}},
            "stall must be a number of seconds above 0, got '1h'\n  fix:",
        ),
        (
            {"chips": 0},
            {"matmul_precision": "bf16"},
            "'high', 'highest', or None for the device's own, got 'bf16'",
        ),
        (
            {"chips": 0},
            {"limits": {"heartbeat": None}},
            "heartbeat must be a number of seconds above 0, got None",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_fix(facts, options, message):
    facts = {"versions": WITH_XLA, **facts}

    def call():
        given = dict(options)
        if "limits" in given:
            given["limits"] = tpukit.Limits(**given["limits"])
        quietly(lambda core: None, **given)

    with on_machine(machine(**facts)), pytest.raises(ValueError, match=message):
        call()


def in_python(code, **environ):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_that_started_the_runtime_is_refused_and_one_that_only_imported_is_not():
    if (
        importlib.util.find_spec("torch_xla") is None
    ):  # to import it here would start processes with torch 2.8
        pytest.skip("torch_xla has no wheel for this machine")
    calls = [
        "torch_xla.device()",
        "xr.world_size()",
        "xm.master_print('')",
        "torch_xla.sync()",
        "met.metrics_report()",
    ]
    out = in_python(
        f"""
        import os, sys
        import torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr, torch_xla.debug.metrics as met
        import tpukit
        assert tpukit.launch(lambda core: core.rank, cores=2, progress="off").results == [0, 1]
        for call in {calls}:
            if os.fork() == 0:  # a kernel for each call, without the import each time
                eval(call)
                try:
                    tpukit.launch(lambda core: core.rank, cores=2, progress="off")
                except tpukit.RuntimeInUseError as error:
                    assert call.split("(")[0] in str(error)  # the message names the kind of call
                    print(call, error, flush=True)
                os._exit(0)
            os.wait()
        """,
        PJRT_DEVICE="CPU",
    )
    for call in calls:
        assert f"{call} this kernel has started the XLA runtime" in out
    assert out.count("fix:   restart the kernel (Kernel > Restart)") == len(calls)


def test_a_launch_does_not_start_the_runtime_in_this_process():
    quietly(lambda core: None, cores=2)
    refuse_if_in_use(tpukit.machine_info())


def test_without_fork_one_core_runs_in_this_process():
    out = in_python(
        """
        import os, signal
        del os.fork, signal.SIGCHLD  # Windows
        import tpukit

        def work(core):
            core.log(loss=0.5)
            return core.world_size, core.mean(3), os.getpid()

        run = tpukit.launch(work)
        assert run.results == [(1, 3.0, os.getpid())], run.results
        assert run.log == [{"step": 1, "loss": 0.5}]
        assert tpukit.launch(work).results == run.results
        try:
            tpukit.launch(lambda core: 1 / 0)
        except tpukit.WorkerError as error:
            assert isinstance(error.__cause__, ZeroDivisionError)
        try:
            tpukit.launch(work, cores=2)
        except ValueError as error:
            print(error)
        """
    )
    assert "has no fork" in out
    assert "dry run: 1 CPU process takes the place of TPU cores" in out


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)])
def test_sigterm_is_heard_whichever_thread_the_system_hands_it_to(backend):
    """A main thread that sleeps, waits or compiles is not woken by a signal that another thread took."""

    def work(core):
        def take_it():
            time.sleep(0.3)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        if core.rank == 1:
            threading.Thread(target=take_it).start()
        time.sleep(800)

    began = time.monotonic()
    with pytest.raises(WorkerError, match="core 1 of 2 was ended by SIGTERM"):
        quietly(work, cores=2, backend=backend)
    assert time.monotonic() - began < 600


def test_pools_of_processes_in_a_worker_end_quietly(capfd):
    """A pool ends its processes by SIGTERM, which must not mean to them what it means to a worker."""

    def work(core):
        from multiprocessing import Pool

        total = 0
        for _ in range(25):
            with Pool(2) as pool:
                total += sum(pool.map(abs, [-1, 1]))
        return total

    assert quietly(work, cores=2, timeout=600).results == [50, 50]
    assert "Terminated" not in "".join(capfd.readouterr())


def test_a_launch_works_beside_more_than_a_thousand_open_files():
    import resource

    def work(core):
        time.sleep(0.5)
        return any(
            "obey" in thread.name for thread in threading.enumerate()
        )  # the thread that hears the kernel

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert quietly(work, cores=2).results == [True, True]
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TornDown:
    """Says in shared memory who tore it down. Of what libraries make, that may wait for a thread which a fork lacks."""

    def __init__(self, said):
        self.itself, self.process, self.said = self, os.getpid(), said

    def __del__(self):
        self.said[os.getpid() != self.process] = 1


class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index


def test_what_one_process_has_let_go_of_is_not_torn_down_in_its_forks():
    of_kernel, of_worker = mmap.mmap(-1, 2), mmap.mmap(-1, 2)

    def work(core):
        gc.collect()
        gc.disable()
        TornDown(of_worker)
        return list(torch.utils.data.DataLoader(Collecting(), batch_size=None, num_workers=1))

    gc.disable()
    try:
        TornDown(of_kernel)
        assert quietly(work, cores=1).results == [[0, 1, 2, 3]]
        assert of_kernel[:] == of_worker[:] == b"\0\0"
    finally:
        gc.enable()
    gc.collect()
    assert of_kernel[:] == b"\1\0"  # here it is, as ever


def test_what_the_kernel_does_at_its_end_is_not_done_at_the_end_of_its_forks(tmp_path):
    # Since Python 3.13 a forked process runs functions of atexit, as finalizers are.
    def work(core):
        dataset = Collecting()
        return list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))

    program = f"""
import atexit, os, sys, tempfile
sys.path[:0] = {sys.path!r}
import torch, tpukit
from essentials.launcher.test_launcher import Collecting, quietly

folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})
atexit.register(lambda: print("kernel ends", os.path.isdir(folder.name), flush=True))
{textwrap.dedent(inspect.getsource(work))}
assert quietly(work, cores=2).results == [[0, 1, 2, 3]] * 2
list(torch.utils.data.DataLoader(Collecting(), batch_size=None, num_workers=1))
assert os.path.isdir(folder.name)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if "ends" in line] == ["kernel ends True"]


def test_an_interrupt_right_after_the_forks_leaves_no_worker(monkeypatch):
    restart_clocks = WorkerGroup._restart_clocks

    def interrupted(group):
        if group.workers:
            raise KeyboardInterrupt
        restart_clocks(group)

    monkeypatch.setattr(WorkerGroup, "_restart_clocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quietly(lambda core: None, cores=2)
    assert children() == []


def test_a_refused_fork_leaks_no_descriptor(monkeypatch):
    import multiprocessing.context
    import multiprocessing.popen_fork

    forks = []

    def refuse(process):
        forks.append(process)
        if len(forks) % 2 == 0:
            raise OSError(11, "Resource temporarily unavailable")
        return multiprocessing.popen_fork.Popen(process)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(refuse))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="Resource temporarily unavailable"):
            quietly(lambda core: core.rank, cores=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_hundred_megabytes_without_an_end_of_line_are_read_as_fast_as_they_come(capsys):
    def work(core):
        for _ in range(100):
            sys.stdout.write("x" * 10**6)

    began = time.process_time()  # of this process alone, however busy the machine is
    quietly(work, cores=1)
    assert time.process_time() - began < 40  # 99 s when every piece was joined to all before it
    assert capsys.readouterr().out.count("x") >= 10**7


def test_a_bar_that_writes_over_its_line_is_seen_before_it_ends(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.launcher.worker_output._SECONDS_BETWEEN_STATES", 0.5)
    seen = []
    monkeypatch.setattr(
        "tpukit.essentials.display.progress.Screen.line", lambda self, text: seen.append(text)
    )

    def work(core):
        for percent in range(0, 100, 5):
            sys.stderr.write(f"\r {percent}%")
            sys.stderr.flush()
            time.sleep(0.1)  # two seconds in all, and more on a busy machine
        sys.stderr.write("\r 100%\n")

    quietly(work, cores=1)
    bars = [text for text in seen if "%" in text]
    assert bars[-1] == " 100%"
    assert 2 <= len(bars) < 20  # not every state


def test_a_torch_that_is_older_than_the_kit_can_run_is_refused_before_a_fork():
    here = tpukit.machine_info()
    old = dataclasses.replace(
        here, versions={**here.versions, "torch": "2.7.0", "torch_xla": "2.7.0"}
    )
    for backend in ("cpu", "xla"):
        with on_machine(old), pytest.raises(ValueError, match=r"torch 2\.7\.0 is not supported"):
            launch(lambda core: core.rank, cores=1, backend=backend, progress="off")


class Lonely(CpuRuntime):
    """CPU processes that do not find each other, as chips with variables meant for one process."""

    name = "lonely"

    def start(self, body, topology, *, process, meeting_point):
        body(Cpu(0, 1, None))


@pytest.fixture
def lonely(monkeypatch):
    monkeypatch.setitem(backends.runtimes(), "lonely", Lonely())
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "1,1,1")


def test_cores_that_do_not_find_each_other_fail_before_the_worker_function(lonely, tmp_path):
    def work(core):
        (tmp_path / "ran").touch()

    with pytest.raises(
        WorkerError, match="the devices did not join one run: only 1 of its 2 cores"
    ) as failed:
        launch(work, cores=2, backend="lonely", progress="off")
    assert "TPU_PROCESS_BOUNDS=1,1,1" in failed.value.found
    assert "restart the kernel" in failed.value.fix
    assert "hosts" not in failed.value.fix
    assert not (tmp_path / "ran").exists()


def test_hosts_that_do_not_find_each_other_fail_with_a_fix_for_hosts(lonely, tmp_path):
    from tpukit.accelerators import launch_on_host

    def work(core):
        (tmp_path / "ran").touch()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        hosts = backends.Hosts(0, 4, listener.getsockname(), listener)
        with pytest.raises(
            WorkerError, match="the devices did not join one run: only 1 of its 8 cores"
        ) as failed:
            launch_on_host(hosts, work, cores=2, backend="lonely", progress="off")
    assert "a run over 4 hosts" in failed.value.found
    assert "TPU_WORKER_HOSTNAMES" in failed.value.fix
    assert "restart the kernel" not in failed.value.fix
    assert not (tmp_path / "ran").exists()


def test_what_every_workers_first_optimizer_imports_is_there_before_the_fork():
    code = (
        "import sys, tpukit\n"
        "run = tpukit.launch(lambda core: 'torch._dynamo' in sys.modules, cores=1, backend='cpu', progress='off')\n"
        "print(run.results)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "[True]" in ran.stdout, ran.stderr


def test_the_core_that_grew_most_is_named_and_what_is_shared_or_mapped_does_not_count(tmp_path):
    """No heartbeat comes in this run: what is held for a moment only is in the peak that the system keeps."""
    shared = numpy.ones(80 * 2**20 // 8)
    file = tmp_path / "cache.npy"
    numpy.save(file, shared)

    kept = []  # until the process ends, as a dataset is

    def work(core):
        kept.append(numpy.load(file, mmap_mode="r") if core.rank == 2 else shared)
        own = numpy.ones(60 * 2**20 // 8) if core.rank == 1 else shared[:1]
        return float(kept[0].sum() + own.sum())

    run = launch(work, cores=3, backend="cpu", progress="off", limits=tpukit.Limits(heartbeat=600))
    assert len(run.memory_growth) == 3
    assert "core 1 grew most, by " in repr(run)
    assert 50 * 2**20 < run.memory_growth[1] < 100 * 2**20
    assert max(run.memory_growth[0], run.memory_growth[2]) < 30 * 2**20
