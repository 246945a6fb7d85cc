"""Compile a graph for a TPU with libtpu, in a separate process, and cache the result.

libtpu may end its process with SIGABRT, or need more memory than the machine has. So it runs in a
small C program, `tpukit-compile`. This program compiles `module.hlo` for a topology without a chip,
and writes files into its working folder:

    numbers      lines of "name value": bytes of memory, flops, bytes accessed
    optimized    the compiled program as HLO, with an estimate of cycles for each operation
    kept/        the program as a launch caches it, if the caller passes `kept`
    error        the call that failed, and the compiler's message

A complete folder is moved into the cache by a rename, so a killed process never leaves a partial
result there. The name of the folder is a digest of everything that determines the result.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import human_size, screen
from tpukit.essentials.environment import available_memory, write_whole
from tpukit.preflight.hlo import Program, read_program, without_sources
from tpukit.preflight.libtpu import find_libtpu, platform_version
from tpukit.preflight.recording import Graph, PreflightError
from tpukit.profiling import Tpu
from tpukit.simulator import CompileCache, cache_folder, program

_LOOK_SECONDS = 0.2  # between two checks of the compiler's process
_FILES = ("numbers", "optimized", "facts")  # the files of a complete result
_UNITS = " KMGT"  # units of the compiler's sizes; the index of a letter is the power of 1024


class CompileError(PreflightError):
    """The TPU's compiler could not compile a graph.

    Attributes:
        words: the compiler's message.
    """

    words = ""


class OutOfMemoryError(CompileError):
    """The graph needs more memory than a core has.

    Attributes:
        needed: the bytes of HBM in the compiler's message; None if the message has no number.
        limit: the bytes that the graph may use; None if the message has no number.
    """

    needed: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Compiled:
    """A graph that libtpu has compiled. Sizes are those in the HBM of one core.

    Attributes:
        chip: the TPU for which the graph was compiled.
        libtpu: the version of the compiler.
        seconds: the duration of the compilation.
        argument_bytes: bytes of the arguments: weights, the optimizer's state and the batch.
        output_bytes: bytes of the results, such as the new weights.
        alias_bytes: bytes of the results that overwrite arguments.
        temporary_bytes: bytes of intermediate results.
        code_bytes: bytes of the program itself.
        flops, bytes_accessed: the result of the compiler's cost analysis of the whole program.
        optimized: the optimised program, a serialised HloModuleProtoWithConfig of libtpu.
        is_cached: True if the result came from the cache.
    """

    chip: Tpu
    libtpu: str
    seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    flops: float
    bytes_accessed: float
    optimized: bytes = field(repr=False)
    is_cached: bool = False

    @property
    def hbm_bytes(self) -> int:
        """The bytes of HBM that one run of the program needs."""
        arguments_and_outputs = self.argument_bytes + self.output_bytes - self.alias_bytes
        return arguments_and_outputs + self.temporary_bytes + self.code_bytes

    @cached_property
    def program(self) -> Program:
        """The optimised program."""
        return read_program(self.optimized)

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate of cycles, without those of collectives."""
        return sum(operation.cycles or 0 for operation in self.program.operations)


@dataclass(frozen=True)
class _Job:
    """A graph to compile. The result depends on all fields except the last two."""

    module: bytes
    options: bytes
    chip: Tpu
    libtpu: str
    flags: str
    progress: str | None
    timeout: float | None  # seconds

    @property
    def bounds(self) -> str:
        """The number of chips per axis of the host, which libtpu needs only for a single chip."""
        return "1,1,1" if self.chip.chips == 1 else ""

    @property
    def digest(self) -> str:
        """The name of the result in the cache."""
        machine = f"{self.chip.topology} {self.bounds} {self.libtpu} {self.flags}"
        key = hashlib.sha256()
        for part in (self.module, self.options, machine.encode()):
            # With the length, so that different parts with the same joined bytes have other keys.
            key.update(len(part).to_bytes(8, "little") + part)
        return key.hexdigest()[:32]


