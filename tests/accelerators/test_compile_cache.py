"""What is compiled is kept in a folder, and the next launch loads it: with the same bits, and never from a bad file."""

import hashlib
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tpukit
from tpukit import launch
from tpukit.accelerators import c_library, compile_cache
from tpukit.essentials.backends import runtimes
from tpukit.essentials.environment import KEEP_VARIABLE, folders_of
from tpukit.simulator import build

SOURCES = Path(compile_cache.__file__).parent / "kept"
PARTS = ("program", "options", "flags", "plugin", "version", "topology")
# Magic, the key's parts, the key, size and first bytes of the topology, the content's digest and size.
HEAD = struct.Struct(f"<8s{32 * len(PARTS)}s32sQ120s32sQ")

STANDS_IN = pytest.mark.skipif(build.why_not() is not None, reason=build.why_not() or "")
pytestmark = pytest.mark.xla


def train(core, limit=None):
    """Train for three steps, which takes three programs or more; with a limit no file may grow beyond it."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    torch.manual_seed(0)
    model = core.model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        inputs = torch.randn(8, 16, generator=numbers).to(core.device)
        with core.step():
            loss = model(inputs).square().mean()
            loss.backward()
            core.optimizer_step(optimizer)
        losses.append(loss.item())
        optimizer.zero_grad()
    losses.append(model(inputs).mean().item())
    compiled, loaded = core.backend.compiles()[0], core.backend.loads()[0]
    return losses, compiled, loaded, str(tpukit.profiling.report(core))


def trained(folder, *args, cores=1, **options):
    """Launch, and return the losses, and how many programs all cores have compiled and loaded."""
    run = launch(
        train,
        *args,
        cores=cores,
        backend="xla:simulator",
        progress="off",
        seed=0,
        compile_cache=folder,
        **options,
    )
    assert len({str(losses) for losses, *_ in run.results}) == 1
    return run.results[0][0], sum(one[1] for one in run.results), sum(one[2] for one in run.results)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """What one core has kept, and its losses; a test that changes the folder takes a copy."""
    folder = tmp_path_factory.mktemp("first") / "kept"
    losses, compiled, loaded = trained(folder)
    assert (compiled, loaded) == (len(list(folder.iterdir())), 0)
    return folder, losses, compiled


@STANDS_IN
def test_a_second_launch_loads_what_the_first_has_compiled_and_comes_to_the_same_bits(
    first, tmp_path, capsys
):
    folder, losses, compiled = first
    other = tmp_path / "written"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert trained([other, folder]) == (
        losses,
        0,
        compiled,
    )  # the second of a list is read, and not written
    assert list(other.iterdir()) == []
    said = capsys.readouterr().out
    assert re.search(
        rf"compiled programs: {compiled} programs loaded in \d+\.\d s \({other}\)", said
    )
    assert "not used" not in said
    assert trained(False) == (losses, compiled, 0)


@STANDS_IN
def test_the_report_counts_what_was_loaded_as_loaded(first):
    (result,) = launch(
        train, cores=1, backend="xla:simulator", progress="off", seed=0, compile_cache=first[0]
    ).results
    found = " ".join(result[3].split())
    assert f"0 graphs compiled in 0.0 s, {first[2]} compiled before and loaded in" in found
    assert "went into compiling" not in found


@STANDS_IN
def test_a_file_is_magic_key_checksum_length_and_content(first):
    files = sorted(first[0].iterdir())
    parts = [HEAD.unpack_from(file.read_bytes())[1] for file in files]
    for file in files:
        magic, of_key, key, *_, digest, size = HEAD.unpack_from(file.read_bytes())
        content = file.read_bytes()[HEAD.size :]
        assert (magic, size, digest) == (
            b"TPUKEEP\1",
            len(content),
            hashlib.sha256(content).digest(),
        )
        assert key == hashlib.sha256(of_key).digest()  # and so this SHA-256 is Python's
        assert file.name == f"{key[:16].hex()}.pjrt"
    programs, *others = (
        {part[32 * at : 32 * at + 32] for part in parts} for at in range(len(PARTS))
    )
    assert len(programs) == len(files)
    assert [len(one) for one in others] == [1] * len(others)  # only the program sets them apart
    assert bytes(32) not in set.union(*others)  # nothing could not be asked for


@STANDS_IN
@pytest.mark.parametrize("cores", [2, pytest.param(8, marks=pytest.mark.soak)])
def test_processes_that_start_at_once_compile_each_program_once(cores, tmp_path, capsys, how_often):
    for turn in range(how_often(1, 5)):
        folder = tmp_path / str(turn)
        losses, compiled, loaded = trained(folder, cores=cores)
        files = list(folder.iterdir())
        assert [file.suffix for file in files] == [".pjrt"] * compiled
        assert compiled + loaded == cores * compiled
        assert f"compiled programs by {cores} processes: " in capsys.readouterr().out
        assert trained(folder, cores=cores) == (losses, 0, cores * compiled)


@STANDS_IN
def test_prepare_names_the_folder_for_all_launches(first, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(first[0], tmp_path / "kept")
    monkeypatch.delenv(KEEP_VARIABLE, raising=False)
    assert [one.variable for one in tpukit.setup(compile_cache=folder).changes][-1:] == [
        KEEP_VARIABLE
    ]
    assert trained(None) == (first[1], 0, first[2])
    jobs = tpukit.launch_each(
        lambda core, _: train(core), [1], backend="xla:simulator", progress="off", seed=0
    )
    assert jobs.runs[0].results[0][:3] == (first[1], 0, first[2])
    capsys.readouterr()
    tpukit.setup(compile_cache=False)
    assert "not kept any more" in capsys.readouterr().out
    assert KEEP_VARIABLE not in os.environ
    assert len(tpukit.setup(compile_cache=False)) == 0


@STANDS_IN
def test_another_version_of_the_plugin_has_files_of_its_own(first, tmp_path, monkeypatch):
    folder = shutil.copytree(first[0], tmp_path / "kept")
    sources = shutil.copytree(Path(build.__file__).parent, tmp_path / "sources")
    (sources / "plugin.c").write_text((sources / "plugin.c").read_text() + "// a later version\n")
    later = build.library(sources=sources, environ={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    with monkeypatch.context() as patch:
        patch.setattr("tpukit.simulator.runtime.library", lambda: later)
        assert trained(folder) == (first[1], first[2], 0)
        assert trained(folder) == (first[1], 0, first[2])
    assert len(list(folder.iterdir())) == 2 * first[2]
    assert trained(folder) == (first[1], 0, first[2])


def rewritten(file, content):
    """Write another content under a header that fits it: only the plugin itself can refuse that."""
    *head, _, _ = HEAD.unpack_from(file.read_bytes())
    file.write_bytes(HEAD.pack(*head, hashlib.sha256(content).digest(), len(content)) + content)


def changed(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def in_its_place(file, make):
    file.unlink()
    make(file)


def said_to_be_longer(file):
    content = bytearray(file.read_bytes())
    content[HEAD.size - 8 : HEAD.size] = (2**62).to_bytes(8, "little")
    file.write_bytes(content)


DAMAGE = {
    "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "a part of a header": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "one bit flipped": lambda file: changed(file, file.stat().st_size // 2),
    "of an older version": lambda file: changed(file, 7),
    "of another program": lambda file: file.write_bytes(
        max(file.parent.iterdir(), key=os.path.getsize).read_bytes()
    ),
    "longer than it says": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "shorter than it says": said_to_be_longer,
    "a stranger's": lambda file: file.write_bytes(b"not a program\n" * 100),
    "a pipe that nobody writes to": lambda file: in_its_place(file, os.mkfifo),
    "a link to a stranger's": lambda file: in_its_place(
        file, lambda file: file.symlink_to("/etc/hostname")
    ),
    "text under a header that fits": lambda file: rewritten(file, b"not a program\n" * 100),
    "nothing under a header that fits": lambda file: rewritten(file, b""),
}


@STANDS_IN
@pytest.mark.parametrize(
    "at", range(0, len(DAMAGE), 2), ids=lambda at: " and ".join([*DAMAGE][at : at + 2])
)
def test_a_damaged_or_foreign_file_is_compiled_anew_and_mended(at, first, tmp_path, capfd):
    folder, losses, compiled = first
    mine, kinds = shutil.copytree(folder, tmp_path / "kept"), [*DAMAGE][at : at + 2]
    for kind, file in zip(kinds, sorted(mine.iterdir(), key=os.path.getsize), strict=False):
        DAMAGE[kind](file)
    assert trained(mine) == (losses, len(kinds), compiled - len(kinds))
    said = capfd.readouterr().out
    found = re.findall(
        r"\.pjrt is not used: it is damaged, or another version has written it|rejects a stored program",
        said,
    )
    assert len(found) == len({"under a header" in kind for kind in kinds})  # each said once
    assert [file.name for file in sorted(mine.iterdir())] == [
        file.name for file in sorted(folder.iterdir())
    ]
    assert trained(mine) == (losses, 0, compiled)


@STANDS_IN
def test_a_folder_in_the_place_of_a_file_stays_and_is_said(first, tmp_path, capfd):
    mine = shutil.copytree(first[0], tmp_path / "kept")
    in_its_place(next(mine.iterdir()), Path.mkdir)
    assert trained(mine) == (first[1], 1, first[2] - 1)
    assert f"no program is stored in {mine}: Is a directory" in capfd.readouterr().out


@STANDS_IN
@pytest.mark.parametrize("cores", [1, 2])
def test_a_full_disk_is_said_once_and_training_goes_on(cores, first, tmp_path, capfd):
    losses, compiled, loaded = trained(
        tmp_path / "kept", 5000, cores=cores
    )  # of bytes, in place of a disk
    assert cores > 1 or losses == first[1]
    assert loaded == 0
    assert (
        capfd.readouterr().out.count(f"no program is stored in {tmp_path / 'kept'}: File too large")
        == 1
    )
    assert list((tmp_path / "kept").iterdir()) == []


@STANDS_IN
def test_a_disk_that_is_really_full_is_said_once_too(first, tmp_path, capfd):
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k,mode=700", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        assert trained(disk, cores=2)[0]
        assert (
            capfd.readouterr().out.count(f"no program is stored in {disk}: No space left on device")
            == 1
        )
        assert {file.suffix for file in disk.iterdir()} <= {".pjrt"}
    finally:
        subprocess.run(["umount", disk], check=True)


@STANDS_IN
def test_whoever_is_killed_while_it_compiles_blocks_nobody(first, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    locks = [folder / f"{file.stem}.lock" for file in first[0].iterdir()]
    code = "import fcntl, sys, time\nheld = [open(name, 'w') for name in sys.argv[1:]]\n"
    code += "[fcntl.flock(one, fcntl.LOCK_EX) for one in held]\nprint(flush=True)\ntime.sleep(900)"
    holder = subprocess.Popen([sys.executable, "-c", code, *locks], stdout=subprocess.PIPE)
    assert holder.stdout.readline()
    killing = threading.Timer(2.0, holder.kill)
    killing.start()
    assert trained(folder, limits=tpukit.Limits(stall=0.5, heartbeat=0.1)) == (
        first[1],
        first[2],
        0,
    )
    killing.join()
    holder.communicate()
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        file.name for file in first[0].iterdir()
    )


def without_a_compiler(folder):
    return c_library.compiled("kept.so", SOURCES, environ={"PATH": "/nowhere"})


def that_does_not_compile(folder):
    (folder / "keeper.c").write_text("no C")
    return c_library.compiled(
        "kept.so", folder, environ={**os.environ, "XDG_CACHE_HOME": str(folder)}
    )


def that_does_not_load(folder):
    (folder / "kept.so").write_text("no library")
    return folder / "kept.so"


@STANDS_IN
@pytest.mark.parametrize("library", [without_a_compiler, that_does_not_compile, that_does_not_load])
def test_without_the_library_the_launch_goes_on_and_says_so(library, tmp_path, monkeypatch, capsys):
    (tmp_path / "library").mkdir()
    monkeypatch.setattr(compile_cache, "compiled", lambda *_: library(tmp_path / "library"))
    options = {
        "cores": 1,
        "backend": "xla:simulator",
        "progress": "off",
        "compile_cache": tmp_path / "kept",
    }
    assert launch(lambda core: core.mean(3.0), **options).results == [3.0]
    assert capsys.readouterr().out.count("compile_cache is off in this launch: ") == 1
    assert list((tmp_path / "kept").iterdir()) == []


def test_where_nothing_is_compiled_one_line_says_that_there_is_nothing_to_keep(tmp_path, capsys):
    launch(
        lambda core: core.rank,
        cores=1,
        backend="cpu",
        progress="off",
        compile_cache=tmp_path / "kept",
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "compile_cache" in line]
    assert said == ["compile_cache: the backend cpu compiles nothing that can be kept"]
    assert not (tmp_path / "kept").exists()


def test_torchtpu_is_given_the_folder_that_it_keeps_its_own_in(tmp_path, monkeypatch):
    from tpukit.accelerators import torch_tpu

    monkeypatch.delenv(torch_tpu._PROGRAMS, raising=False)
    monkeypatch.setattr(torch_tpu.CpuRuntime, "start", lambda *_, **__: None)
    runtime = runtimes()["torch_tpu"]
    cache = runtime.open_compile_cache([tmp_path / "kept"], print)
    topology = torch_tpu.Topology("torch_tpu", "TPU", 1, 1, compile_cache=cache)
    runtime.start(print, topology, process=0, meeting_point=None)
    assert os.environ[torch_tpu._PROGRAMS] == str(tmp_path / "kept")
    assert cache.summary() == ""
    cache.close()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="other users can write to it") as raised:
        launch(lambda core: None, cores=1, backend="xla:simulator", compile_cache=tmp_path)
    assert "mode 777" in raised.value.found
    tmp_path.chmod(int(re.search(r"chmod (\d+)", raised.value.fix)[1], 8))
    assert compile_cache.own_folders([tmp_path]) == (tmp_path,)
    with pytest.raises(ValueError, match="other users can write to it"):
        compile_cache.own_folders([tmp_path / "new", Path("/tmp")])
    assert compile_cache.own_folders([tmp_path / "new", tmp_path / "not there"]) == (
        tmp_path / "new",
    )


def test_the_fix_for_a_folder_that_others_can_write_to_is_a_command_for_its_path(tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="other users can write to it") as raised:
        compile_cache.own_folders([folder])
    subprocess.run(re.search(r"chmod [^,]+", raised.value.fix)[0], shell=True, check=True)
    assert compile_cache.own_folders([folder]) == (folder,)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ValueError, match="other users can write to it") as raised:
        compile_cache.own_folders([tmp_path / "theirs"])
    assert "the folder belongs to user 12345" in raised.value.found


@pytest.mark.parametrize("given", [True, 3, ["a", 3], "", {"a"}], ids=str)
def test_what_is_no_folder_is_refused(given):
    with pytest.raises(TypeError, match="a folder, a list of folders, or False"):
        folders_of(given)


def test_folders_are_those_named_or_else_those_of_prepare():
    here, set_before = Path.cwd(), {KEEP_VARIABLE: '["a", "b"]'}
    assert folders_of(None, set_before) == folders_of(["a", Path("b")]) == (here / "a", here / "b")
    assert folders_of("c", set_before) == (here / "c",)
    assert folders_of(False, set_before) == folders_of(None, {}) == ()


@pytest.mark.parametrize("name", ["a:b", "a;b", "a,b", "[a]", "a b", 'a"b'])
def test_a_folder_of_any_name_that_setup_stores_is_one_folder(name, tmp_path, monkeypatch):
    monkeypatch.delenv(KEEP_VARIABLE, raising=False)
    tpukit.setup(compile_cache=[tmp_path / name, tmp_path / "second"])
    assert folders_of(None) == (tmp_path / name, tmp_path / "second")
    tpukit.setup(compile_cache=tmp_path / name)
    assert folders_of(None) == (tmp_path / name,)
    tpukit.setup(compile_cache=False)


def test_those_that_nobody_has_used_for_longest_are_removed_past_the_limit(tmp_path):
    for when, name in enumerate(["old.pjrt", "middle.pjrt", "new.pjrt"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (0, 10**9 + when))
    for name in ("dead.1.part", "dead.lock", "notes.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 10**9 - 10**6))
    compile_cache.remove_oldest(tmp_path, limit=250)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "middle.pjrt",
        "new.pjrt",
        "notes.txt",
    ]


@pytest.mark.skipif(c_library.find_compiler() is None, reason="no C compiler is here")
def test_the_sources_compile_without_a_warning(tmp_path):
    files = sorted(map(str, SOURCES.glob("*.c")))
    command = [
        "cc",
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        '-DSOURCES="a"',
        "-fPIC",
        "-shared",
        *files,
    ]
    subprocess.run([*command, "-o", str(tmp_path / "kept.so")], check=True, timeout=600)


@STANDS_IN
def test_what_is_declared_of_pjrt_is_what_its_header_declares(tmp_path):
    text = (SOURCES / "pjrt.h").read_text()
    names = {
        "ERROR_DESTROY": "Error_Destroy", "CLIENT_PLATFORM_VERSION": "Client_PlatformVersion",
        "CLIENT_COMPILE": "Client_Compile", "EXECUTABLE_DESTROY": "Executable_Destroy",
        "SERIALIZE": "Executable_Serialize", "GET_EXECUTABLE": "LoadedExecutable_GetExecutable",
        "DESERIALIZE_AND_LOAD": "Executable_DeserializeAndLoad", "CLIENT_TOPOLOGY": "Client_TopologyDescription",
        "TOPOLOGY_PLATFORM_VERSION": "TopologyDescription_PlatformVersion",
        "TOPOLOGY_SERIALIZE": "TopologyDescription_Serialize",
    }  # fmt: skip
    places = dict(re.findall(r"([A-Z_]+) = (\d+)", text))
    assert places.keys() == names.keys()
    checks = [
        f"offsetof(Api, call) + {places[one]} * sizeof(void*) == offsetof(PJRT_Api, PJRT_{names[one]})"
        for one in names
    ]
    checks += ["offsetof(Api, version.minor) == offsetof(PJRT_Api, pjrt_api_version.minor_version)"]
    sizes = {
        "Text": [
            "PJRT_Client_PlatformVersion_Args",
            "PJRT_TopologyDescription_PlatformVersion_Args",
        ],
        "Serialized": ["PJRT_Executable_Serialize_Args", "PJRT_TopologyDescription_Serialize_Args"],
        "Asked": [
            "PJRT_LoadedExecutable_GetExecutable_Args",
            "PJRT_Client_TopologyDescription_Args",
        ],
        "Compile": ["PJRT_Client_Compile_Args"],
        "Program": ["PJRT_Program"],
    }
    checks += [
        f"sizeof({own}) == {its}_STRUCT_SIZE" for own, every in sizes.items() for its in every
    ]
    checks += [
        "offsetof(Load, loaded) == offsetof(PJRT_Executable_DeserializeAndLoad_Args, loaded_executable)"
    ]
    checks += ["sizeof(Load) >= PJRT_Executable_DeserializeAndLoad_Args_STRUCT_SIZE"]
    checks += ["offsetof(Compile, executable) == offsetof(PJRT_Client_Compile_Args, executable)"]
    checks += [
        "offsetof(Serialized, destroy) == offsetof(PJRT_Executable_Serialize_Args, serialized_executable_deleter)"
    ]
    lines = ['#include "pjrt_c_api.h"', f'#include "{SOURCES / "pjrt.h"}"']
    lines += [f'_Static_assert({check}, "{number}");' for number, check in enumerate(checks)]
    (tmp_path / "check.c").write_text("\n".join(lines))
    headers = build.find_plugin().headers
    subprocess.run(
        ["cc", "-std=gnu11", "-fsyntax-only", f"-I{headers}", str(tmp_path / "check.c")], check=True
    )
