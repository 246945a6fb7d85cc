"""The runtime check: what this machine has, what is wrong, and what to do about it, without starting the runtime."""

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass

from tpukit.essentials.display import Finding, Findings, human_size
from tpukit.essentials.environment.chip_holders import ancestors, chip_holders, chip_nodes, command
from tpukit.essentials.environment.hardware import TORCH_OF_TORCH_TPU, MachineInfo, numbers
from tpukit.essentials.environment.instructions import how_to_get_a_tpu, how_to_restart, how_to_start_afresh
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.session import (
    IMAGES,
    OLDEST_TORCH,
    ONE_PROCESS_VARIABLES,
    RELEASES,
    base,
    install_line,
    is_too_old,
    needed_changes,
)

_GIB = 2**30
# torch and torch_xla 2.9.0 take 0.7 GiB per process (measured); model, optimizer and batches come on top.
_WORKER_MEMORY = 1 * _GIB
# Containers have 64 MiB by default; one batch of 128 float32 images of 224 px from a DataLoader worker takes 77 MB.
_LEAST_SHM = 1 * _GIB

_BF16 = (
    "makes float32 tensors bfloat16 on the device while their dtype says float32",
    ', and use `torch.autocast("xla", dtype=torch.bfloat16)` in the worker',
)
# Switches that torch_xla still obeys, with effects that surprise, and switches that nothing reads any more.
_SWITCHES = {
    "XLA_USE_BF16": _BF16,
    "XLA_DOWNCAST_BF16": _BF16,
    "XLA_USE_FP16": ("is deprecated, and a TPU has no float16", ""),
    "XLA_DOWNCAST_FP16": ("is deprecated, and a TPU has no float16", ""),
    "XLA_USE_SPMD": ("gives all chips to one process and none to the others", ""),
    "XLA_TENSOR_ALLOCATOR_MAXSIZE": ("is no longer read by anything", ""),
    "COLAB_TPU_ADDR": ("is the address of a TPU on another machine, which no platform offers any more", ""),
}


class EnvironmentCheckError(RuntimeError):
    """The runtime check found something that would make a launch fail, or run on the wrong device."""


@dataclass(frozen=True, repr=False)
class Check(Findings):
    """All findings, in order: a table, as text or in a notebook."""

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
        lines = [f"not ready to launch: {len(self.failures)} of {len(self.findings)} findings are failures."]
        lines.append(f"  found: {self.machine.summary}")
        for finding in self.failures:
            lines += [f"  {finding.name}: {finding.fact}", f"  fix:   {finding.fix}"]
        raise EnvironmentCheckError("\n".join(lines))


def check(machine: Machine = THIS_MACHINE, *, info: MachineInfo | None = None) -> Check:
    """Check whether this machine and this kernel are ready to launch, and what to do where they are not.

    Starts no runtime, imports no torch and opens no device, so it can be called before, between and after launches; it
    takes a few milliseconds. `info` is what is known of the machine already.
    """
    info, environ = info or MachineInfo.read(machine), machine.environ
    return Check(
        findings=(
            _chips(info, machine),
            _device(info, environ),
            _versions(info, environ),
            *_variables(info, environ),
            _runtime(info, machine.started()),
            _in_use(info, machine),
            _tensorflow(info, machine.modules),
            _memory(info),
            _shm(info),
            _fork(info, environ, machine.can_fork),
            _rehearsal(info, machine.no_simulator()),
            *_fixes_of_upstream(info),
        ),
        machine=info,
    )


def _chips(info: MachineInfo, machine: Machine) -> Finding:
    name, evidence = "TPU", info.evidence["chips"]
    if not info.chips:
        fact = f"no TPU chip ({evidence}); a launch is a rehearsal on CPU processes, or uses the GPUs there are"
        return Finding(name, "warning", fact, how_to_get_a_tpu(info))
    if info.generation.startswith("unknown"):
        fact = f"{info.hardware}: torch_xla up to 2.9 does not know this kind and would use the CPU"
        return Finding(name, "warning", fact, f"take a v5e or v6e TPU: {how_to_get_a_tpu(info)}")
    if not chip_nodes(machine):
        dev = machine.dev
        fact = f"{info.hardware} on the PCI bus, but no {dev}/accel*, no {dev}/vfio/*: no process can open them"
        fix = "start the container with `--privileged`, or with the devices; on a TPU VM, reboot it"
        return Finding(name, "warning", fact, how_to_start_afresh(info) if info.platform in IMAGES else fix)
    return Finding(name, "ok", f"{info.hardware} ({evidence})")


