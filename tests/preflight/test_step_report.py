"""preflight: a real step, recorded as a TPU's compiler would get it, and compiled by that compiler."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
from helpers import preflight_workers as workers
from IPython.core.inputtransformer2 import TransformerManager

import tpukit
from tpukit.preflight import compiler, libtpu
from tpukit.preflight import hazards as hazards_module
from tpukit.preflight.command import find_function
from tpukit.preflight.compiler import Compiled, compile_graph
from tpukit.preflight.cost_figures import _memory_parts
from tpukit.preflight.hazards import find_hazards
from tpukit.preflight.hlo import Array, Operation, Program, read_program, without_sources
from tpukit.preflight.recording import Graph, Recording, record
from tpukit.preflight.step_clock import StepClock
from tpukit.preflight.step_report import Preflight, _short
from tpukit.profiling import find_tpu
from tpukit.simulator import build

pytestmark = pytest.mark.xla
ROOT = Path(__file__).parents[2]
CHIP = find_tpu("v5e-8")


@pytest.fixture(scope="module", autouse=True)
def simulator():
    if reason := build.why_not():
        pytest.skip(reason)
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")


@pytest.fixture(scope="module")
def recorded():
    return record(workers.by_hand, chip=CHIP, progress="off")


@pytest.fixture(scope="module")
def real_libtpu():
    """The version of libtpu that tests compile with, fetched if it is not here: 150 MB, once."""
    try:
        libtpu.fetch_libtpu()
    except tpukit.preflight.LibtpuNotFoundError as error:
        pytest.skip(str(error))
    return libtpu.platform_version()


def hazards(fn, *args):
    found = record(fn, *args, chip=CHIP, progress="off")
    return {one.name: one.fact for one in find_hazards(found)}


def compilers():
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(
            psutil.Error
        ):  # it has ended since; whoever calls this in a thread would end as well
            found += [one] if "tpukit-compile" in "".join(one.cmdline()[:1]) else []
    return found


@pytest.mark.parametrize(
    ("name", "topology", "cores", "hbm"),
    [("v5e-8", "v5e:2x4", 8, 16), ("v5litepod-8", "v5e:2x4", 8, 16), ("v5e-1", "v5e:1x1", 1, 16)]
    + [
        ("v3-8", "v3:2x2", 8, 16),
        ("v2-8", "v2:2x2", 8, 8),
        ("v6e-1", "v6e:1x1", 1, 32),
        ("V6E-8", "v6e:2x4", 8, 32),
    ],
)
def test_a_chip_is_what_its_name_says(name, topology, cores, hbm):
    chip = find_tpu(name)
    assert (chip.topology, chip.cores, chip.hbm) == (topology, cores, hbm * 2**30)


def test_a_price_of_no_chip_is_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match="there is no TPU 'v5e8'"):
        tpukit.preflight.preflight(workers.by_hand, chip="v5litepod-8", prices={"v5e8": 5.0})


def test_a_mistyped_chip_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r'no TPU .v5e8.(.|\n)*fix:   pass "v5e-8"'):
        tpukit.preflight.preflight(workers.by_hand, chip="v5e8")


def test_a_loop_by_hand_is_recorded_as_eight_cores_would_run_it(recorded):
    (graph,) = recorded.graphs
    program = read_program(graph.module)
    assert recorded.is_steady
    assert "all-reduce" in {one.opcode for one in program.operations}
    assert (CHIP.cores, bytes(range(8)) in graph.options) == (
        8,
        True,
    )  # the device assignment: 0 to 7
    inputs = {str(one.arrays[0]) for one in program.operations if one.opcode == "parameter"}
    assert "u8[4,3,8,8]" in inputs
    assert recorded.batches == ((((4, 3, 8, 8), "uint8"), ((4, 10), "float32")),)


def test_a_v5e_may_use_more_of_its_fast_memory_unless_the_user_says_otherwise(
    recorded, monkeypatch
):
    assert "--xla_tpu_scoped_vmem_limit_kib=22528" in recorded.flags.split()
    old = record(workers.by_hand, chip=find_tpu("v3-8"), progress="off")
    assert "vmem" not in old.flags
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=16384")
    own = record(workers.by_hand, chip=CHIP, progress="off")
    assert [flag for flag in own.flags.split() if "vmem" in flag] == [
        "--xla_tpu_scoped_vmem_limit_kib=16384"
    ]


def test_notebook_03_shows_the_fallback_that_it_speaks_of():
    cells = nbformat.read(ROOT / "notebooks" / "03_before_you_have_a_tpu.ipynb", as_version=4).cells
    wanted = ("class Noise", "def make_network():", "def make_network_with_fallback():")
    sources = [cell.source for cell in cells if any(word in cell.source for word in wanted)]
    (parameters,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    there = {"tpukit": tpukit}
    for source in (parameters, *sources):
        exec(source.partition("\nwith_fallback = ")[0].partition("\ntpukit.show_batch")[0], there)
    assert (
        "adaptive_avg_pool2d"
        in hazards(there["train"], 8, False, there["make_network_with_fallback"])["fallbacks"]
    )


def test_a_line_of_a_cell_is_named_so():
    assert _short("/tmp/ipykernel_28243/2398245868.py:11") == "line 11 of a cell"
    assert _short("/a/b/c/d.py:3") == "b/c/d.py:3"
    assert _short("") == ""


def test_an_operation_knows_its_module_and_line(recorded):
    program = read_program(recorded.graphs[0].module)
    products = [one for one in program.operations if one.opcode == "dot"]
    calls = {recorded.places[int(one.scope.removeprefix("call"))] for one in products}
    assert {(module, direction) for module, _, direction in calls} == {
        ("1 Linear", "forward"),
        ("3 Linear", "forward"),
        ("1 Linear", "backward"),
        ("3 Linear", "backward"),
    }
    (line,) = {line for _, line, _ in calls}
    file, _, number = line.rpartition(":")
    assert file == workers.__file__
    assert "model(change(images))" in Path(file).read_text().splitlines()[int(number) - 1]


def test_a_graph_is_the_same_graph_after_an_edit_elsewhere_in_the_notebook(recorded, tmp_path):
    moved = tmp_path / "moved.py"
    moved.write_text("# a line more\n\n" + Path(workers.__file__).read_text())
    again = record(find_function(f"{moved}:by_hand"), chip=CHIP, progress="off")
    assert again.graphs[0].module != recorded.graphs[0].module
    assert without_sources(again.graphs[0].module) == without_sources(recorded.graphs[0].module)


def test_the_hosts_share_of_a_step_is_measured_once_the_step_comes_back(recorded):
    assert 0 < recorded.host_seconds < 1


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_function_that_ends_itself_after_its_step_came_back_is_recorded(error):
    found = record(functools.partial(workers.by_hand, after=workers.raises(error, at=6)), chip=CHIP)
    assert found.is_steady


def test_a_function_goes_on_for_a_dozen_steps_and_no_further(tmp_path):
    with (tmp_path / "steps").open("a") as file:  # opened here: the function itself may open none
        record(functools.partial(workers.by_hand, after=workers.notes_each_step(file)), chip=CHIP)
    assert 10 <= len((tmp_path / "steps").read_text()) <= 16


def test_what_comes_after_the_step_changes_nothing():
    found = record(workers.evaluates_larger_batches, chip=CHIP, progress="off")
    assert found.batches == ((((4, 192), "float32"), ((4, 10), "float32")),)


def test_a_loss_with_a_weight_is_recorded():
    assert record(workers.by_fit_with_a_weighted_loss, chip=CHIP, progress="off").is_steady


def test_steps_of_two_networks_by_turns_have_no_time_of_the_host():
    found = record(workers.two_by_turns, chip=CHIP, progress="off")
    assert (len(found.graphs), found.host_seconds) == (2, None)
    # Weights and Adam's two moments of the other network are alive while the graph of one runs.
    held = [3 * 4 * 193 * width for width in (16, 32)]
    beside = sorted(graph.beside for graph in found.graphs)
    assert all(0 <= there - other < 2**13 for there, other in zip(beside, held, strict=True)), (
        beside,
        held,
    )
    made = [Compiled(CHIP, "", 0.0, 1000, 0, 0, 100, 10, 0.0, 0.0, b"") for _ in found.graphs]
    assert Preflight(CHIP, found, tuple(made)).hbm_bytes == 1100 + 2 * 10 + beside[1]


def test_a_step_of_added_up_gradients_has_all_its_batches_and_no_loop_before_it():
    found = record(workers.adds_gradients_up, chip=CHIP, progress="off")
    assert (found.is_steady, found.syncs, len(found.graphs), found.recompiled) == (True, 4, 4, 0)
    programs = [read_program(graph.module) for graph in found.graphs]
    assert ["all-reduce" in {one.opcode for one in program.operations} for program in programs] == [
        False
    ] * 3 + [True]
    assert (
        Preflight(CHIP, found, ()).batch_size == 16
    )  # and the rates, one number each, are no samples
    (graphs,) = [one for one in find_hazards(found) if one.name == "graphs a step"]
    assert (graphs.state, graphs.fact[:37]) == ("ok", "4 graphs per step of the optimizers, ")


def test_a_step_of_fit_counts_the_samples_of_all_its_batches():
    found = record(workers.by_fit_of_four_batches, chip=CHIP, progress="off")
    assert (len(found.graphs), Preflight(CHIP, found, ()).batch_size) == (1, 16)


@pytest.mark.parametrize("falls_back", [False, True])
def test_noise_and_fallbacks_of_a_batchs_shape_are_no_samples(falls_back):
    found = record(workers.denoises, falls_back, chip=CHIP, progress="off")
    assert found.is_from_loop
    assert found.batches[0][0] == ((4, 3, 8, 8), "uint8")
    assert Preflight(CHIP, found, ()).batch_size == 4
    assert (
        "dimension 0 of (4, 3, 8, 8) uint8, of core.batches" in Preflight(CHIP, found, ())._batch()
    )


def test_a_loop_that_writes_to_its_parameters_is_a_training():
    found = record(workers.updates_by_hand, chip=CHIP, progress="off")
    assert (found.is_steady, found.has_optimizer, len(found.graphs)) == (True, True, 1)


def test_a_function_that_records_a_profile_has_a_preflight_and_writes_no_profile(tmp_path):
    def train(core):
        with tpukit.profiling.profile(core, tmp_path / "trace") as recording:
            workers.by_hand(core)
        return recording.files

    assert record(train, chip=CHIP, progress="off").is_steady
    assert not (tmp_path / "trace").exists()


def test_a_function_without_an_optimizer_is_told():
    assert "no optimizer stepped" in hazards(workers.largest_of_int64)["optimizer"]


def test_a_program_without_estimated_cycles_is_reported_too():
    program = Compiled(CHIP, "0.0.17", 1.0, 8, 8, 0, 0, 8, 0.0, 8.0, b"")
    program.__dict__["program"] = Program({0: ()}, entry=0)
    recording = Recording((Graph(b"", b""),), is_steady=False, has_optimizer=False)
    text = str(Preflight(CHIP, recording, (program,)))
    assert "0 cycles, 0.00 ms" in text
    assert "no optimizer stepped in the run" in text


def test_operations_of_one_name_do_not_hide_others_with_dynamic_shapes():
    array = Array("f32", (4,), is_dynamic=True)
    names = ["aten::nonzero"] * 3 + ["aten::unique"]
    operations = tuple(Operation(name, "custom-call", (array,), op_type=name) for name in names)
    (finding,) = hazards_module._dynamic([Program({0: operations}, entry=0)])
    assert "values: aten::nonzero, aten::unique; " in finding.fact


def test_a_step_that_is_compiled_again_is_named_with_its_line():
    told = hazards(workers.cuts_windows_out, 6)["recompiles"]
    assert "more graphs were compiled after the second of 1" in told
    assert "slice" in told
    assert "near `model(inputs[:, start : start + 100])" in told


def test_the_line_of_a_step_that_is_compiled_again_is_found_in_a_path_of_any_letters(tmp_path):
    file = tmp_path / "Ordner mit Ä, 日本語 'x' \"y\" back\\slash" / "steps.py"
    file.parent.mkdir()
    shutil.copy(workers.__file__, file)
    told = hazards(find_function(f"{file}:cuts_windows_out"), 6)["recompiles"]
    assert "near `model(inputs[:, start : start + 100])" in told


def test_batches_of_two_lengths_are_two_shapes_of_one_step():
    found = record(workers.of_two_lengths, chip=CHIP, progress="off")
    assert (len(found.graphs), found.recompiled, len(found.shapes)) == (1, 0, 1)
    assert found.batches[0][0] == ((4, 64), "int32")
    (other,) = found.shapes
    assert (len(other.graphs), other.batches[0][0]) == (1, ((4, 16), "int32"))


def test_the_host_time_is_that_of_its_thread_and_of_whole_steps():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    began = []
    clock = StepClock(before=lambda: began.append(True))

    def graph(seconds, *, steps):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        if steps:
            optimizer.step()
        clock.after_sync()

    graph(0.0, steps=True)
    assert (clock.seconds, clock.is_started, began) == (None, False, [])
    clock.start()
    graph(0.0, steps=True)
    for _ in range(3):
        graph(0.01, steps=False)  # a graph without a step belongs to the step that ends next
        time.sleep(0.2)
        graph(0.01, steps=True)
    assert 0.02 <= clock.seconds < 0.2
    for _ in range(6):
        graph(0.0, steps=True)
    assert (clock.ended.is_set(), began) == (True, [True])


def test_fit_is_recorded_without_evaluation_and_writes_nothing(tmp_path, capsys):
    found = record(workers.by_fit, tmp_path, chip=CHIP, progress="off")
    assert (len(found.graphs), found.is_steady) == (1, True)
    assert "epoch 1:" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_raises_is_told_with_its_line_and_leaves_nothing():
    before = set(
        psutil.Process().children(recursive=True)
    )  # such as the resource tracker of Python's multiprocessing
    with pytest.raises(tpukit.WorkerError, match="KeyError: 'SOPInstanceUID'"):
        record(workers.fails, chip=CHIP, progress="off")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_function_that_runs_nothing_is_told():
    with pytest.raises(
        tpukit.preflight.PreflightError, match="ended before it ran anything on the device"
    ):
        record(workers.runs_nothing, chip=CHIP, progress="off")


def test_a_clean_step_has_no_hazards(recorded):
    (found,) = find_hazards(recorded)
    assert (found.name, found.state) == ("hazards", "ok")


@pytest.mark.parametrize(
    ("step", "name", "words"),
    [
        ({"after": lambda loss: loss.item()}, "graphs a step", "one step runs 2 graphs"),
        ({"change": lambda x: (x.double() / 255).float()}, "float64", "float64 in"),
        ({"change": lambda x: x.long().cumsum(1) / 255.0}, "int64", "int64 in"),
        ({"change": lambda x: x.float().frexp().mantissa}, "fallbacks", "frexp"),
    ],
    ids=["item", "float64", "int64", "fallback"],
)
def test_a_hazard_is_named(step, name, words):
    assert words in hazards(functools.partial(workers.by_hand, batch_size=64, **step))[name]


def test_the_largest_int64_of_a_step_is_named_and_not_a_float_beside_it(monkeypatch):
    weight = Array("f32", (4096, 4096))
    results = (weight, Array("s64", (1024,), width=8), Array("s64", (2048,), width=8))
    program = Program({0: (Operation("results", "tuple", results),)}, entry=0)
    monkeypatch.setattr(hazards_module, "read_program", lambda module: program)
    found = find_hazards(Recording((Graph(b"", b""),), is_steady=True))
    assert "int64 in 1 operation" in found[0].fact
    assert "the largest s64[2048]" in found[0].fact


def test_padding_is_counted_in_whole_tiles():
    half = Array("f32", (8, 64), minor_to_major=(1, 0), tiles=(8, 128))
    assert (half.bytes, half.padded_bytes) == (8 * 64 * 4, 8 * 128 * 4)
    other_order = Array("f32", (64, 9), minor_to_major=(0, 1), tiles=(8, 128))
    assert other_order.padded_bytes == 128 * 16 * 4
    assert Array("f32", (3,), minor_to_major=(0,), tiles=(1024,)).padded_bytes == 4096


def test_without_libtpu_the_message_says_how_to_get_it(recorded, tmp_path):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(
        tpukit.preflight.LibtpuNotFoundError,
        match=r'fix:   download it once, 130 to 150 MB: tpukit.preflight.fetch_libtpu\("0.0.1"\)',
    ):
        compile_graph(recorded.graphs[0], CHIP, libtpu="0.0.1", environ=environ)


def test_a_download_that_fails_says_so_and_leaves_nothing(tmp_path, capsys):
    environ = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "0",
    }
    with pytest.raises(
        tpukit.preflight.LibtpuNotFoundError,
        match=r"libtpu 0.0.2 cannot be fetched(.|\n)*fix:   turn the internet on",
    ):
        libtpu.fetch_libtpu("0.0.2", environ=environ)
    assert "nothing is installed" in capsys.readouterr().out  # said before
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_version_that_is_none_is_refused():
    with pytest.raises(ValueError, match="the version of libtpu must have a form such as"):
        libtpu.find_libtpu("newest")


def place_library(tmp_path, body):
    folder = tmp_path / "tpukit" / "libtpu" / "0.0.9"
    folder.mkdir(parents=True, mode=0o700)
    source = tmp_path / "library.c"
    source.write_text(
        f"#include <stdlib.h>\n#include <unistd.h>\nvoid* GetPjrtApi(void) {{ {body} return 0; }}\n"
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(folder / "libtpu.so"), str(source)], check=True
    )
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}


def test_a_cached_result_of_which_a_file_is_missing_is_made_again(recorded, tmp_path, monkeypatch):
    def compiles(job, command, folder, *, title):
        numbers = (
            "argument_bytes 1\noutput_bytes 1\nalias_bytes 0\ntemporary_bytes 0\ncode_bytes 1\n"
        )
        (folder / "numbers").write_text(numbers)
        (folder / "optimized").write_bytes(b"")
        (folder / "facts").write_text('{"libtpu": "0.0.9", "seconds": 1.0}')

    monkeypatch.setattr(compiler, "_compile", compiles)
    environ = place_library(tmp_path, "abort();")
    call = functools.partial(
        compile_graph, recorded.graphs[0], CHIP, libtpu="0.0.9", environ=environ
    )
    assert [call().is_cached for _ in range(2)] == [False, True]
    (facts,) = tmp_path.glob("tpukit/compiled/*/facts")
    facts.unlink()  # as by an interrupt while the folder was removed
    assert [call().is_cached for _ in range(2)] == [False, True]


def left_behind(tmp_path):
    return [path for path in (tmp_path / "tpukit").rglob("*") if "compiling" in path.name]


def test_a_compiler_that_is_killed_is_told_and_leaves_nothing(recorded, tmp_path):
    environ = place_library(tmp_path, "for (;;) pause();")

    def kill():
        while not compilers():
            time.sleep(0.02)
        compilers()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(
        tpukit.preflight.CompileError, match=r"ended by SIGKILL(.|\n)*ran out of memory"
    ):
        compile_graph(
            recorded.graphs[0], CHIP, libtpu="0.0.9", environ=environ, progress="off", timeout=600
        )
    killer.join()
    assert (compilers(), left_behind(tmp_path)) == ([], [])


def test_a_compiler_that_aborts_is_told_in_its_own_words(recorded, tmp_path):
    environ = place_library(tmp_path, 'write(2, "Check failed: x > 0\\n", 20); abort();')
    with pytest.raises(
        tpukit.preflight.CompileError, match=r"ended by SIGABRT(.|\n)*Check failed: x > 0"
    ):
        compile_graph(recorded.graphs[0], CHIP, libtpu="0.0.9", environ=environ, progress="off")
    assert left_behind(tmp_path) == []


def test_a_compiler_that_takes_too_long_is_ended(recorded, tmp_path):
    environ = place_library(tmp_path, "for (;;) pause();")
    with pytest.raises(tpukit.preflight.CompileError, match="not finished after 0.5 s"):
        compile_graph(
            recorded.graphs[0], CHIP, libtpu="0.0.9", environ=environ, progress="off", timeout=0.5
        )
    assert (compilers(), left_behind(tmp_path)) == ([], [])


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"compiling-{ended.pid}-x").mkdir()
    (tmp_path / f"compiling-{os.getpid()}-x").mkdir()
    compiler._remove_left_behind(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"compiling-{os.getpid()}-x"]


def test_a_step_is_compiled_and_kept(recorded, real_libtpu, tmp_path, monkeypatch):
    (graph,) = recorded.graphs
    first = compile_graph(graph, CHIP, flags=recorded.flags, progress="off")
    assert first.cycles > 0
    assert first.argument_bytes > 4 * 192 * 16  # the weights of the first layer
    assert first.hbm_bytes < CHIP.hbm
    assert any(one.opcode.startswith("all-reduce") for one in first.program.operations)
    monkeypatch.setattr(compiler, "find_libtpu", lambda *_, **__: pytest.fail("it is in the cache"))
    again = compile_graph(graph, CHIP, flags=recorded.flags, progress="off")
    assert again.is_cached
    assert again.program == first.program


def test_what_libtpu_compiles_is_kept_as_the_program_that_a_launch_compiles(real_libtpu, tmp_path):
    options = {"chip": "v5e-1", "progress": "off", "keep": tmp_path / "kept"}
    tpukit.preflight.preflight(workers.by_hand, **options)
    (kept,) = (tmp_path / "kept").iterdir()
    whole = kept.read_bytes()
    launched = {
        "cores": 1,
        "backend": "xla:simulator",
        "progress": "off",
        "compile_cache": tmp_path / "launched",
    }
    tpukit.launch(functools.partial(workers.by_hand, samples=40), **launched)
    heads = [file.read_bytes()[8 : 8 + 64] for file in (tmp_path / "launched").iterdir()]
    assert whole[8 : 8 + 64] in heads  # the digests of the program and of its options
    kept.unlink()
    assert tpukit.preflight.preflight(workers.by_hand, **options).compiled[0].is_cached
    assert kept.read_bytes() == whole


def test_a_report_holds_what_it_promises(real_libtpu):
    found = tpukit.preflight.preflight(
        workers.by_hand,
        chip="v5e-8",
        samples=1000,
        pipeline=10,
        prices={"v5litepod-8": 3600},
        progress="off",
    )
    assert found.fits
    assert found.seconds == found.cycles / 1.5e9
    assert found.samples_per_second == pytest.approx(4 * 8 / found.seconds)
    text = str(found)
    for words in (
        "fits: arguments",
        "not compared with a chip",
        "the input gives 10",
        "$100.00 for an epoch",
    ):
        assert words in " ".join(text.split()), words
    assert 1 <= len(found.operations) <= 10
    assert [cost.cycles for cost in found.operations] == sorted(
        (c.cycles for c in found.operations), reverse=True
    )
    assert {cost.module for cost in found.operations} & {"1 Linear", "3 Linear", "Adam"}
    assert "<table" in found._repr_html_()
    assert "it fits" in found.figure().alt
    assert "v5e-8" in str(tpukit.preflight.compare_preflights([found]))
    of_host(found, 2 * found.seconds, "warning", "the core waits for that: 50% of the time")
    of_host(found, found.seconds / 2, "ok", "while the core computes")
    slow = of_host(
        replace(found, pipeline=None), 0.032, "warning", "at 1,000 samples/s on all cores"
    )
    assert "the cores would take 1,000 samples/s" in str(slow)
    assert "$1,000 for a million samples" in str(slow)
    assert "as fast as the host" in " ".join(str(slow).split())
    quick = replace(found.recording, host_seconds=found.seconds / 2)
    heading, row = tpukit.preflight.compare_preflights([slow]).rows()
    by_column = dict(zip(heading, row, strict=True))
    assert (
        by_column["samples/s"] == f"{found.samples_per_second:,.0f}"
    )  # the chip's, whatever this host took
    assert by_column["this host"] == "32.0 ms, longer"
    assert "longer" not in str(
        tpukit.preflight.compare_preflights([replace(found, recording=quick)])
    )
    unknown = replace(found, recording=replace(found.recording, host_seconds=None))
    assert unknown.rate == found.samples_per_second
    assert "host" not in [one.name for one in unknown.findings]


def of_host(found, seconds, state, words):
    there = replace(found, recording=replace(found.recording, host_seconds=seconds))
    (host,) = [one for one in there.findings if one.name == "host"]
    assert (host.state, words in host.fact) == (state, True), host.fact
    return there


def test_the_bar_of_the_memory_has_all_bytes_of_the_report(recorded):
    program = Compiled(CHIP, "0.0.17", 1.0, 8 * 2**30, 2**30, 0, 2**30, 2**20, 1.0, 1.0, b"")
    graph = replace(recorded.graphs[0], beside=7 * 2**30)
    found = Preflight(CHIP, replace(recorded, graphs=(graph,), shapes=()), (program,))
    assert not found.fits
    parts = _memory_parts(found)
    assert sum(parts.values()) == found.hbm_bytes
    assert parts["other tensors and programs"] == 7 * 2**30


def test_no_batch_fits_is_said_of_the_sizes_that_were_tried(recorded):
    too_large = compiler.OutOfMemoryError("it does not fit", words="hbm", needed=2**40, limit=2**34)
    refused = Preflight(CHIP, recorded, (), too_large=too_large)
    largest = tpukit.preflight.LargestBatch(0, {1024: refused, 512: refused})
    assert largest.title == "none of 2 batch sizes fits into a v5e core, not even 512 samples"


def test_the_two_cores_of_an_old_chip_share_a_host_process(recorded):
    found = [Preflight(find_tpu(name), recorded, ()) for name in ("v5e-8", "v3-8")]
    assert found[1].host_seconds == 2 * found[0].host_seconds == 2 * recorded.host_seconds


def test_a_batch_that_does_not_fit_is_called_so_and_the_one_that_does_is_found(real_libtpu):
    found = tpukit.preflight.preflight(workers.wide, 2**18, chip="v5e-1", progress="off")
    assert not found.fits
    assert "does not fit: the step needs" in str(found)
    assert "fewer than 17" in str(found)  # 172,032 samples, by proportion
    assert "does not fit" in found.figure().alt
    largest = tpukit.preflight.largest_batch(
        workers.wide, chip="v5e-1", start=2**16, multiple=1024, compiles=4, progress="off"
    )
    most = largest.tried[largest.batch_size].hbm_bytes
    assert 2**16 < largest.batch_size < 2**18
    assert 0.85 * 2**34 < most <= 2**34
    assert len(largest.tried) <= 4


def test_what_a_tpu_cannot_do_is_named_in_the_compilers_words(real_libtpu):
    with pytest.raises(
        tpukit.preflight.CompileError,
        match=r"this step failed: compile(.|\n)*Supported lowering only of Sum all reduce",
    ):
        tpukit.preflight.preflight(workers.largest_of_int64, chip="v5e-8", progress="off")


def test_a_function_is_found_in_a_file_a_module_and_a_notebook(tmp_path):
    (tmp_path / "trainer.py").write_text("def train(core):\n    return 1\n")
    assert find_function(f"{tmp_path / 'trainer.py'}:train")(None) == 1
    assert find_function("helpers.preflight_workers:by_hand") is workers.by_hand
    cells = ["size = 3", "def train(core):\n    return size", "raise RuntimeError('not run')"]
    assert find_function(f"{notebook(tmp_path, *cells)}:train")(None) == 3


def notebook(folder, *cells):
    file = folder / "n.ipynb"
    book = {"cells": [{"cell_type": "code", "source": [text]} for text in cells], "nbformat": 4}
    file.write_text(json.dumps(book))
    return file


@pytest.mark.parametrize(
    "cell",
    [
        "from helpers.preflight_workers import by_hand as train",
        "if True:\n    def train(core):\n        pass",
        "train: object = print",
        "size, train = 3, print",
    ],
)
def test_a_function_is_found_in_a_cell_that_imports_it_or_defines_it_in_a_branch(cell, tmp_path):
    file = notebook(tmp_path, cell, "print(train)", "raise RuntimeError('not run')")
    assert callable(find_function(f"{file}:train"))


def test_a_notebook_may_import_a_file_beside_it(tmp_path):
    (tmp_path / "beside_the_notebook.py").write_text("def train(core):\n    return 5\n")
    file = notebook(tmp_path, "from beside_the_notebook import train")
    assert find_function(f"{file}:train")(None) == 5


def test_the_last_of_two_cells_that_define_a_function_is_meant(tmp_path, capsys):
    cells = [
        "def train(core):\n    return 1",
        "size = 2",
        "def train(core):\n    return size",
        "size = 3",
    ]
    assert find_function(f"{notebook(tmp_path, *cells)}:train")(None) == 2
    assert (
        "n.ipynb defines train in code cells 1, 3: the last one is used" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "cell", ["%%bash\nls -la | head", "files = !ls", "if True:\n    !true", "%time 1", "display"]
)
def test_a_notebooks_cells_are_run_as_jupyter_runs_them(cell, tmp_path):
    if TransformerManager().transform_cell(f"{cell}\n") == f"{cell}\n" != "display\n":
        pytest.skip(
            "this IPython cannot read it either: its seventh, of Colab, with Python 3.12 and later"
        )
    main, text = sys.modules["__main__"], "\n% of LaTeX\n!important\n"
    file = notebook(tmp_path, cell, f'text = """{text}"""', "def train(core):\n    return text")
    assert find_function(f"{file}:train")(None) == text
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize("cell", ["1 +", "1 / 0"])
def test_a_cell_that_does_not_run_is_told_by_its_number(cell, tmp_path):
    file = notebook(tmp_path, "size = 1", cell, "def train(core):\n    return size")
    with pytest.raises(
        ValueError, match=f"code cell 2 of n.ipynb does not run(.|\n)*found: {re.escape(cell)}"
    ):
        find_function(f"{file}:train")


def test_a_file_that_is_no_python_is_told(tmp_path):
    (tmp_path / "broken.py").write_text("def train(core:\n")
    with pytest.raises(ValueError, match=r"no module ./train(.|\n)*or a file: train.py:train"):
        find_function("./train:train")
    with pytest.raises(ValueError, match=r"broken.py is not valid Python(.|\n)*line 1: def train"):
        find_function(f"{tmp_path / 'broken.py'}:train")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("train", ValueError, "the function must have the form file.py:train"),
        ("nowhere.py:train", FileNotFoundError, "there is no file nowhere.py"),
        ("helpers.preflight_workers:absent", ValueError, "has no function absent"),
    ],
)
def test_a_function_that_is_not_there_is_told(name, error, words):
    with pytest.raises(error, match=words):
        find_function(name)


def test_the_command_says_what_is_wrong_in_one_message_and_exits_with_2(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tpukit",
        "preflight",
        f"{workers.__file__}:by_hand",
        "--chip",
        "v9-8",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert "there is no TPU 'v9-8'" in ended.stderr
    assert "Traceback" not in ended.stderr
