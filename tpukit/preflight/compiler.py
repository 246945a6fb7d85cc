"""A graph compiled for a TPU by libtpu, in a process of its own, and kept."""

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

from tpukit.essentials.machine import available_memory, write_whole
from tpukit.essentials.show import human_size, screen
from tpukit.measure import Tpu
from tpukit.preflight.hlo import Program, read_program, without_sources
from tpukit.preflight.libtpu import find_libtpu, platform_version
from tpukit.preflight.recording import Graph, NoPreflight
from tpukit.standin import KeptCompiles, cache_folder, program

_LOOK_SECONDS = 0.2
_FILES = ("numbers", "optimized", "facts")


class CompileFailed(NoPreflight):
    """The TPU's compiler refused a graph.

    Attributes:
        words: the compiler's own.
    """

    words = ""


class DoesNotFit(CompileFailed):
    """The graph needs more memory than a core has.

    Attributes:
        needed: bytes of HBM, as far as the compiler said; None if it did not.
        limit: bytes that it may use; None if it did not say.
    """

    needed: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Compiled:
    """What libtpu made of a graph; bytes are of HBM, a core.

    Attributes:
        chip: it was compiled for.
        libtpu: the compiler's version.
        seconds: that the compiler took, when it did.
        argument_bytes, output_bytes: weights, the optimiser's state and the batch; what takes their place.
        alias_bytes: outputs that are written where arguments were.
        temporary_bytes: everything in between.
        code_bytes: the program itself.
        flops, bytes_accessed: by the compiler's cost analysis of the whole program.
        optimized: the program as it would run, HloModuleProto as libtpu gives it.
        is_cached: whether it came from the cache.
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
        """HBM that one run of the program takes."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes + self.code_bytes

    @cached_property
    def program(self) -> Program:
        """The optimised program."""
        return read_program(self.optimized)

    @cached_property
    def cycles(self) -> int:
        """The sum of the compiler's estimates over the program's operations; collectives have none."""
        return sum(one.cycles or 0 for one in self.program.operations)


def compile_graph(
    graph: Graph,
    chip: Tpu,
    *,
    libtpu: str | None = None,
    flags: str = "",
    label: str = "the step",
    kept: KeptCompiles | None = None,
    progress: str | None = None,
    timeout: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Compiled:
    """Compile a graph for a chip, or return what an earlier call made of the same graph.

    Args:
        graph: from `record`, for as many cores as the chip has.
        flags: what libtpu gets as LIBTPU_INIT_ARGS.
        label: what is compiled, in words.
        kept: the folder that gets the compiled program as a launch would have kept it there.
        libtpu, progress, timeout: as in `preflight`.

    Raises:
        DoesNotFit: a core has too little memory.
        CompileFailed: the compiler refused the graph, or its process was ended.
        NoLibtpu: see `find_libtpu`.
    """
    version = libtpu or platform_version()
    module = without_sources(graph.module)
    place = _place(module, graph.options, chip, version, flags, environ)
    if all((place / name).is_file() for name in _FILES) and (kept is None or _hand_on(place, kept)):
        return _read(place, chip, is_cached=True)
    library = find_libtpu(version, environ=environ)
    compiler = program("tpukit-compile", Path(__file__).parent, environ=environ)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    _remove_left_behind(place.parent)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"compiling-{os.getpid()}-") as folder:
        made = Path(folder) / "made"
        made.mkdir(mode=0o700)
        (made / "module.hlo").write_bytes(module)
        (made / "options.pb").write_bytes(graph.options)
        began = time.monotonic()
        command = [str(compiler), str(library), chip.topology, _bounds(chip), str(made)]
        if kept:
            (made / "kept").mkdir(mode=0o700)
            command.append(kept.library._name)
            shutil.rmtree(place, ignore_errors=True)  # of a call that kept nothing
        _run(command, chip, flags, made, f"libtpu {version} compiles {label} for {chip.name}", progress, timeout)
        facts = {"libtpu": version, "seconds": time.monotonic() - began}
        (made / "facts").write_text(json.dumps(facts))
        (made / "module.hlo").unlink()
        with contextlib.suppress(OSError):  # another process has just done the same
            os.rename(made, place)
        if kept and not _hand_on(place, kept):
            raise CompileFailed(
                f"libtpu {version} cannot write what it has compiled", fix="the same without keep, or another version"
            )
        return _read(place, chip, is_cached=False)


def _hand_on(place: Path, kept: KeptCompiles) -> bool:
    """Copy the compiled program to where it is to be kept; False where there is none."""
    files = list(place.glob("kept/*.pjrt"))
    for file in files:
        with write_whole(kept.folders[0] / file.name) as copy:
            copy.write(file.read_bytes())
    return bool(files)


def _bounds(chip: Tpu) -> str:
    """Return the chips of a host as libtpu wants to be told of one chip; of more, the topology says it."""
    return "1,1,1" if chip.chips == 1 else ""


