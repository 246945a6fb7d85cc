"""The fault matrix of `launch`: every fault a real one, in a real Jupyter kernel, and what the user has afterwards.

    python tests/faults/matrix.py [--backend cpu|xla|both] [--only WORD]

Prints a table and, last, one JSON line. Exits with 1 if a row fails. `make test` runs the same faults as tests, in
streams beside the others (test_faults.py); there no row fails for being slow.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from helpers.kernels import Kernel, ServedKernel, is_alive  # noqa: E402

from tpukit.simulator.build import why_not  # noqa: E402

BACKENDS = ("cpu", "xla:cpu", "xla:simulator")
MOST_SECONDS = (
    10.0  # until control is back, from when the fault can be noticed; asked of this table alone
)
HANGS = 300.0  # seconds after which what was waited for does not come

SETUP = """
import ctypes, mmap, os, resource, signal, struct, subprocess, sys, tempfile, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import torch, tpukit
clock = mmap.mmap(os.open({clock!r}, os.O_RDWR), 8)

def now():
    "Note the moment of the fault, in a file that the workers and the test share."
    clock[:] = struct.pack("d", time.time())

def launch(fn, **options):
    return tpukit.launch(fn, **{"backend": {backend!r}, "cores": 2, **options})

def together(core):
    return core.all_reduce(torch.ones(2, device=core.device))

def fine(core):
    return together(core).tolist()