def _device(info: MachineInfo, environ: Mapping[str, str]) -> Finding:
    name, device = "PJRT_DEVICE", environ.get("PJRT_DEVICE", "")
    if not info.chips:
        if device.startswith("TPU"):
            return Finding(name, "warning", f"{device}, but there is no chip", f"`{_unset(name)}`")
        return Finding(name, "ok", f"{device or 'unset'}, and there is no chip")
    if info.tpu_package == "torch_tpu":
        return Finding(name, "ok", f"{device or 'unset'}: TorchTPU does not read it")
    if not device:
        fact = "unset: torch_xla chooses the device, and only its log says which"
        return Finding(name, "warning", fact, "`tpukit.setup()`")
    if not device.startswith("TPU"):
        fact = f"{device}, although {info.hardware} are here: torch_xla would not use them, without a message"
        return Finding(name, "failure", fact, f'`os.environ["{name}"] = "TPU"`')
    return Finding(name, "ok", device)


def _versions(info: MachineInfo, environ: Mapping[str, str]) -> Finding:
    name, versions = "versions", info.versions
    torch, torch_xla = versions.get("torch"), versions.get("torch_xla")
    libtpu = versions.get("libtpu") or environ.get("TPU_LIBRARY_PATH")
    release = RELEASES.get(base(torch or ""))
    pair = f"torch {torch}, torch_xla {torch_xla}"
    line = install_line(info)
    percent = "%" if info.platform in ("Colab", "Kaggle") else ""
    install = f"`{percent}{line}`, then {how_to_restart(info)}" if line else how_to_start_afresh(info)
    if not torch:
        return Finding(name, "failure", "torch is not installed", install)
    if is_too_old(torch):
        fact = f"torch {torch}: this kit needs {OLDEST_TORCH} or later, and launch refuses it"
        return Finding(name, "failure", fact, install)
    if versions.get("torch_tpu") and info.tpu_package == "torch_tpu":
        fact = f"torch {torch}, torch_tpu {versions['torch_tpu']}"
        if torch_xla:
            fact += f" (and torch_xla {torch_xla}, which is for another torch: a launch takes torch_tpu)"
        if numbers(torch) < TORCH_OF_TORCH_TPU or (info.chips and not libtpu):
            fix = f"`{percent}pip install --upgrade 'torch>=2.11,<2.16' torch_tpu`, then {how_to_restart(info)}"
            return Finding(name, "failure", f"{fact}, libtpu {libtpu}: it needs libtpu, and torch 2.11 to 2.15", fix)
        if not info.chips:
            return Finding(name, "ok", fact)
        fix = "launch all the same; or take an environment with torch 2.9 and torch_xla 2.9, which is tested more"
        return Finding(name, "warning", f"{fact}: experimental, not yet run on a chip by this kit", fix)
    if not torch_xla:
        if not info.chips:
            return Finding(name, "ok", f"torch {torch}; no torch_xla, but a rehearsal on plain CPU does not need it")
        if not line:
            install = "use Python 3.11 to 3.13 on Linux x86-64: torch_xla has no wheel for newer ones or other systems"
            if release is None:
                install = how_to_start_afresh(info)
        elif info.platform == "Kaggle":  # an old notebook keeps its old image, which may be for CPUs
            install = f"Session options > Environment > Always use latest environment, or {install}"
        return Finding(name, "failure", f"torch {torch}, no torch_xla, so the chips cannot be used", install)
    if numbers(torch) != numbers(torch_xla):
        fact = f"{pair}: these versions do not work together, and torch_xla will not import"
        return Finding(name, "failure", fact, install)
    if release is None or base(torch_xla) not in release.torch_xla:
        known = " or ".join(f"torch {t} with torch_xla {r.torch_xla[-1]}" for t, r in RELEASES.items())
        fact = f"{pair}: this kit was not tested with this pair"
        return Finding(name, "warning", fact, f"if a launch fails, use {known}")
    if not info.chips:
        return Finding(name, "ok", pair)
    if not libtpu:
        return Finding(name, "failure", f"{pair}, no libtpu: torch_xla would use the CPU, without a message", install)
    if versions.get("libtpu") and libtpu not in release.libtpu:
        fact = f"libtpu {libtpu} with torch_xla {torch_xla}, which was released with {release.libtpu[-1]}"
        return Finding(name, "warning", fact, install)
    return Finding(name, "ok", f"{pair}, libtpu {libtpu}")


