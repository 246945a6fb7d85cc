"""The simulator's library is compiled once, safely, and says what is missing where it cannot be."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tpukit.accelerators import BuildError
from tpukit.simulator import build, shapes

SOURCES = Path(build.__file__).parent


@pytest.fixture
def plugin(tmp_path):
    """A folder of packages with a plugin in it that tells a version; returns a function that makes one."""

    def install(header="#define PJRT_API_MAJOR 0\n#define PJRT_API_MINOR 81\n"):
        folder = tmp_path / "packages" / "xla_plugins" / "xla_cpu_pjrt"
        (folder / "include").mkdir(parents=True)
        (folder / "xla_cpu_pjrt.so").touch()
        (folder / "include" / "pjrt_c_api.h").write_text(header)
        return [str(tmp_path / "packages")]

    return install


def compiler(folder, script):
    folder.mkdir(exist_ok=True)
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"CC": str(file), "PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(folder / "cache")}


WORKS = """case "$*" in *--version*) echo 1.0; exit;; esac
while [ "$1" != -o ]; do shift; done
echo compiled >> "$(dirname "$0")/runs"
echo library > "$2\""""


def test_it_was_built_for_pjrt_0_81_and_what_is_installed_is_one_of_these():
    assert build.BUILT_FOR == ((0, 81),)
    installed = build.find_plugin()
    if installed is None:
        pytest.skip(build.why_not())
    if installed.version not in build.BUILT_FOR:
        pytest.skip(build.why_not())
    assert build.why_not() is None or "compiler" in build.why_not()


@pytest.mark.parametrize(
    ("system", "machine"),
    [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")],
    ids=lambda value: value,
)
def test_other_systems_are_told_that_torch_xla_is_not_there_either(system, machine):
    reason = build.why_not(system=system, machine=machine)
    found = f"torch_xla runs on Linux on x86-64 only, and this is {system} on {machine}"
    assert reason == f"{found}: use a machine with Linux on x86-64"


def test_a_missing_plugin_names_the_extra_that_brings_it(tmp_path):
    reason = build.why_not(path=[str(tmp_path)], system="linux", machine="x86_64")
    assert reason == "the PJRT plugin for the CPU is not installed: pip install xla_cpu_pjrt==0.0.1"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("#define PJRT_API_MAJOR 0\n#define PJRT_API_MINOR 106\n", "PJRT 0.106"),
        ("#define PJRT_API_MAJOR 1\n#define PJRT_API_MINOR 81\n", "PJRT 1.81"),
        ("// nothing\n", "PJRT no version"),
    ],
)
def test_a_plugin_of_another_version_is_refused_with_both(header, found, plugin):
    reason = build.why_not(path=plugin(header), system="linux", machine="x86_64")
    assert reason.startswith(
        f"the installed plugin has {found}, and the simulator was built for 0.81: pip install"
    )


@pytest.mark.parametrize(
    ("environ", "wanted", "fix"),
    [
        ({"PATH": "/nowhere"}, "cc, gcc or clang", "apt-get install gcc libc6-dev"),
        ({"PATH": "/nowhere", "CC": "/no/such/cc"}, "CC=/no/such/cc", "set CC to an installed C"),
    ],
    ids=["none on the PATH", "CC that is not there"],
)
def test_a_missing_compiler_says_what_was_looked_for(environ, wanted, fix, plugin):
    reason = build.why_not(path=plugin(), environ=environ, system="linux", machine="x86_64")
    assert reason.startswith(f"no C compiler is here ({wanted} is not on the PATH): {fix}")


def test_what_is_missing_is_raised_as_fact_evidence_and_fix(tmp_path):
    with pytest.raises(build.SimulatorError) as raised:
        build.library(path=[str(tmp_path)])
    fact, found, fix = str(raised.value).splitlines()
    assert fact == "this machine cannot simulate a TPU"
    assert found.startswith("  found: ")
    assert fix.startswith("  fix:   ")


def test_it_is_compiled_once_and_again_when_a_source_or_the_compiler_changes(tmp_path, plugin):
    path, environ, sources = plugin(), compiler(tmp_path / "one", WORKS), tmp_path / "sources"
    sources.mkdir()
    (sources / "plugin.c").write_text("int a;")
    first = build.library(path=path, environ=environ, sources=sources)
    assert first == build.library(path=path, environ=environ, sources=sources)
    assert first.parent == tmp_path / "one" / "cache" / "tpukit"
    (sources / "plugin.c").write_text("int b;")
    second = build.library(path=path, environ=environ, sources=sources)
    assert second != first
    assert (tmp_path / "one" / "runs").read_text() == "compiled\n" * 2
    other = compiler(tmp_path / "two", WORKS.replace("1.0", "2.0")) | {
        "XDG_CACHE_HOME": environ["XDG_CACHE_HOME"]
    }
    assert build.library(path=path, environ=other, sources=sources) not in (first, second)