def steps(core, before):
    "Take three steps of a training, whose gradients are averaged in the graph where the backend has one."
    model = core.model(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if core.rank == 1 and number == 1:
            now(); before()
        with core.step():
            model(torch.ones(4, 3, device=core.device)).square().mean().backward()
            core.optimizer_step(optimizer)
    return float(core.to_host(model.bias.detach().sum()))

class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        if index == self.bad:
            now(); self.fail()
        return torch.zeros(3)
    def __init__(self, bad, fail): self.bad, self.fail = bad, fail

def trained(core, folder):
    "Train a little and keep checkpoints in a folder."
    model = core.model(torch.nn.Linear(3, 2))
    batches = core.batches([(torch.ones(3), torch.ones(2))] * 16, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = lambda epochs: tpukit.fit(core, model, optimizer, torch.nn.functional.mse_loss, batches, epochs=epochs, checkpoints=folder)
    return [len(fit(1).epochs), len(fit(2).epochs)]

def raise_os_error(): raise OSError("a broken JPEG")
def be_killed(): os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Fault:
    """A fault, and what the user should see of it.

    `work` is the body of the worker function, `sees` a pattern of the error, `call` options of launch, `before` a cell
    run first, `patience` the seconds that the fault needs by its nature to be noticed (a stall limit), `interrupt` the
    seconds after the moment of the fault at which the user interrupts, `cause` the type of the original exception,
    `prints` a pattern of what the cell prints. A fault `alone` has a kernel of its own; those of one `wrap` share one. One
    `in_graph` is about collectives that are part of the graph: on the simulator they are, on CPU processes they are
    put off to the end of the step.
    """

    name: str
    work: str
    sees: str
    call: str = ""
    before: str = ""
    cause: str = ""
    patience: float = 0.0
    interrupt: tuple[float, ...] = ()
    wrap: tuple[str, ...] = ()
    needs_root: bool = False
    check: str = ""
    prints: str = ""
    alone: bool = False
    in_graph: bool = False

    def runs_on(self, backend: str) -> bool:
        """Say whether this is a fault that the backend can have."""
        return backend != "xla:cpu" or not self.in_graph


def tmpfs(folder: str) -> tuple[str, ...]:
    """Return the command that runs another with a tiny file system, seen by it alone, on a folder."""
    script = f'mkdir -p {folder} && mount -t tmpfs -o size=1m tmpfs {folder} && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


KILLED = "core 1 of 2 was killed by SIGKILL"
BOTH = "result.results == [[2, 2], [2, 2]]"
# Processes are numbered from the last to the first, as a TPU's chips may be.
REVERSED = """
from tpukit.essentials.backends import runtimes

class Reversed(type(runtimes()[{backend!r}])):
    name = "reversed"
    def start(self, body, topology, *, process, meeting_point):
        super().start(body, topology, process=1 - process, meeting_point=meeting_point)

runtimes()["reversed"] = Reversed()
"""
IN_GRAPH = f"""
sys.path.append({str(Path(__file__).parents[1])!r})
from essentials.launcher import test_in_graph
test_in_graph.backends.runtimes()["in graph"] = test_in_graph.InGraphRuntime()
"""
# The second process cannot be had, once.
REFUSED = """
import multiprocessing.context, multiprocessing.popen_fork
forks = []

def refuse_the_second(process):
    forks.append(process)
    if len(forks) == 2:
        now(); raise BlockingIOError(11, "Resource temporarily unavailable")
    return multiprocessing.popen_fork.Popen(process)

multiprocessing.context.ForkProcess._Popen = staticmethod(refuse_the_second)
"""
CLEAN = "import shutil; shutil.rmtree('/tmp/tpukit-tiny', ignore_errors=True)"  # all but the folder, a file system
FAULTS = [
    Fault("exception in rank 0", "if core.rank == 0: now(); raise KeyError('a')\ntogether(core)",
          "core 0 of 2 raised KeyError: 'a'", cause="KeyError"),
    Fault("exception in the last rank", "if core.rank == 1: now(); raise KeyError('a')\ntogether(core)",
          "core 1 of 2 raised KeyError: 'a'", cause="KeyError"),
    Fault("exception in all ranks at once", "core.barrier(); now(); raise ValueError(core.rank)",
          r"core [01] of 2 raised ValueError: [01]", cause="ValueError"),
    Fault("exception while others wait in a collective",
          "if core.rank == 1:\n    time.sleep(1.5); now(); raise KeyError('late')\ntogether(core)",
          "core 1 of 2 raised KeyError: 'late'", cause="KeyError"),
    Fault("exception that does not unpickle", "if core.rank == 1: now(); raise Strange(code=7)\ntogether(core)",
          "core 1 of 2 raised Strange: code 7",
          before="class Strange(Exception):\n    def __init__(self, *, code): super().__init__(f'code {code}')"),
    Fault("result that does not pickle", "now(); return {'model': lambda: 0}",
          r"core [01] of 2 returned something that cannot leave its process: the value\['model'\] \(a function\)"),
    Fault("XLA tensor as result", "now(); return torch.ones(2, device=core.device)", "",
          check="[str(r.device) for r in result.results] == ['cpu', 'cpu']"),
    Fault("sys.exit(3)", "if core.rank == 1: now(); sys.exit(3)\ntogether(core)", r"core 1 of 2 called sys\.exit\(3\)",
          cause="SystemExit"),
    Fault("input() in a worker", "now(); return input('name? ')",
          r"core [01] of 2 raised EOFError: input\(\), getpass\(\) and breakpoint\(\) do not work in a worker", cause="EOFError"),
    Fault("getpass() in a worker", "import getpass; now(); return getpass.getpass()",
          r"core [01] of 2 raised EOFError: input\(\), getpass\(\) and breakpoint\(\) do not work in a worker", cause="EOFError"),
    Fault("breakpoint() in a worker", "now(); breakpoint(); return 1",
          r"core [01] of 2 raised EOFError: input\(\), getpass\(\) and breakpoint\(\) do not work in a worker", cause="EOFError"),
    Fault("os._exit(1)", "if core.rank == 1: now(); os._exit(1)\ntogether(core)", "core 1 of 2 ended with exit status 1"),
    Fault("SIGKILL of one rank", "if core.rank == 1: now(); os.kill(os.getpid(), signal.SIGKILL)\ntogether(core)", KILLED),
    Fault("SIGSEGV of one rank", "if core.rank == 1: now(); ctypes.string_at(0)\ntogether(core)",
          "core 1 of 2 was killed by SIGSEGV(.|\n)*Fatal Python error: Segmentation fault"),
    Fault("abort in native code", "if core.rank == 1: now(); os.write(2, b'native: check failed\\n'); os.abort()\ntogether(core)",
          "core 1 of 2 was killed by SIGABRT(.|\n)*native: check failed"),
    Fault("SIGTERM of one rank", "if core.rank == 1:\n    now(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(99)\ntogether(core)",
          "core 1 of 2 was ended by SIGTERM"),
    Fault("out of memory in one rank",
          "if core.rank == 1:\n"
          "    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); now(); return bytearray(2**34)\n"
          "together(core)", "core 1 of 2 raised MemoryError", cause="MemoryError"),
    Fault("a rank that sleeps for ever", "core.barrier()\nif core.rank == 1: now(); time.sleep(9999)\ntogether(core)",
          r"core 1 of 2 has not moved for \d+ s(.|\n)*time\.sleep\(9999\)", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=3),
    Fault("a run over its time limit", "now(); time.sleep(9999)", "core 0 of 2 was not done after timeout=2 seconds",
          call="timeout=2", patience=2),
    Fault("different numbers of steps", "for _ in range(3 + core.rank): now(); core.barrier()",
          r"core 0 of 2 returned while core 1 still waits for it in barrier\(\)", patience=5),
    Fault("different collectives", "now()\nif core.rank: core.barrier()\nelse: core.gather(torch.ones(1, device=core.device))",
          r"(each for the other: core 0 in gather\(\), core 1 in barrier\(\)|raised |core 0 of 2 returned while core 1)", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=3),
    Fault("dataset raising at sample 21", "for _ in core.batches(Data(21, raise_os_error), batch_size=4): together(core)",
          r"core 0 of 2 raised OSError: a broken JPEG \(sample 21 of the dataset\)", cause="OSError"),
    Fault("dataset raising in a DataLoader process",
          "for _ in core.batches(Data(42, raise_os_error), batch_size=4, workers=1): together(core)",
          "core 1 of 2 raised OSError(.|\n)*a broken JPEG; sample 42 of the dataset", cause="OSError"),
    Fault("DataLoader process killed", "for _ in core.batches(Data(42, be_killed), batch_size=4, workers=1): together(core)",
          "core 1 of 2 raised RuntimeError: DataLoader worker(.|\n)*fix:   a DataLoader process was killed", cause="RuntimeError"),
    Fault("interrupt during the fork", "time.sleep(9999)", "KeyboardInterrupt",
          before="armed = [1]\nos.register_at_fork(after_in_parent=lambda: armed and (armed.clear(), now(), "
                 "signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)))"),
    Fault("interrupt during the first step", "now(); time.sleep(9999)", "interrupted", interrupt=(0.5,)),
    Fault("interrupt during a collective", "if core.rank == 1: now(); time.sleep(9999)\ntogether(core)", "interrupted", interrupt=(1.0,)),
    Fault("interrupt during results", "now(); return torch.ones(400_000_000)", "interrupted|^$", interrupt=(0.5,)),
    Fault("double interrupt", "try:\n    now(); time.sleep(9999)\nfinally:\n    time.sleep(30)", "interrupted|KeyboardInterrupt",
          interrupt=(0.5, 0.7)),
    Fault("full disk while saving", "now(); core.save({'weights': torch.ones(1_000_000)}, '/tmp/tpukit-tiny/weights.pt')",
          r"core 0 of 2 raised OSError: \[Errno 28\] No space left on device|core 0 of 2 raised RuntimeError: (.|\n)*write",
          wrap=tmpfs("/tmp/tpukit-tiny"), needs_root=True, before=CLEAN, check="os.listdir('/tmp/tpukit-tiny') == []"),
    Fault("/dev/shm full",
          "now()\nfor _ in core.batches(torch.utils.data.TensorDataset(torch.zeros(64, 1_000_000)), batch_size=4, workers=1): pass",
          "core [01] of 2 raised (RuntimeError|OSError)(.|\n)*(shared memory|shm|Bus error|No space left)",
          wrap=tmpfs("/dev/shm"), needs_root=True),
    Fault("a flood of 100,000 lines from each rank", "for n in range(100_000): print('line', n)\nnow()", "",
          check="len(result.results) == 2"),
    Fault("fork while the kernel has 50 threads", "now(); return fine(core)", "",
          before="stop = threading.Event()\nfor _ in range(50): threading.Thread(target=stop.wait, daemon=True).start()",
          check="result.results == [[2, 2], [2, 2]]"),
    Fault("fork after threaded torch operations and backward",
          "x = torch.randn(500, 500, device=core.device, requires_grad=True)\n(x @ x).sum().backward()\nnow(); return fine(core)", "",
          before="x = torch.randn(1500, 1500, requires_grad=True); (x @ x).sum().backward()",
          check="result.results == [[2, 2], [2, 2]]"),
    # the graph
    Fault("a core that sleeps while the other waits in the graph", "return steps(core, lambda: time.sleep(9999))",
          r"core 1 of 2 has not moved for \d+ s|core 0 of 2 raised (.|\n)*has not come", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=3, in_graph=True),
    Fault("a core that is killed while the other waits in the graph", "return steps(core, be_killed)", KILLED, in_graph=True),
    Fault("a core that raises while the other waits in the graph", "return steps(core, raise_os_error)",
          "core 1 of 2 raised OSError: a broken JPEG", cause="OSError", in_graph=True),
    Fault("a core that leaves the graph early", "steps(core, lambda: None)\nif core.rank == 0: now(); steps(core, lambda: None)",
          r"core 1 of 2 returned while core 0|core \d of 2 raised (.|\n)*has not come", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=5, in_graph=True),
    # ranks that are not the numbers of processes
    Fault("ranks in another order than processes", "now(); return core.rank, fine(core)", "", call="backend='reversed'",
          before=REVERSED, check="result.results == [(0, [2, 2]), (1, [2, 2])]"),
    Fault("SIGKILL of a rank that is not its process's number",
          "if core.rank == 1: now(); os.kill(os.getpid(), signal.SIGKILL)\ntogether(core)", KILLED, call="backend='reversed'", before=REVERSED),
    # processes and threads of the worker function's own
    Fault("a Pool in a worker", "from multiprocessing import Pool\nwith Pool(2) as pool: result = pool.map(abs, [-1, -2])\nnow(); return result", "",
          check="result.results == [[1, 2], [1, 2]]"),
    Fault("a process pool made in a thread that has ended",
          "made = []\nthread = threading.Thread(target=lambda: made.append(ProcessPoolExecutor(1)) or made[0].submit(abs, -1).result())\n"
          "thread.start(); thread.join(); time.sleep(0.3); now()\nwith made[0] as pool: return pool.submit(abs, -2).result()", "",
          check="result.results == [2, 2]"),
    Fault("joblib in a worker",
          "import numpy\nfrom joblib import Parallel, delayed\nlarge = numpy.ones(500_000)\n"
          "total = float(sum(Parallel(n_jobs=2)(delayed(numpy.sum)(large) for _ in range(4))))\nnow(); return total", "",
          check="result.results == [2e6, 2e6]"),
    Fault("a program left running", "subprocess.Popen(['sleep', '9999']); now(); return fine(core)", "", check=BOTH),
    Fault("a process forked by hand that never ends", "if os.fork() == 0: time.sleep(9999)\nnow(); return fine(core)", "", check=BOTH),
    Fault("a thread left running", "threading.Thread(target=time.sleep, args=(9999,)).start(); now(); return fine(core)", "", check=BOTH),
    Fault("a launch inside a worker", "now(); return launch(fine)", r"core [01] of 2 raised "
    "RuntimeInUseError: launch was called inside a worker, and its run already uses the cores",
          cause="RuntimeInUseError"),
    Fault("two launches at once", "now(); return fine(core)", "",
          check="[one.results for one in ThreadPoolExecutor(2).map(launch, [fine, fine])] == [[[2, 2], [2, 2]]] * 2"),
    # what stands still or spins
    Fault("SIGSTOP of one rank", "core.barrier()\nif core.rank == 1: now(); os.kill(os.getpid(), signal.SIGSTOP)\ntogether(core)",
          "core 1 of 2 has not moved(.|\n)*core 1:\ndoes not answer", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=3),
    Fault("native code that holds the interpreter", "core.barrier()\nif core.rank == 1: now(); ctypes.PyDLL(None).sleep(9999)\ntogether(core)",
          "core 1 of 2 has not moved(.|\n)*core 1:\ndoes not answer", call="limits=tpukit.Limits(stall=3, heartbeat=0.3)", patience=3),
    Fault("an endless loop over the time limit", "now()\nwhile True: pass", "core 0 of 2 was not done after timeout=2 seconds",
          call="timeout=2", patience=2),
    Fault("interrupt of a hung run shows the stacks of the cores", "if core.rank == 1: now(); time.sleep(9999)\ntogether(core)",
          r"the stacks of the cores:\ncore 0:(.|\n)*core 1:(.|\n)*time\.sleep\(9999\)", call="limits=tpukit.Limits(heartbeat=0.3)", interrupt=(10.0,)),
    Fault("a collective's error is caught, and work goes on",
          "try: core.gather(torch.ones(1 + core.rank, device=core.device))\nexcept ValueError: time.sleep(8 * (1 - core.rank))\nnow(); return core.rank",
          "", check="result.results == [0, 1]"),
    Fault("a result that takes long to pickle", "core.barrier(); now(); return [{} for _ in range(2_000_000 * (1 - core.rank))]", "",
          check="[len(one) for one in result.results] == [2_000_000, 0]"),
    # words
    Fault("death by a real-time signal", "if core.rank == 1: now(); os.kill(os.getpid(), 40)\ntogether(core)", "core 1 of 2 was killed by signal 40"),
    Fault("exception of 5 MB", "now(); raise ValueError('begin ' + 'x' * 5_000_000 + ' end')",
          r"core [01] of 2 raised ValueError: begin xxx(.|\n)*characters are left out here(.|\n)*xxx end\s*$", check="len(seen) < 30_000"),
    Fault("exception whose text cannot be made",
          "if core.rank == 1: now(); raise Silent\ntogether(core)", "core 1 of 2 raised Silent",
          before="class Silent(Exception):\n    def __str__(self): raise RuntimeError('no words')"),
    Fault("endless recursion", "def again(): again()\nif core.rank == 1: now(); again()\ntogether(core)", "core 1 of 2 raised RecursionError",
          cause="RecursionError"),
    # what a worker shows
    Fault("a program that prints without end", "if core.rank == 0: subprocess.run(['yes'])\ntime.sleep(1); now(); raise KeyError('late')",
          "core 1 of 2 raised KeyError: 'late'", cause="KeyError", prints="lines more, over 500 per second, are not shown"),
    Fault("a last line without an end", "print('accuracy', 0.93, end=''); now()", "", prints=r"\[core 1\] accuracy 0.93\n"),
    Fault("500 displays from each rank", "from IPython.display import HTML, display\nfor n in range(500): display(HTML(str(n)))\nnow()", "",
          prints="displays above 10 per second are not shown"),
    # training
    Fault("gradients of other parameters on each core",
          "parts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)])\n"
          "model = core.model(parts); now()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
          "with core.step():\n    model[core.rank](torch.ones(4, 2, device=core.device)).sum().backward()\n"
          "    core.optimizer_step(optimizer)\nreturn [part.tolist() for part in core.to_host(list(model.parameters()))]", "",
          check="result.results[0] == result.results[1]"),
    Fault("two fits in one folder, one after the other", "now(); return trained(core, '/tmp/tpukit-tiny')", "",
          check="result.results == [[1, 2], [1, 2]]", before=CLEAN, wrap=tmpfs("/tmp/tpukit-tiny"), needs_root=True),
    Fault("a fit in the folder of a run that goes on",
          "from pathlib import Path\nfrom tpukit.training.checkpoints import one_run\n"
          "folder = Path('/tmp/tpukit-tiny')\n"
          "if core.is_main and os.fork() == 0:\n    with one_run(folder, say=print): time.sleep(9999)\n"
          "while not (folder / '.run.lock').is_file() or not (folder / '.run.lock').read_text(): time.sleep(0.01)\n"
          "now(); trained(core, folder)",
          r"core 0 of 2 raised CheckpointError: another run saves in(.|\n)*found: process \d+ on ", patience=5.0, before=CLEAN,
          wrap=tmpfs("/tmp/tpukit-tiny"), needs_root=True),
    # a machine with little to give
    Fault("1,100 open files in the kernel", "now(); time.sleep(0.5); return fine(core)", "", check=BOTH, alone=True,
          before="soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
                 "resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))\n"
                 "opened = [open(os.devnull) for _ in range(1100)]"),
    Fault("no more files for a worker to open",
          "if core.rank == 1:\n    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); now(); open(os.devnull)\ntogether(core)",
          r"core 1 of 2 raised OSError: \[Errno 24\] Too many open files", cause="OSError"),
    Fault("a temporary folder with a name of 90 characters",
          "for _ in core.batches(Data(-1, None), batch_size=4, workers=1): pass\nnow(); return fine(core)", "", check=BOTH, alone=True,
          before="os.environ['TMPDIR'] = tempfile.gettempdir() + '/' + 'a' * 90; os.mkdir(os.environ['TMPDIR']); tempfile.tempdir = None"),
    Fault("the second fork is refused", "return 1", "BlockingIOError: .*Resource temporarily unavailable", before=REFUSED, alone=True),
]  # fmt: skip


@dataclass
class Row:
    """What happened: the error the user saw, seconds until control was back, what was left."""

    backend: str
    name: str
    seconds: float
    left: int
    files: int
    again: bool
    why: str

    @property
    def passed(self) -> bool:
        return not self.why


class Bench:
    """A kernel whose temporary files go to a folder of its own."""

    def __init__(self, backend: str, wrap: tuple[str, ...] = (), served: bool = False):
        self.backend, self.folder = backend, Path(tempfile.mkdtemp(prefix="faults-"))
        self._clock = self.folder / "clock"
        self._clock.write_bytes(bytes(8))
        environ = {"TMPDIR": str(self.folder), "PYTHONPATH": str(Path(__file__).parents[2])}
        self.kernel = ServedKernel(environ) if served else Kernel(environ, wrap)
        try:
            self.kernel.run(
                SETUP.replace("{backend!r}", repr(backend)).replace(
                    "{clock!r}", repr(str(self._clock))
                )
            )
            assert self.kernel.error is None, self.kernel.error
            self.kernel.run("launch(fine)")  # imports are not part of any fault
            self.before = self.files()
        except BaseException:
            self.close()
            raise

    def noted(self) -> float:
        """Return when the fault came about, 0 if it has not."""
        return struct.unpack("d", self._clock.read_bytes())[0]

    @contextlib.contextmanager
    def interrupted(self, after: tuple[float, ...]) -> Iterator[None]:
        """Interrupt the cell that is run meanwhile, so many seconds after its fault has come about."""
        over = threading.Event()

        def interrupt() -> None:
            while not self.noted():
                if over.wait(0.02):
                    return
            began = time.monotonic()
            for seconds in after:
                if not over.wait(began + seconds - time.monotonic()):
                    self.kernel.manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def files(self) -> set[str]:
        """Return what lies in the temporary folder, in shared memory, and open in the kernel."""
        inside = {str(path) for path in self.folder.rglob("*") if "ipykernel" not in str(path)}
        inside |= {
            f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if was_left_by_a_worker(name)
        }
        # Where the temporary folder has too long a name.
        return inside | {
            str(path) for path in Path("/tmp").glob(f"tpukit-{self.kernel.process.pid}-*")
        }

    def close(self) -> None:
        self.kernel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def was_left_by_a_worker(name: str) -> bool:
    """Say whether a name in shared memory is torch's or joblib's, of a process that is no more."""
    made_by = re.match(r"(?:torch_|sem\.loky-|joblib_memmapping_folder_)(\d+)", name)
    return bool(made_by) and not psutil.pid_exists(int(made_by[1]))


def run_fault(fault: Fault, bench: Bench) -> Row:
    """Bring the fault about in the kernel, and see what the user sees, and what is left."""
    kernel, call = bench.kernel, fault.call
    if fault.before:
        kernel.run(fault.before.replace("{backend!r}", repr(bench.backend)))
        assert kernel.error is None, kernel.error
        bench.before |= bench.files()
    if fault.in_graph and bench.backend == "cpu":
        kernel.run(IN_GRAPH)
        assert kernel.error is None, kernel.error
        call = f"backend='in graph', {call}"
    body = "\n".join(f"    {line}" for line in fault.work.splitlines())
    kernel.run(f"result = seen = cause = None\ndef work(core):\n{body}")
    kernel.run("clock[:] = bytes(8)")
    began = time.time()
    with bench.interrupted(fault.interrupt) if fault.interrupt else contextlib.nullcontext():
        out = kernel.run(
            f"try:\n    result = launch(work, {call})\n"
            "except BaseException as error:\n"
            "    seen, cause = f'{type(error).__name__}: {error}', type(error.__cause__).__name__\n"
            "ended = time.time()",
            timeout=HANGS,
        )
    interrupted = kernel.error
    answers = kernel.run("print(repr((seen or '', cause, ended)))")
    seen, cause, ended = eval(answers) if not kernel.error else ("", "", time.time())  # noqa: S307
    seconds = ended - (bench.noted() or began) - max(fault.interrupt, default=0.0) - fault.patience
    psutil.wait_procs(kernel.workers(), timeout=HANGS)
    left = len(kernel.workers())
    deadline = (
        time.monotonic() + 60
    )  # what a process of another kernel leaves behind, its own kernel removes
    while (files := sorted(bench.files() - bench.before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    check = kernel.run(f"print(bool({fault.check or True}))").split()[-1:] == ["True"]
    again = "[[2.0, 2.0], [2.0, 2.0]]" in kernel.run("print(launch(fine).results)")
    problems = {
        f"saw {seen[:300]!r}": not re.search(fault.sees, seen) or (not fault.sees and seen),
        f"the cell ended with {interrupted}": interrupted is not None and not fault.interrupt,
        f"printed {out[-200:]!r}": not re.search(fault.prints, out),
        f"cause {cause}": fault.cause and cause != fault.cause,
        f"{left} processes left": left,
        f"{len(files)} files left, {', '.join(files[:2])}": files,
        f"not {fault.check}; printed {out[-200:]!r}": not check,
        "the next launch fails": not again,
    }
    return Row(
        bench.backend,
        fault.name,
        max(0.0, seconds),
        left,
        len(files),
        again,
        "; ".join(why for why, is_so in problems.items() if is_so),
    )


def end_of_kernel(name: str, backend: str, again: Bench) -> Row:
    """End a kernel in some way while workers of it, and a DataLoader process of each, wait; nothing may survive.

    `again` is another kernel, in which the next launch has to work.
    """
    bench = Bench(backend, served=name.startswith("notebook server"))
    kernel = bench.kernel
    try:
        loop = "for _ in core.batches(Data(-1, None), batch_size=4, workers=1): time.sleep(9999)"
        kernel.client.execute(f"def work(core):\n    {loop}\nlaunch(work)")
        workers = kernel.wait_for_workers(4)
        began = time.time()
        ENDS[name](kernel)
        _, alive = psutil.wait_procs(workers, timeout=HANGS)
        left = len([process for process in alive if is_alive(process)])
        seconds = time.time() - began
    finally:
        bench.close()
    works = "2.0" in again.kernel.run("print(launch(fine).results)")
    files = len(again.files() - again.before)
    why = "; ".join(
        filter(None, [f"{left} processes left" * bool(left), "the next launch fails" * (not works)])
    )
    return Row(backend, name, seconds, left, files, works, why)


def restart(kernel: Kernel) -> None:
    kernel.manager.restart_kernel(now=True)


def hang_up(kernel: Kernel) -> None:
    kernel.process.send_signal(1)


ENDS = {
    "kernel kill -9": lambda kernel: kernel.process.kill(),
    "kernel SIGTERM": lambda kernel: kernel.process.terminate(),
    "kernel restart": restart,
    "notebook server kill -9": lambda kernel: kernel.server.kill(),
    "terminal hang-up": hang_up,
}


class Benches:
    """The kernels in which faults are tried, those that can share one in one, made when they are first needed."""

    def __init__(self) -> None:
        self._shared: dict[tuple, Bench] = {}

    def __enter__(self) -> "Benches":
        return self

    def __exit__(self, *_: object) -> None:
        for bench in self._shared.values():
            bench.close()

    def tried(self, backend: str, name: str) -> Iterator[Row]:
        """Try a fault, or an end of the kernel, by name; one that fails, or cannot start, once more in a new kernel."""
        yield (row := self._try(backend, name))
        if not row.passed:
            yield dataclasses.replace(self._try(backend, name), name=f"  once more: {name}")

    def _try(self, backend: str, name: str) -> Row:
        fault = BY_NAME.get(name)
        key = backend, fault.wrap if fault else (), name if fault and fault.alone else ""
        try:
            if key not in self._shared:
                self._shared[key] = Bench(backend, fault.wrap if fault else ())
            row = (
                run_fault(fault, self._shared[key])
                if fault
                else end_of_kernel(name, backend, self._shared[key])
            )
        except (
            Exception
        ) as error:  # whatever it was, this row has not passed, and the others are still to come
            row = Row(
                backend,
                name,
                0.0,
                0,
                0,
                False,
                f"did not come to its end: {type(error).__name__}: {error}",
            )
        if (not row.passed or (fault and fault.alone)) and key in self._shared:
            self._shared.pop(key).close()
        return row


BY_NAME = {fault.name: fault for fault in FAULTS}


def names(backend: str, only_in_graph: bool = False) -> list[str]:
    """Return the faults that a backend can have, and the ways in which its kernel ends."""
    faults = [
        fault.name
        for fault in FAULTS
        if fault.runs_on(backend) and (fault.in_graph or not only_in_graph)
    ]
    return faults if only_in_graph else [*faults, *ENDS]


def run_all(backend: str, only: str, only_in_graph: bool = False) -> list[Row]:
    """Run the rows whose name has the word; of one that was tried twice the second counts."""
    rows = []
    with Benches() as benches:
        for name in names(backend, only_in_graph):
            if only not in name:
                continue
            if name in BY_NAME and BY_NAME[name].needs_root and not can_mount():
                print(f"not run here, it takes the right to mount: {name}", flush=True)
                continue
            for row in benches.tried(backend, name):
                if row.passed and row.seconds > MOST_SECONDS:
                    row = dataclasses.replace(row, why=f"{row.seconds:.1f} s")
                show(row)
            rows.append(row)
    return rows


def can_mount() -> bool:
    return subprocess.run([*tmpfs("/tmp/tpukit-tiny"), "true"], capture_output=True).returncode == 0


def show(row: Row) -> None:
    again = "yes" if row.again else "NO"
    print(
        f"{row.backend:<13}{row.name:<62}{row.seconds:>8.1f} s {row.left:>6} {row.files:>6} {again:>6}  {row.why or 'ok'}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend",
        choices=[*BACKENDS, "both"],
        default="both",
        help="both: the first two, and what is about the graph on the third, where it can be had",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has the word")
    asked = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the kernels would inherit deaf ears
    rows = []
    backends = [asked.backend]
    if asked.backend == "both":
        backends = ["cpu", "xla:cpu"] + ["xla:simulator"] * (why_not() is None)
    print(f"{'':<13}{'fault':<62}{'control':>10} {'left':>6} {'files':>6} {'again':>6}", flush=True)
    # Two at a time: most of a fault is waiting for what it leads to.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        only_in_graph = [len(backends) > 1 and backend == "xla:simulator" for backend in backends]
        for part in pool.map(run_all, backends, [asked.only] * len(backends), only_in_graph):
            rows += part
    passed = sum(row.passed for row in rows)
    slowest = max((row.seconds for row in rows), default=0.0)
    orphans = sum(row.left for row in rows)
    failed = [row for row in rows if not row.passed]
    if failed:  # once more: of a long output people are shown the end
        print(f"\n{len(failed)} failed")
        for row in failed:
            show(row)
    repeated = sum(row.name.startswith("  once more") for row in rows)
    summary = {
        "faults": len(rows),
        "passed": passed,
        "repeated": repeated,
        "max_seconds_to_control": round(slowest, 1),
        "orphans": orphans,
    }
    print(json.dumps(summary))
    return passed != len(rows)


if __name__ == "__main__":
    sys.exit(main())
