"""The environment check: the facts about this machine, its problems, and how to fix them.

Nothing here starts the runtime. Each function examines one subject, and returns one or several
`Finding`s: name, state ("ok", "info", "warning" or "failure"), fact and fix.
"""

import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from tpukit.essentials.display import Finding, Findings, TpukitError, human_size
from tpukit.essentials.environment.chip_holders import (
    ancestors,
    chip_holders,
    chip_nodes,
    command,
    open_sessions,
)
from tpukit.essentials.environment.hardware import TORCH_OF_TORCH_TPU, MachineInfo, numbers
from tpukit.essentials.environment.instructions import (
    how_to_get_a_tpu,
    how_to_restart,
    how_to_start_afresh,
)
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.session import (
    IMAGES,
    LATEST_IMAGE,
    ONE_PROCESS_VARIABLES,
    RELEASES,
    base,
    how_to_install,
    install_line,
    needed_changes,
    percent,
    torch_problem,
    wrong_image,
)

_GIB = 2**30
# torch and torch_xla 2.9.0 need 0.7 GiB per process (measured), without model, optimizer and
# batches.
_WORKER_MEMORY = 1 * _GIB
# Containers have 64 MiB of shared memory by default. A single batch of 128 float32 images of
# 3 x 224 x 224 pixels from a DataLoader's process needs 77 MB.
_LEAST_SHM = 1 * _GIB
_MOST_DRY_RUN_WORKERS = 8

_BF16 = (
    "makes float32 tensors bfloat16 on the device while their dtype says float32",
    ', and use `torch.autocast("xla", dtype=torch.bfloat16)` in the worker',
)
# Variables that torch_xla still reads, with surprising effects, and variables that no program reads
# any more. The second text of each follows the fix "del os.environ[...]".
_SWITCHES = {
    "XLA_USE_BF16": _BF16,
    "XLA_DOWNCAST_BF16": _BF16,
    "XLA_USE_FP16": ("is deprecated, and a TPU has no float16", ""),
    "XLA_DOWNCAST_FP16": ("is deprecated, and a TPU has no float16", ""),
    "XLA_USE_SPMD": ("gives all chips to one process and none to the others", ""),
    "XLA_TENSOR_ALLOCATOR_MAXSIZE": ("has no effect any more, because no program reads it", ""),
    "COLAB_TPU_ADDR": (
        "is the address of a TPU on another machine, a service that has ended on all platforms",
        "",
    ),
}
_OFF = ("", "0", "false", "False")
# Wrong values of these are harmless: no program reads XRT variables, and TORCH_DEVICE_* matters
# only if the kernel calls backward().
_HARMLESS = ("XRT_", "TORCH_DEVICE_")


class EnvironmentCheckError(TpukitError, RuntimeError):
    """`check` found a problem: a launch would fail or run on the wrong device."""


@dataclass(frozen=True, repr=False)
class Check(Findings):
    """The findings of a check, in order. It displays itself as a table.

    Attributes:
        findings: all findings.
        machine: the facts about the machine.
    """

    findings: tuple[Finding, ...]
    machine: MachineInfo

    @property
    def subject(self) -> str:
        """The machine in a few words: the beginning of the title."""
        return f"{self.machine.platform}, {self.machine.hardware}"

    def raise_for_failures(self) -> "Check":
        """Return this check if it has no failure.

        Raises:
            EnvironmentCheckError: there are failures; the message names each, with its fix.
        """
        if self.ok:
            return self
        facts = [f"{finding.name}: {finding.fact}" for finding in self.failures]
        fixes = [f"{finding.name}: {finding.fix}" for finding in self.failures if finding.fix]
        raise EnvironmentCheckError(
            f"not ready to launch: {len(self.failures)} of "
            f"{len(self.findings)} findings are failures",
            found="\n".join([self.machine.summary, *facts]),
            fix="\n".join(fixes),
        )