def _variables(info: MachineInfo, environ: Mapping[str, str]) -> list[Finding]:
    name, found = "variables", []
    for change in needed_changes(environ, info):
        if change.variable == "PJRT_DEVICE":  # it has its own finding
            continue
        # One chip is started without addresses, nothing reads XRT variables, and a kernel need not call backward().
        harmless = change.variable.startswith(("XRT_", "TORCH_DEVICE_"))
        state = "failure" if info.chips > 1 and not harmless else "warning"
        now = f"no {change.variable}" if change.before is None else f"{change.variable}={change.before}"
        found.append(Finding(name, state, f"{now}: {change.why}", "`tpukit.setup()`"))
    for variable, (fact, instead) in _SWITCHES.items():
        if environ.get(variable, "") not in ("", "0", "false", "False"):
            found.append(Finding(name, "warning", f"{variable} {fact}", f"`{_unset(variable)}`{instead}"))
    for variable in ONE_PROCESS_VARIABLES if info.chips > 1 else ():
        if variable in environ:
            value = environ[variable]
            fact = f"{variable}={value}: meant for one process, but all {info.chips} workers would inherit it"
            fix = f"`{_unset(variable)}`, unless several notebooks share the chips"
            found.append(Finding(name, "failure", fact, fix))
    return found or [Finding(name, "ok", "none that would mislead torch_xla")]


def _runtime(info: MachineInfo, started: bool) -> Finding:
    if started:
        fact = "this kernel has started the XLA runtime, so forked workers cannot start theirs"
        fix = "call torch_xla.device(), xm.master_print() and the like only inside the worker"
        return Finding("runtime", "failure", fact, f"{how_to_restart(info)}; {fix}")
    return Finding("runtime", "ok", "not started in this kernel, as it should be")


def _in_use(info: MachineInfo, machine: Machine) -> Finding:
    name, proc = "in use", machine.proc
    if not info.chips:
        return Finding(name, "ok", "no chip that could be in use")
    holders = {}
    for process, node in chip_holders(machine):
        holders.setdefault(process, []).append(node)
    if not holders:
        return Finding(name, "ok", "no process that is visible from here holds a chip")
    own = os.getpid()
    facts, fixes = [], []
    for pid, nodes in holders.items():
        chips = nodes[0] if len(nodes) == 1 else f"{len(nodes)} chips"
        if pid == own:
            facts.append(f"this kernel (process {pid}) holds {chips}")
            fixes.append(how_to_restart(info))
            continue
        relation = "a child of this kernel" if own in ancestors(proc, pid) else "another program"
        facts.append(f"process {pid}, {relation}, holds {chips}: {command(proc, pid)}")
        end = "wait for its launch to end" if relation.startswith("a child") else "shut down its notebook"
        fixes.append(f"{end}, or `!kill {pid}`")
    return Finding(name, "failure", "\n".join(facts), "; ".join(dict.fromkeys(fixes)))