def _remove_left_behind(folder: Path) -> None:
    """Remove what processes that were killed while they compiled have left."""
    for found in folder.glob("compiling-*"):
        pid = found.name.split("-")[1]
        if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(found, ignore_errors=True)


def _place(module: bytes, options: bytes, chip: Tpu, version: str, flags: str, environ: Mapping[str, str]) -> Path:
    key = hashlib.sha256()
    for part in (module, options, f"{chip.topology} {_bounds(chip)} {version} {flags}".encode()):
        key.update(len(part).to_bytes(8, "little") + part)
    return cache_folder(environ) / "compiled" / key.hexdigest()[:32]


def _read(folder: Path, chip: Tpu, *, is_cached: bool) -> Compiled:
    facts = json.loads((folder / "facts").read_text())
    numbers = dict(line.rsplit(" ", 1) for line in (folder / "numbers").read_text().splitlines())
    return Compiled(
        chip=chip,
        libtpu=facts["libtpu"],
        seconds=facts["seconds"],
        **{name: int(value) for name, value in numbers.items() if name.endswith("_bytes")},
        flops=float(numbers.get("cost.flops", "nan")),
        bytes_accessed=float(numbers.get("cost.bytes accessed", "nan")),
        optimized=(folder / "optimized").read_bytes(),
        is_cached=is_cached,
    )


def _run(
    command: list[str], chip: Tpu, flags: str, folder: Path, what: str, progress: str | None, timeout: float | None
) -> None:
    variables = {
        # No look-ups, no lock on chips that are not there, no log files. The topology decides what is compiled for;
        # with a v4, v5p or v6e as the accelerator libtpu wants a file of its machine, and ends with SIGABRT.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "LIBTPU_INIT_ARGS": flags,
    }
    own = ("TPU_", "LIBTPU_", "PJRT_", "XLA_FLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    said = folder / "said"
    with said.open("wb") as output, screen(progress) as display:
        process = subprocess.Popen(
            command, env=kept | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder
        )
        began, most = time.monotonic(), 0
        try:
            while process.poll() is None:
                seconds = time.monotonic() - began
                if timeout is not None and seconds > timeout:
                    raise CompileFailed(f"{what}: no end after {timeout:g} s", fix="a larger timeout")
                most = max(most, _memory(process.pid))
                display.status(f"{what}: {seconds:.0f} s, {human_size(most)} of host memory")
                display.draw()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        words = said.read_text(errors="replace").strip()
        raise _failure(process.returncode, folder / "error", words, what, chip, most)


def _memory(pid: int) -> int:
    """Return the most host memory that a process has had, in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def _failure(status: int, error: Path, said: str, what: str, chip: Tpu, most: int) -> CompileFailed:
    if error.is_file():
        step, _, words = error.read_text(errors="replace").partition("\n")
        return _refused(step, words.strip(), what, chip)
    last = " | ".join(said.splitlines()[-3:])[:600] or "nothing"
    if status < 0:
        name = signal.Signals(-status).name
        fix = "report this with the graph: the compiler itself failed; another version of libtpu may not"
        if name == "SIGKILL":
            fix = "most likely the machine ran out of memory: close other notebooks, or take a machine with more"
        free = human_size(available_memory())
        return CompileFailed(
            f"{what}, and was ended by {name}",
            found=f"it had {human_size(most)} of host memory, {free} are available now; it printed: {last}",
            fix=fix,
            words=said,
        )
    return CompileFailed(f"{what}, and ended with status {status}", found=f"it printed: {last}", words=said)


_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_ONE_ARRAY = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")


def _refused(step: str, words: str, what: str, chip: Tpu) -> CompileFailed:
    first = words.splitlines()[0][:400] if words else "nothing"
    too_large = _ONE_ARRAY.search(words)  # one array alone, before the others are counted
    if "hbm" in words and (too_large or "RESOURCE_EXHAUSTED" in words or "Ran out of memory" in words):
        found = _USED.search(words)
        needed, limit = (_bytes(found[1], found[2]), _bytes(found[3], found[4])) if found else (None, None)
        if too_large:
            needed, limit = int(too_large[1]), int(too_large[2])
        over = f", {human_size(needed - limit)} too much" if needed else ""
        return DoesNotFit(
            f"it does not fit into the memory of a {chip.generation} core{over}",
            found=first,
            fix=(
                "a smaller batch, bfloat16, or a chip with more memory; tpukit.preflight.largest_batch finds the batch"
            ),
            words=words,
            needed=needed,
            limit=limit,
        )
    fixes = {
        "load": "fetch it again: remove its folder, then tpukit.preflight.fetch_libtpu()",
        "topology": f"this version of libtpu does not know {chip.topology}: another version, or another chip",
        "compile": "change what is named there; the compiler for a TPU has no such operation, or not for this type",
    }
    return CompileFailed(
        f"{what}, and failed at: {step}", found=first, fix=fixes.get(step, "another version of libtpu"), words=words
    )


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** (" KMGT".index(unit) if unit else 0))