def check(machine: Machine = THIS_MACHINE, *, info: MachineInfo | None = None) -> Check:
    """Check whether this machine and kernel are ready to launch; list the fixes.

    `check` starts no runtime, imports no torch and opens no device. So you can call it before,
    between and after launches. It takes less than a second.

    Args:
        machine: the machine; this machine by default.
        info: the facts about the machine; None to read them.

    Returns:
        A `Check`, which displays itself as a table of findings.
    """
    info = info or MachineInfo.read(machine)
    environ = machine.environ
    # In the order of the table: the device and its software, then the kernel, then the machine.
    findings = (
        _chips(info, machine),
        _device(info, environ),
        _versions(info, environ),
        *_variables(info, environ),
        _runtime(info, started=machine.started()),
        *_sessions(),
        _in_use(info, machine),
        _tensorflow(info, machine.modules),
        _memory(info),
        _shm(info),
        _fork(info, environ, can_fork=machine.can_fork),
        _dry_run(info, machine.no_simulator()),
        *_fixes_of_upstream(info),
    )
    return Check(findings, machine=info)


def _chips(info: MachineInfo, machine: Machine) -> Finding:
    name = "TPU"
    evidence = info.evidence["chips"]
    if not info.chips:
        fact = (
            f"no TPU chip ({evidence}); a launch is a dry run on CPU "
            "processes, or uses the GPUs of this machine"
        )
        return Finding(name, "warning", fact=fact, fix=how_to_get_a_tpu(info))
    needs_torch_tpu = info.generation == "7x" and info.tpu_package == "torch_xla"
    if needs_torch_tpu or info.generation.startswith("unknown"):
        fact = f"{info.hardware}: torch_xla up to 2.9 does not support them and would use the CPU"
        fix = f"use a v5e or v6e TPU: {how_to_get_a_tpu(info)}"
        return Finding(name, "warning", fact=fact, fix=fix)
    if not chip_nodes(machine):
        dev = machine.dev
        nodes = f"no {dev}/accel*, no {dev}/vfio/*"
        fact = f"{info.hardware} on the PCI bus, but {nodes}: no process can open the chips"
        fix = (
            "start the container with `--privileged` or with `--device` for each chip; on a TPU "
            "VM, reboot the machine"
        )
        # On notebook platforms the user cannot start containers, only get a new one.
        if info.platform in IMAGES:
            fix = LATEST_IMAGE if wrong_image(info) else how_to_start_afresh(info)
        return Finding(name, "warning", fact=fact, fix=fix)
    return Finding(name, "ok", fact=f"{info.hardware} ({evidence})")


def _device(info: MachineInfo, environ: Mapping[str, str]) -> Finding:
    name = "PJRT_DEVICE"
    device = environ.get(name, "")
    if not info.chips:
        if device.startswith("TPU"):
            # torch_xla in the kernel would fail; a dry run sets the variable in its workers.
            fact = f"{device}, but there is no chip"
            return Finding(name, "warning", fact=fact, fix=f"`{_unset(name)}`")
        return Finding(name, "ok", fact=f"{device or 'unset'}, and there is no chip")
    if info.tpu_package == "torch_tpu":
        return Finding(name, "ok", fact=f"{device or 'unset'}: TorchTPU does not read it")
    if not device:
        fact = "unset: torch_xla chooses the device, and reports its choice only in a log"
        return Finding(name, "warning", fact=fact, fix="`tpukit.setup()`")
    if not device.startswith("TPU"):
        chips = f"although {info.hardware} are here"
        fact = f"{device}, {chips}: torch_xla would leave them unused, without a message"
        return Finding(name, "failure", fact=fact, fix=f'`os.environ["{name}"] = "TPU"`')
    return Finding(name, "ok", fact=device)


def _versions(info: MachineInfo, environ: Mapping[str, str]) -> Finding:
    name = "versions"
    problem = torch_problem(info)
    if problem:
        return Finding(name, "failure", fact=problem, fix=how_to_install(info))
    torch = info.versions["torch"]
    libtpu = info.versions.get("libtpu") or environ.get("TPU_LIBRARY_PATH")
    if info.tpu_package == "torch_tpu":
        return _torch_tpu_versions(info, torch, libtpu=libtpu)
    if not info.versions.get("torch_xla"):
        return _without_torch_xla(info, torch)
    return _torch_xla_versions(info, torch, libtpu=libtpu)