def _tensorflow(info: MachineInfo, modules: Container[str]) -> Finding:
    name, versions = "TensorFlow", info.versions
    package = next((package for package in ("tensorflow", "tensorflow-tpu") if versions.get(package)), None)
    if package is None:
        cpu = versions.get("tensorflow-cpu")
        return Finding(name, "ok", f"tensorflow-cpu {cpu}, which does not touch the chips" if cpu else "not installed")
    if not (info.chips and versions.get("torch_xla")):
        return Finding(name, "ok", f"{package} {versions[package]}, but there is no TPU it could take")
    fix = f"`pip uninstall -y {package}`, `pip install tensorflow-cpu`, then {how_to_restart(info)}"
    if "tensorflow" in modules:
        fact = f"{package} is imported in this kernel and may hold libtpu, the library of the TPU"
        return Finding(name, "failure", fact, fix)
    fact = f"{package} {versions[package]} takes libtpu, the library of the TPU, once it is imported"
    return Finding(name, "warning", fact, fix)


def _memory(info: MachineInfo) -> Finding:
    name, source = "memory", info.evidence["memory"]
    if info.memory is None:
        return Finding(name, "ok", f"unknown: {source}")
    workers = info.cores or min(8, max(2, info.cpus))  # as many as launch would start
    fact = f"{human_size(info.memory)} for {workers} workers ({source})"
    if info.memory < _WORKER_MEMORY * (workers + 1):  # one more for the kernel
        fix = f"take a machine with {workers + 1} GiB or more, or launch with cores=1"
        return Finding(name, "warning", f"{fact}: each needs at least about 1 GiB", fix)
    return Finding(name, "ok", fact)


def _shm(info: MachineInfo) -> Finding:
    name = "/dev/shm"
    if info.shm is None:
        return Finding(name, "ok", "this system has none and needs none")
    if info.shm < _LEAST_SHM:
        fact = f"{human_size(info.shm)}: the worker processes of a DataLoader pass their batches through it"
        fix = "keep num_workers=0, as core.batches does; or start the container with `--shm-size=8g`"
        return Finding(name, "warning", fact, fix)
    return Finding(name, "ok", human_size(info.shm))


def _fork(info: MachineInfo, environ: Mapping[str, str], can_fork: bool) -> Finding:
    name = "fork"
    if not can_fork:
        fact = f"{info.system} cannot fork: a launch rehearses on one core, in this kernel itself"
        return Finding(name, "warning", fact, "for several cores use Linux (on Windows: WSL 2), Colab or Kaggle")
    if info.system.startswith("Darwin") and environ.get("OBJC_DISABLE_INITIALIZE_FORK_SAFETY") != "YES":
        fact = "possible, but macOS kills a forked worker that uses certain system frameworks"
        return Finding(name, "warning", fact, "start Jupyter with OBJC_DISABLE_INITIALIZE_FORK_SAFETY=YES")
    return Finding(name, "ok", "possible")


def _rehearsal(info: MachineInfo, no_simulator: str | None) -> Finding:
    name, cpu = "rehearsal", 'CPU processes (`backend="cpu"`)'
    if info.chips:
        return Finding(name, "ok", f"not needed, there are chips; {cpu} stand in for them on request")
    if info.tpu_package == "torch_tpu" and not no_simulator:
        return Finding(name, "ok", f'{cpu}, or TorchTPU over a stand-in for libtpu (`backend="torch_tpu"`)')
    if not info.versions.get("torch_xla"):
        return Finding(name, "ok", f"{cpu}; graphs cannot be rehearsed without torch_xla")
    if no_simulator:
        fact = f'{cpu}, or XLA:CPU processes joined by gloo (`backend="xla"`); no stand-in for libtpu: {no_simulator}'
        return Finding(name, "ok", fact)
    fact = f'{cpu}, or torch_xla\'s own TPU client over a stand-in for libtpu (`backend="xla"`)'
    return Finding(name, "ok", fact)


def _fixes_of_upstream(info: MachineInfo) -> list[Finding]:
    """List the defects of installed packages that a launch corrects, in one row; none if there are none."""
    if info.tpu_package == "torch_tpu":
        fact = "TorchTPU 0.2.0: running statistics of BatchNorm and InstanceNorm are updated"
    elif info.versions.get("torch_xla"):
        fact = "torch_xla 2.8, 2.9: running variances by n - 1; Adam is one operation, with the same bits"
    else:
        return []
    return [Finding("corrected", "info", f"{fact} (no issue upstream; docs/in_sync.md)")]


def _unset(variable: str) -> str:
    return f'del os.environ["{variable}"]'