def compile_graph(
    graph: Graph,
    chip: Tpu,
    *,
    libtpu: str | None = None,
    flags: str = "",
    label: str = "the step",
    kept: CompileCache | None = None,
    progress: str | None = None,
    timeout: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Compiled:
    """Compile a graph for a chip, or return the cached result of the same graph.

    Args:
        graph: a graph from `record`, recorded for the number of cores of the chip.
        chip: the TPU for which to compile.
        flags: the LIBTPU_INIT_ARGS of the compiler.
        label: the name of the graph in messages.
        kept: the compilation cache of a launch, into which the compiled program is also written;
            None for no such cache.
        libtpu, progress, timeout: as in `preflight`.
        environ: the environment variables that determine the cache folder.

    Raises:
        OutOfMemoryError: the graph needs more memory than a core has.
        CompileError: the compiler could not compile the graph, its process was killed, or it took
            longer than `timeout`.
        LibtpuNotFoundError: see `find_libtpu`.
    """
    version = libtpu or platform_version()
    title = f"libtpu {version} compiles {label} for {chip.name}"
    job = _Job(
        module=without_sources(graph.module),
        options=graph.options,
        chip=chip,
        libtpu=version,
        flags=flags,
        progress=progress,
        timeout=timeout,
    )
    cached = cache_folder(environ) / "compiled" / job.digest
    is_complete = all((cached / name).is_file() for name in _FILES)
    if is_complete and (kept is None or _hand_on(cached, kept)):
        return _read(cached, chip, is_cached=True)
    library = find_libtpu(version, environ=environ)
    compiler = program("tpukit-compile", Path(__file__).parent, environ=environ)
    cached.parent.mkdir(mode=0o700, exist_ok=True)
    _remove_left_behind(cached.parent)
    prefix = f"compiling-{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix=prefix) as temporary:
        folder = Path(temporary) / "made"
        folder.mkdir(mode=0o700)
        command = [str(compiler), str(library), chip.topology, job.bounds, str(folder)]
        if kept:
            (folder / "kept").mkdir(mode=0o700)
            command.append(kept.library._name)
        # The result of a call without `kept`, or one of which files are missing.
        shutil.rmtree(cached, ignore_errors=True)
        _compile(job, command, folder, title=title)
        # OSError: another process has compiled the same graph meanwhile, and its result is used.
        with contextlib.suppress(OSError):
            os.rename(folder, cached)
        if kept and not _hand_on(cached, kept):
            fact = f"libtpu {version} cannot write the program that it has compiled"
            raise CompileError(fact, fix="call it without keep=, or with another version of libtpu")
        return _read(cached, chip, is_cached=False)


def _hand_on(cached: Path, kept: CompileCache) -> bool:
    """Copy the compiled program from the cache to the folder `kept`; False if there is none."""
    files = list(cached.glob("kept/*.pjrt"))
    for file in files:
        with write_whole(kept.folders[0] / file.name) as copy:
            copy.write(file.read_bytes())
    return bool(files)


def _remove_left_behind(folder: Path) -> None:
    """Remove the temporary folders of processes that were killed during a compilation."""
    for found in folder.glob("compiling-*"):
        pid = found.name.split("-")[1]
        is_running = pid.isdigit() and Path(f"/proc/{pid}").exists()
        if not is_running:
            shutil.rmtree(found, ignore_errors=True)


def _read(folder: Path, chip: Tpu, *, is_cached: bool) -> Compiled:
    facts = json.loads((folder / "facts").read_text())
    lines = (folder / "numbers").read_text().splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines)
    sizes = {name: int(value) for name, value in numbers.items() if name.endswith("_bytes")}
    return Compiled(
        chip=chip,
        libtpu=facts["libtpu"],
        seconds=facts["seconds"],
        **sizes,
        flops=float(numbers.get("cost.flops", "nan")),
        bytes_accessed=float(numbers.get("cost.bytes accessed", "nan")),
        optimized=(folder / "optimized").read_bytes(),
        is_cached=is_cached,
    )


def _compile(job: _Job, command: list[str], folder: Path, *, title: str) -> None:
    """Run the compiler's process in a folder; at the end the folder has all files of a result.

    Raises:
        CompileError: the compilation failed, or took longer than the job's timeout.
    """
    module = folder / "module.hlo"
    module.write_bytes(job.module)
    (folder / "options.pb").write_bytes(job.options)
    began = time.monotonic()
    output = folder / "said"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=_environment(job.flags),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=folder,
        )
        try:
            most_memory = _wait(process, job, title=title)
        finally:
            if process.poll() is None:  # an interrupt of the notebook, or the timeout
                process.kill()
                process.wait()
    if process.returncode:
        printed = output.read_text(errors="replace").strip()
        ended = _Ended(process.returncode, printed, most_memory)
        raise _failure(ended, folder / "error", title=title, chip=job.chip)
    facts = {"libtpu": job.libtpu, "seconds": time.monotonic() - began}
    (folder / "facts").write_text(json.dumps(facts))
    module.unlink()


def _environment(flags: str) -> dict[str, str]:
    """Return the environment of the compiler's process, without the user's variables for TPUs."""
    variables = {
        # libtpu must not query a metadata server, lock chips or write log files. The accelerator
        # type is always a v5e, because the topology determines the target: for v4, v5p or v6e,
        # libtpu would need a file that only such a machine has, and ends with SIGABRT.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "LIBTPU_INIT_ARGS": flags,
    }
    of_tpus = ("TPU_", "LIBTPU_", "PJRT_", "XLA_FLAGS")
    others = {name: value for name, value in os.environ.items() if not name.startswith(of_tpus)}
    return others | variables