def _torch_tpu_versions(info: MachineInfo, torch: str, *, libtpu: str | None) -> Finding:
    name = "versions"
    fact = f"torch {torch}, torch_tpu {info.versions['torch_tpu']}"
    if torch_xla := info.versions.get("torch_xla"):
        other = f"torch_xla {torch_xla}, which is for another torch: a launch uses torch_tpu"
        fact += f" (and {other})"
    # Both make the import or the start of torch_tpu fail.
    is_too_old_for_it = numbers(torch) < TORCH_OF_TORCH_TPU
    lacks_libtpu = bool(info.chips) and not libtpu
    if is_too_old_for_it or lacks_libtpu:
        library = f"libtpu {libtpu}" if libtpu else "no libtpu"
        fact += f", {library}: torch_tpu needs libtpu, and torch 2.11 to 2.15"
        line = "pip install --upgrade 'torch>=2.11,<2.16' torch_tpu"
        fix = f"`{percent(info)}{line}`, then {how_to_restart(info)}"
        return Finding(name, "failure", fact=fact, fix=fix)
    if not info.chips:
        return Finding(name, "ok", fact=fact)
    fact += ": experimental, because tpukit's support of TorchTPU is not tested on a chip"
    fix = "launch anyway; or use an environment with torch 2.9 and torch_xla 2.9, "
    fix += "which is tested more"
    return Finding(name, "warning", fact=fact, fix=fix)


def _without_torch_xla(info: MachineInfo, torch: str) -> Finding:
    name = "versions"
    if not info.chips:
        fact = f"torch {torch}; no torch_xla, but a dry run on plain CPU processes does not need it"
        return Finding(name, "ok", fact=fact)
    if wrong := wrong_image(info):
        return Finding(name, "failure", fact=wrong, fix=LATEST_IMAGE)
    fix = how_to_install(info)
    if info.platform == "Kaggle":  # a notebook may be pinned to an old image
        fix = f"{LATEST_IMAGE}; or {fix}"
    elif not install_line(info) and base(torch) in RELEASES:
        fix = (
            "use Python 3.11 to 3.13 on Linux x86-64: torch_xla has no wheels for newer Python or "
            "other systems"
        )
    fact = f"torch {torch}, no torch_xla, so the chips cannot be used"
    return Finding(name, "failure", fact=fact, fix=fix)


def _torch_xla_versions(info: MachineInfo, torch: str, *, libtpu: str | None) -> Finding:
    name = "versions"
    torch_xla = info.versions["torch_xla"]
    release = RELEASES.get(base(torch))
    install = how_to_install(info)
    pair = f"torch {torch}, torch_xla {torch_xla}"
    # From the worst case to the mildest: no import, an untested pair, no libtpu, another libtpu.
    if numbers(torch) != numbers(torch_xla):
        fact = f"{pair}: these versions do not work together, and torch_xla will not import"
        return Finding(name, "failure", fact=fact, fix=install)
    if release is None or base(torch_xla) not in release.torch_xla:
        pairs = [f"torch {key} with torch_xla {r.torch_xla[-1]}" for key, r in RELEASES.items()]
        fact = f"{pair}: tpukit was not tested with this pair"
        fix = f"if a launch fails, use {' or '.join(pairs)}"
        return Finding(name, "warning", fact=fact, fix=fix)
    if not info.chips:
        return Finding(name, "ok", fact=pair)
    if not libtpu:
        fact = f"{pair}, no libtpu: torch_xla would use the CPU, without a message"
        return Finding(name, "failure", fact=fact, fix=install)
    if info.versions.get("libtpu") and libtpu not in release.libtpu:
        released = f"torch_xla {torch_xla} was released with libtpu {release.libtpu[-1]}"
        fact = f"libtpu {libtpu}, but {released}"
        return Finding(name, "warning", fact=fact, fix=install)
    return Finding(name, "ok", fact=f"{pair}, libtpu {libtpu}")


def _variables(info: MachineInfo, environ: Mapping[str, str]) -> list[Finding]:
    found = _changed_by_setup(info, environ)
    for variable, (fact, instead) in _SWITCHES.items():
        if environ.get(variable, "") not in _OFF:
            fix = f"`{_unset(variable)}`{instead}"
            found.append(Finding("variables", "warning", fact=f"{variable} {fact}", fix=fix))
    if info.chips > 1:
        for variable in ONE_PROCESS_VARIABLES:
            if variable in environ:
                found.append(_one_process_variable(variable, environ[variable], chips=info.chips))
    return found or [Finding("variables", "ok", fact="none that would mislead torch_xla")]