def test_a_compiler_that_fails_is_quoted(tmp_path, plugin):
    says = 'case "$*" in *--version*) exit;; esac; echo warming up >&2; echo "plugin.c:7: error: no such thing" >&2'
    says += "; exit 4"
    with pytest.raises(BuildError) as raised:
        build.library(path=plugin(), environ=compiler(tmp_path / "bad", says))
    assert "ended with status 4: plugin.c:7: error: no such thing" in str(raised.value)
    assert "fix:   set CC to another compiler" in str(raised.value)
    assert list((tmp_path / "bad" / "cache" / "tpukit").iterdir()) == []


def test_without_a_cache_folder_it_is_kept_where_only_this_user_can_write(
    tmp_path, plugin, monkeypatch
):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "a file").touch()
    environ = compiler(tmp_path / "one", WORKS) | {"XDG_CACHE_HOME": str(tmp_path / "a file")}
    kept = build.library(path=plugin(), environ=environ)
    assert kept.parent == tmp_path / f"tpukit-{os.getuid()}"
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_folder_that_others_can_write_to_is_not_used(mode, tmp_path, plugin, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    environ = compiler(tmp_path / "one", WORKS)
    shared = tmp_path / "one" / "cache" / "tpukit"
    shared.mkdir(parents=True)
    shared.chmod(mode)
    kept = build.library(path=plugin(), environ=environ)
    assert kept.parent == tmp_path / f"tpukit-{os.getuid()}"


def test_two_processes_that_compile_at_once_both_get_it_whole(tmp_path, plugin):
    path, environ = (
        plugin(),
        compiler(tmp_path / "slow", WORKS.replace("echo library", "sleep 0.5; echo library")),
    )
    code = f"from tpukit.simulator import build\nkept = build.library(path={path!r}, environ={environ!r})\n"
    code += "print(kept.read_text())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=600)[0].strip() for process in processes] == [
        "library",
        "library",
    ]
    assert [file.suffix for file in (tmp_path / "slow" / "cache" / "tpukit").iterdir()] == [".so"]


def test_the_sources_compile_without_a_warning(library, tmp_path):
    headers = build.find_plugin().headers
    for file in SOURCES.glob("*.c"):
        command = [
            "cc",
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{headers}",
            '-DSOURCES="a"',
            "-c",
            str(file),
        ]
        subprocess.run([*command, "-o", str(tmp_path / "object.o")], check=True, timeout=600)


def test_looking_for_it_loads_no_torch():
    code = (
        "import sys; from tpukit.simulator import build, shapes; build.why_not(); shapes.dry_run(2)\n"
        "sys.exit(bool({'torch', 'torch_xla', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_machine_s_bounds_fit_its_chips_or_are_colab_s(name):
    shape = shapes.SHAPES[name]
    bounds = [int(bound) for bound in shape.environ["TPU_CHIPS_PER_HOST_BOUNDS"].split(",")]
    assert bounds[0] * bounds[1] * bounds[2] == (4 if name.startswith("colab") else shape.chips)
    assert re.fullmatch(r"v\d[a-z]*-\d+", shape.environ["TPU_ACCELERATOR_TYPE"])


def test_kaggle_s_machine_has_kaggle_s_own_address():
    assert shapes.SHAPES["kaggle v5e-8"].environ["TPU_PROCESS_ADDRESSES"] == "local"


@pytest.mark.parametrize("cores", [0, 9, -1])
def test_a_dry_run_has_one_to_eight_cores(cores):
    with pytest.raises(ValueError, match=f"the simulator has 1 to 8 cores, got {cores}"):
        shapes.dry_run(cores)


def test_the_environment_names_everything_the_library_reads():
    environ = shapes.environment(
        shapes.SHAPES["v3-8"], library=Path("/l.so"), plugin=Path("/p.so"), memory="/m"
    )
    assert environ["TPU_LIBRARY_PATH"] == "/l.so"
    assert (environ["PJRT_DEVICE"], environ["TPU_SKIP_MDS_QUERY"], environ["TPU_WORKER_ID"]) == (
        "TPU",
        "1",
        "0",
    )
    read = set(
        re.findall(
            r'"(SIMULATOR_[A-Z_]+)"', "".join(file.read_text() for file in SOURCES.glob("*.c"))
        )
    )
    optional = {
        "SIMULATOR_TIMEOUT",
        "SIMULATOR_ORDER",
        "SIMULATOR_BUSY_UNTIL",
        "SIMULATOR_LOG",
        "SIMULATOR_RECORD",
    }
    assert read - optional == {name for name in environ if name.startswith("SIMULATOR_")}