def _wait(process: subprocess.Popen, job: _Job, *, title: str) -> int:
    """Show progress until the process ends; return its peak host memory in bytes.

    Raises:
        CompileError: the process took longer than the job's timeout.
    """
    began = time.monotonic()
    most = 0
    with screen(job.progress) as display:
        while process.poll() is None:
            seconds = time.monotonic() - began
            if job.timeout is not None and seconds > job.timeout:
                fact = f"{title}: not finished after {job.timeout:g} s"
                raise CompileError(fact, fix="pass a larger timeout=")
            # Noted while the process runs, because afterwards the system no longer has it.
            most = max(most, _peak_memory(process.pid))
            display.status(f"{title}: {seconds:.0f} s, {human_size(most)} of host memory")
            display.draw()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
    return most


def _peak_memory(pid: int) -> int:
    """Return the peak host memory of a process so far, in bytes; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


class _Ended(NamedTuple):
    """The end of the compiler's process."""

    status: int  # the exit status; negative for a signal
    printed: str  # the output
    most_memory: int  # the peak host memory in bytes


def _failure(ended: _Ended, error: Path, *, title: str, chip: Tpu) -> CompileError:
    """Return the error for a process that failed.

    Args:
        ended: the end of the process.
        error: the path of the file `error`, which exists if libtpu itself reported an error.
        title: the text on the compilation, for the message.
        chip: the TPU.
    """
    if error.is_file():
        step, _, words = error.read_text(errors="replace").partition("\n")
        return _refusal(step, words.strip(), title=title, chip=chip)
    last_lines = " | ".join(ended.printed.splitlines()[-3:])[:600] or "nothing"
    found = f"it printed: {last_lines}"
    if ended.status > 0:
        fact = f"{title}, and ended with status {ended.status}"
        return CompileError(fact, found=found, words=ended.printed)
    # A negative status is the signal that ended the process. The system sends SIGKILL if memory is
    # short, and libtpu's failed assertions send SIGABRT.
    name = signal.Signals(-ended.status).name
    fix = "report this with the graph: the compiler failed; or try another version of libtpu"
    if name == "SIGKILL":
        cause = "most likely the machine ran out of memory"
        fix = f"{cause}: close other notebooks, or use a machine with more memory"
    used = f"it had {human_size(ended.most_memory)} of host memory"
    free = f"{human_size(available_memory())} are available now"
    return CompileError(
        f"{title}, but its process was ended by {name}",
        found=f"{used}, {free}; {found}",
        fix=fix,
        words=ended.printed,
    )


# libtpu's message for a program that needs too much memory: "Used 17.54G of 15.75G hbm".
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
# libtpu's message if a single array is larger than the memory; sizes are in bytes.
_ONE_ARRAY = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")


def _refusal(step: str, words: str, *, title: str, chip: Tpu) -> CompileError:
    """Return the error for a message of the compiler.

    Args:
        step: the call of libtpu that failed: "load", "topology", "compile" or another one.
        words: the compiler's message.
        title: the text on the compilation, for the message.
        chip: the TPU.
    """
    first = words.splitlines()[0][:400] if words else "nothing"
    # libtpu has no codes for its reasons, so its words decide.
    is_memory = "RESOURCE_EXHAUSTED" in words or "Ran out of memory" in words
    if "hbm" in words and (is_memory or _ONE_ARRAY.search(words)):
        return _does_not_fit(first, words, chip)
    topology = chip.topology
    fixes = {
        "load": "fetch it again: remove its folder, then tpukit.preflight.fetch_libtpu()",
        "topology": f"another version or chip: this version of libtpu does not know {topology}",
        "compile": "replace the operation in the compiler's message: a TPU does not support it, or "
        "not for this dtype",
    }
    return CompileError(
        f"{title}, but this step failed: {step}",
        found=first,
        fix=fixes.get(step, "another version of libtpu"),
        words=words,
    )


def _does_not_fit(first: str, words: str, chip: Tpu) -> OutOfMemoryError:
    needed = None
    limit = None
    if one_array := _ONE_ARRAY.search(words):  # one array alone, before the others are counted
        needed = int(one_array[1])
        limit = int(one_array[2])
    elif used := _USED.search(words):
        needed = _bytes(used[1], used[2])
        limit = _bytes(used[3], used[4])
    fact = f"it does not fit into the memory of a {chip.generation} core"
    if needed:
        fact += f", {human_size(needed - limit)} too much"
    fix = "a smaller batch, bfloat16, or a chip with more memory"
    return OutOfMemoryError(
        fact,
        found=first,
        fix=f"{fix}; tpukit.preflight.largest_batch finds such a batch",
        words=words,
        needed=needed,
        limit=limit,
    )


def _bytes(number: str, unit: str) -> int:
    """Return the bytes of "1.5" and "G", or of a number without a unit."""
    power = _UNITS.index(unit) if unit else 0
    return int(float(number) * 1024**power)