def _changed_by_setup(info: MachineInfo, environ: Mapping[str, str]) -> list[Finding]:
    """Return a finding for each variable that `tpukit.setup()` would change."""
    found = []
    for change in needed_changes(environ, info):
        if change.variable == "PJRT_DEVICE":  # `_device` reports it
            continue
        # A single chip starts without addresses, so wrong ones are harmless there. With MEGASCALE_*
        # even a single chip waits for other slices.
        waits = info.chips and change.variable.startswith("MEGASCALE_")
        is_harmless = change.variable.startswith(_HARMLESS) or (info.chips <= 1 and not waits)
        state = "warning" if is_harmless else "failure"
        now = f"{change.variable}={change.before}"
        if change.before is None:
            now = f"no {change.variable}"
        fact = f"{now}: {change.why}"
        found.append(Finding("variables", state, fact=fact, fix="`tpukit.setup()`"))
    return found


def _one_process_variable(variable: str, value: str, *, chips: int) -> Finding:
    inherited = f"all {chips} workers would inherit it"
    fact = f"{variable}={value}: meant for one process, but {inherited}"
    fix = f"`{_unset(variable)}`, unless several notebooks share the chips"
    return Finding("variables", "failure", fact=fact, fix=fix)


def _runtime(info: MachineInfo, *, started: bool) -> Finding:
    if not started:
        return Finding("runtime", "ok", fact="not started in this kernel, as it should be")
    fact = "this kernel has started the XLA runtime, so forked workers cannot start theirs"
    fix = "call torch_xla.device(), xm.master_print() and similar functions only in the worker"
    return Finding("runtime", "failure", fact=fact, fix=f"{how_to_restart(info)}; {fix}")


def _sessions() -> Iterator[Finding]:
    """Yield a finding for each open session of this kernel."""
    for session in open_sessions:
        held = "; launch cannot use its chips until session.close()" if session.holds_chips else ""
        yield Finding("session", "ok", fact=f"open on {session.cores}{held}")


def _in_use(info: MachineInfo, machine: Machine) -> Finding:
    name = "in use"
    if not info.chips:
        return Finding(name, "ok", fact="no chip that could be in use")
    holders: dict[int, list[str]] = {}  # a process may hold several chips
    for process, node in chip_holders(machine):
        holders.setdefault(process, []).append(node)
    if not holders:
        return Finding(name, "ok", fact="no process that is visible from here holds a chip")
    own = os.getpid()
    facts = []
    fixes = []
    for pid, nodes in holders.items():
        chips = nodes[0] if len(nodes) == 1 else f"{len(nodes)} chips"
        if pid == own:
            facts.append(f"this kernel (process {pid}) has opened {chips}")
            fixes.append(how_to_restart(info))
            continue
        # From the general to the special: a session's worker is a child of this kernel, too.
        relation = "another program"
        end = "shut down its notebook"
        if own in ancestors(machine.proc, pid):
            relation = "a child of this kernel"
            end = "wait for its launch to end"
        if any(pid in session.processes for session in open_sessions):
            relation = "a worker of this kernel's session"
            end = "session.close()"
        facts.append(f"process {pid}, {relation}, holds {chips}: {command(machine.proc, pid)}")
        fixes.append(f"{end}, or `!kill {pid}`")
    unique_fixes = dict.fromkeys(fixes)  # an ordered set
    return Finding(name, "failure", fact="\n".join(facts), fix="; ".join(unique_fixes))


def _tensorflow(info: MachineInfo, modules: Container[str]) -> Finding:
    name = "TensorFlow"
    versions = info.versions
    # tensorflow-cpu is not in the list, because it does not load libtpu.
    packages = [each for each in ("tensorflow", "tensorflow-tpu") if versions.get(each)]
    if not packages:
        fact = "not installed"
        if cpu := versions.get("tensorflow-cpu"):
            fact = f"tensorflow-cpu {cpu}, which does not touch the chips"
        return Finding(name, "ok", fact=fact)
    package = packages[0]
    if not info.chips or not versions.get("torch_xla"):
        fact = f"{package} {versions[package]}, but no TPU that it could block for torch_xla"
        return Finding(name, "ok", fact=fact)
    commands = f"`pip uninstall -y {package}`, `pip install tensorflow-cpu`"
    fix = f"{commands}, then {how_to_restart(info)}"
    library = "libtpu, the library of the TPU"
    # A package that is only installed does no harm yet, so that is a warning.
    if "tensorflow" in modules:
        fact = f"{package} is imported in this kernel and may have loaded {library}, for itself"
        return Finding(name, "failure", fact=fact, fix=fix)
    fact = f"{package} {versions[package]} loads {library}, for itself when it is imported"
    return Finding(name, "warning", fact=fact, fix=fix)


def _memory(info: MachineInfo) -> Finding:
    name = "memory"
    source = info.evidence["memory"]
    if info.memory is None:
        return Finding(name, "ok", fact=f"unknown: {source}")
    dry_run_workers = min(_MOST_DRY_RUN_WORKERS, max(2, info.cpus))
    # torch_xla has a process per chip, TorchTPU a process per core.
    tpu_workers = info.cores if info.tpu_package == "torch_tpu" else info.chips
    workers = tpu_workers or dry_run_workers  # as many as a launch would start
    fact = f"{human_size(info.memory)} for {workers} workers ({source})"
    processes = workers + 1  # the kernel is one more
    if info.memory < _WORKER_MEMORY * processes:
        fact += ": each needs at least about 1 GiB"
        fix = f"use a machine with {processes} GiB or more, or launch with cores=1"
        return Finding(name, "warning", fact=fact, fix=fix)
    return Finding(name, "ok", fact=fact)


def _shm(info: MachineInfo) -> Finding:
    name = "/dev/shm"
    if info.shm is None:
        return Finding(name, "ok", fact="this system has none and needs none")
    fact = human_size(info.shm)
    if info.shm < _LEAST_SHM:
        fact += ": the worker processes of a DataLoader pass their batches through it"
        fix = "use num_workers=0, or core.batches without workers=; "
        fix += "or start the container with `--shm-size=8g`"
        return Finding(name, "warning", fact=fact, fix=fix)
    return Finding(name, "ok", fact=fact)


def _fork(info: MachineInfo, environ: Mapping[str, str], *, can_fork: bool) -> Finding:
    name = "fork"
    if not can_fork:
        fact = f"{info.system} cannot fork: a launch is a dry run on one core, in this kernel"
        fix = "for several cores use Linux (on Windows: WSL 2), Colab or Kaggle"
        return Finding(name, "warning", fact=fact, fix=fix)
    is_safe = environ.get("OBJC_DISABLE_INITIALIZE_FORK_SAFETY") == "YES"
    if info.system.startswith("Darwin") and not is_safe:
        fact = "possible, but macOS kills a forked worker that uses certain system frameworks"
        fix = "start Jupyter with OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES"
        return Finding(name, "warning", fact=fact, fix=fix)
    return Finding(name, "ok", fact="possible")


def _dry_run(info: MachineInfo, no_simulator: str | None) -> Finding:
    """List the dry runs that this machine offers."""
    cpu = 'CPU processes (`backend="cpu"`)'
    # A simulated TPU comes before XLA:CPU, because it runs torch_xla's code for TPUs.
    if info.chips:
        fact = f"not needed, there are chips; {cpu} take their place on request"
    elif info.tpu_package == "torch_tpu" and not no_simulator:
        fact = f'{cpu}, or TorchTPU on a simulated TPU (`backend="torch_tpu"`)'
    elif not info.versions.get("torch_xla"):
        fact = f"{cpu}; a dry run of graphs needs torch_xla"
    elif no_simulator:
        fact = (
            f"{cpu}, or XLA:CPU processes joined by gloo "
            f'(`backend="xla"`); no simulated TPU: {no_simulator}'
        )
    else:
        fact = f'{cpu}, or torch_xla\'s own TPU client on a simulated TPU (`backend="xla"`)'
    return Finding("dry run", "ok", fact=fact)


def _fixes_of_upstream(info: MachineInfo) -> list[Finding]:
    """Return a finding about the defects in packages that a launch corrects; [] for none."""
    if info.tpu_package == "torch_tpu":
        fact = (
            "a launch corrects TorchTPU 0.2.0: BatchNorm and InstanceNorm update their "
            "running statistics"
        )
    elif info.versions.get("torch_xla"):
        fact = (
            "a launch corrects torch_xla 2.8 and 2.9: the running variance of BatchNorm and "
            "InstanceNorm is that of PyTorch, and Adam has fewer operations, with equal results"
        )
    else:
        return []
    return [Finding("patches", "info", fact=f"{fact} (docs/in_sync.md)")]


def _unset(variable: str) -> str:
    return f'del os.environ["{variable}"]'
