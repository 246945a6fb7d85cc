import collections
import errno
import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import flip, mounted

from tpukit.essentials.environment.resources import own_memory
from tpukit.essentials.launcher.launcher import WorkerError, launch
from tpukit.training.checkpoints import CheckpointError, CheckpointStore

ROOT = Path(__file__).parents[2]


def a_state(step: int, size: int = 100) -> dict:
    """Return a state whose every number says of which step it is."""
    return {
        "model": {
            "weight": torch.full((size,), float(step)),
            "bias": torch.full((3,), float(step)),
        },
        "step": step,
    }


def save(checkpoints, *steps, best=()):
    for step in steps:
        checkpoints.save(a_state(step), step=step, best=step in best)
    checkpoints.close()


def steps(folder) -> list[str]:
    """Return what the names of the files say of their steps, `*` for the best."""
    names = sorted(path.name for path in Path(folder).glob("step-*.pt"))
    return [f"{int(name[5:13])}{'*' * ('best' in name)}" for name in names]


def in_tiny(folder, code: str, options: str = "size=1m") -> subprocess.CompletedProcess:
    """Run Python in a process that sees a small file system of its own on a folder."""
    command = mounted(folder, options)
    code = f"from tpukit.training.checkpoints import *\nfolder = {str(folder)!r}\n{code}"
    return subprocess.run(
        [*command, sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_state_comes_back_as_it_was_and_says_where_it_lies(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    checkpoints = CheckpointStore(tmp_path / "new" / "run")
    checkpoints.save(state, step=1200)
    found = checkpoints.newest()
    assert (found.step, found.path) == (1200, checkpoints.paths[-1])
    assert "tensor" not in repr(found)
    assert found.path.name == f"step-00001200-{checksum(found.path)}.pt"
    for name in state["model"]:
        assert torch.equal(found.state["model"][name], state["model"][name])
    optimizer.load_state_dict(found.state["optimizer"])
    schedule.load_state_dict(found.state["schedule"])
    assert found.state["schedule"]["milestones"] == collections.Counter([1, 2])


def checksum(path: Path) -> str:
    import zlib

    return f"{zlib.crc32(path.read_bytes()):08x}"


def test_a_file_loads_in_a_fresh_process_without_the_kit(tmp_path):
    save(CheckpointStore(tmp_path), 7)
    code = (
        "import glob, sys, torch\n"
        f"state = torch.load(glob.glob({str(tmp_path / '*.pt')!r})[0], weights_only=True)\n"
        "assert state['model']['weight'].tolist() == [7.0] * 100 and state['step'] == 7\n"
        "assert 'tpukit' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=600)


PLAIN = {
    "numbers": [None, True, -1, 2**200, 0.5, float("inf"), 1j],
    "text": ["", "naïve", b"\x00\xff", bytearray(b"x")],
    "containers": [
        (),
        {},
        set(),
        {1, 2},
        (1, (2, [3])),
        {0: {"a": 1}, (1, 2): 3},
        torch.Size([2, 3]),
    ],
    "dicts": [collections.OrderedDict(a=1), collections.Counter("aab")],
    "torch": [
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor(1),
    ],
    "tensors": [
        torch.ones(2, dtype=dtype)
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64)
    ],
    "views": [torch.arange(6).reshape(2, 3).t(), torch.ones(1).expand(4), torch.ones(0)],
}


@pytest.mark.parametrize("values", PLAIN.values(), ids=PLAIN)
def test_whatever_is_accepted_loads(tmp_path, values):
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.save({"values": values}, step=0)
    loaded = checkpoints.newest().state["values"]
    for was, now in zip(values, loaded, strict=True):
        assert type(now) is type(was)
        assert torch.equal(now, was) if isinstance(was, torch.Tensor) else now == was


class Mine(torch.Tensor):
    pass


def marked(tensor):
    tensor.origin = Path("x")
    return tensor


Betas = collections.namedtuple("Betas", "first second")
REFUSED = [
    (
        {"schedule": {"factor": lambda step: 1.0}},
        TypeError,
        r"state\['schedule'\]\['factor'\] is a builtins.function",
    ),
    (
        {"history": [{"auroc": np.float64(0.5)}]},
        TypeError,
        r"state\['history'\]\[0\]\['auroc'\] is a numpy.float64",
    ),
    ({"labels": np.ones(3)}, TypeError, r"state\['labels'\] is a numpy.ndarray"),
    ({"betas": Betas(0.9, 0.99)}, TypeError, r"state\['betas'\] is a .*Betas"),
    ({"folder": Path("x")}, TypeError, r"state\['folder'\] is a pathlib"),
    (
        {"groups": collections.defaultdict(int)},
        TypeError,
        r"state\['groups'\] is a collections.defaultdict",
    ),
    ({"per": {np.int64(3): 1}}, TypeError, r"the key .*3.* of state\['per'\] is a numpy.int64"),
    (
        {"model": torch.nn.Linear(1, 1)},
        TypeError,
        r"state\['model'\] is a torch.nn.*Linear(.|\n)*module.state_dict\(\)",
    ),
    ({"weight": torch.ones(2).as_subclass(Mine)}, TypeError, r"state\['weight'\] is a .*Mine"),
    (
        {"weight": marked(torch.ones(2))},
        TypeError,
        r"state\['weight'\] is a torch.Tensor with attributes",
    ),
    (
        {"weight": torch.ones(2, device="meta")},
        ValueError,
        r"state\['weight'\] is on meta(.|\n)*tensor.cpu\(\)",
    ),
]


@pytest.mark.parametrize(
    ("state", "kind", "message"), REFUSED, ids=[next(iter(state)) for state, _, _ in REFUSED]
)
def test_what_would_not_load_is_refused_when_it_is_saved_and_its_key_named(
    tmp_path, state, kind, message
):
    checkpoints = CheckpointStore(tmp_path)
    with pytest.raises(kind, match=message):
        checkpoints.save(state, step=1)
    assert list(tmp_path.iterdir()) == []


def save_until_killed(core, folder, seconds):
    """Save in a loop, note each save that is complete, and be killed by another process at some moment."""
    checkpoints = CheckpointStore(folder)
    found = checkpoints.newest()
    step = found.step if found else 0
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -9 {os.getpid()}"])
    with open(folder / "complete.txt", "ab", buffering=0) as notes:
        while True:
            step += 1
            checkpoints.save(
                a_state(step, size=3_000_000), step=step, best=step % 4 == 0
            )  # 20 MB: most of it is writing
            checkpoints.close()
            notes.write(b"%d\n" % step)


@pytest.mark.soak
def test_kill_9_at_random_moments_loses_nothing_beyond_the_last_complete_checkpoint(
    tmp_path, how_often
):
    moments, cut_off, last, most = random.Random(5), 0, 0, how_often(2, 5)
    for kills in range(100):
        if (
            kills >= 4 * most and last > most and cut_off > most
        ):  # more where the machine is busy: a save may take all the time
            break
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            launch(
                save_until_killed,
                tmp_path,
                moments.uniform(0, 0.2),
                cores=1,
                backend="cpu",
                progress="off",
            )
        cut_off += len(list(tmp_path.glob(".*.unfinished")))
        if (tmp_path / "complete.txt").exists():
            last = max(last, *map(int, (tmp_path / "complete.txt").read_text().split()), 0)
        said = []
        checkpoints = CheckpointStore(tmp_path)
        assert list(tmp_path.glob(".*")) == []  # leftovers
        found = checkpoints.newest(say=said.append)
        assert said == []
        if found is None:
            assert last == 0
            continue
        assert found.step in (
            last,
            last + 1,
        )  # killed after it was complete, and before that was noted
        last = found.step
        assert (found.state["model"]["weight"] == last).all()
        assert len(checkpoints.paths) <= 3 + 1 + 2  # killed before the older ones were removed
        assert last < 4 or f"{last // 4 * 4}*" in steps(tmp_path)
    assert last > most
    assert cut_off > most


def test_what_is_being_written_is_no_leftover_to_others_who_look(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    done = threading.Event()

    def look():
        while not done.is_set():
            CheckpointStore(tmp_path)

    others = [threading.Thread(target=look) for _ in range(2)]
    for other in others:
        other.start()
    try:
        save(checkpoints, *range(60))
    finally:
        done.set()
        for other in others:
            other.join()
    assert checkpoints.newest().step == 59


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def rename(path):
    path.rename(path.with_name(path.name[:14] + "0badc0de.pt"))


DAMAGE = {
    "truncated by a byte": cut,
    "truncated to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "zeros, as after a power cut": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "something appended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "garbage": lambda path: path.write_bytes(random.Random(1).randbytes(3000)),
    "another's checksum in its name": rename,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_loaded(tmp_path, damage, capsys):
    save(CheckpointStore(tmp_path), 1, 2, 3)
    damage(CheckpointStore(tmp_path).paths[-1])
    damaged = CheckpointStore(tmp_path).paths[-1]
    checkpoints = CheckpointStore(tmp_path)
    found = checkpoints.newest()
    assert found.step == 2
    assert (found.state["model"]["weight"] == 2).all()
    assert capsys.readouterr().out.startswith(
        f"checkpoint {damaged.name} is skipped: damaged, its checksum is "
    )
    assert damaged.exists()
    save(
        checkpoints, 3, 4
    )  # continues from step 2, and the damaged one does not count as one of three
    assert {1, 2, 3, 4} - {path_step(path) for path in checkpoints.paths} == {1}
    assert checkpoints.newest().step == 4


def path_step(path):
    return int(path.name[5:13])


def test_where_all_are_damaged_there_is_none_and_each_is_reported(tmp_path):
    save(CheckpointStore(tmp_path), 1, 2)
    for path in CheckpointStore(tmp_path).paths:
        flip(path)
    said = []
    checkpoints = CheckpointStore(tmp_path, keep_last=1)
    assert checkpoints.newest(say=said.append) is None
    assert [line.split("-")[1] for line in said] == ["00000002", "00000001"]
    save(
        checkpoints, 1
    )  # starting over, behind a damaged one, is allowed, and what it saves is kept
    assert CheckpointStore(tmp_path).newest(say=said.append).step == 1


KEPT = [
    (1, [1, 2, 3], [], ["3"]),
    (3, [1, 2], [], ["1", "2"]),
    (3, [1, 2, 3, 4, 5], [], ["3", "4", "5"]),
    (2, [1, 2, 3, 4, 5], [1], ["1*", "4", "5"]),
    (2, [1, 2, 3, 4, 5], [1, 3], ["3*", "4", "5"]),
    (2, [1, 2, 3, 4, 5], [1, 5], ["4", "5*"]),
    (1, [1, 2, 3], [1, 2, 3], ["3*"]),
    (2, [1, 2, 2], [], ["1", "2"]),  # saved again at the end of a run
]


@pytest.mark.parametrize(("keep", "saved", "best", "kept"), KEPT)
def test_the_last_few_and_the_best_are_kept(tmp_path, keep, saved, best, kept):
    save(CheckpointStore(tmp_path, keep_last=keep), *saved, best=best)
    assert steps(tmp_path) == kept


def test_a_step_saved_again_keeps_its_mark_as_the_best_and_newest_is_the_later(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep_last=1)
    checkpoints.save(a_state(1), step=1, best=True)
    checkpoints.save({**a_state(1), "history": [1]}, step=1)
    assert checkpoints.newest().state["history"] == [1]
    assert "1*" in steps(tmp_path)
    checkpoints.save({**a_state(1), "history": [1, 2]}, step=1, best=True)
    checkpoints.close()
    assert steps(tmp_path) == ["1*"]


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    foreign = [
        "model.pt",
        "step-1.pt",
        "step-00000001.pt",
        "epoch-00000001-1a2b3c4d.pt",
        ".other.unfinished",
        "notes",
    ]
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine")
    checkpoints = CheckpointStore(tmp_path, keep_last=1)
    assert checkpoints.newest() is None
    save(checkpoints, 1, 2)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in foreign)


def test_a_run_that_starts_over_does_not_mix_with_the_checkpoints_of_a_longer_one(tmp_path):
    save(CheckpointStore(tmp_path), 800, 1000)
    again = CheckpointStore(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"step 100 cannot be saved: the folder holds a later checkpoint, of step 1,000\n  "
        "found: .*\n  fix:",
    ):
        again.save(a_state(100), step=100)
    assert steps(tmp_path) == ["800", "1000"]
    save(CheckpointStore(tmp_path / "another"), 100)  # the fix
    save(again, 1000, 1100)  # the other one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: CheckpointStore(folder, keep_last=0), "at least 1, got 0"),
        (lambda folder: CheckpointStore(folder).save({}, step=-1), "0 or more, got -1"),
    ],
)
def test_a_wrong_number_is_refused_with_what_came(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


@pytest.fixture
def saving(tmp_path):
    """Return checkpoints whose save of step 5 is stuck: what it writes to is a pipe that nobody reads yet."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    pipe = tmp_path / f".step-00000005.{os.getpid()}.unfinished"
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 4)
    os.mkfifo(pipe)
    rescue = threading.Timer(
        20, pipe.read_bytes
    )  # a save that does wait ends then, and the test fails
    rescue.start()
    checkpoints.save(a_state(5), step=5)
    rescue.cancel()
    yield checkpoints
    if pipe.exists():
        pipe.read_bytes()  # the end of the wait; a pipe cannot be synced, so the save fails


def test_save_returns_while_the_file_is_being_written(saving, tmp_path):
    assert steps(tmp_path) == ["4"]
    (tmp_path / f".step-00000005.{os.getpid()}.unfinished").read_bytes()
    with pytest.raises(CheckpointError, match="step 5 could not be written: invalid argument"):
        saving.close()
    saving.close()  # raised once
    save(saving, 5)
    assert steps(tmp_path) == ["4", "5"]


def test_an_error_of_the_thread_is_raised_by_the_next_save(saving, tmp_path):
    reader = threading.Thread(
        target=(tmp_path / f".step-00000005.{os.getpid()}.unfinished").read_bytes
    )
    reader.start()
    with pytest.raises(CheckpointError, match="step 5"):
        saving.save(a_state(6), step=6)
    reader.join()
    assert steps(tmp_path) == ["4"]


def test_one_save_is_under_way_at_a_time_and_newest_waits_for_it(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep_last=9)
    for step in range(1, 6):
        checkpoints.save(a_state(step, size=1_000_000), step=step)
        assert steps(tmp_path)[: step - 1] == [str(before) for before in range(1, step)]
    assert checkpoints.newest().step == 5


def test_an_error_that_is_not_the_disks_comes_as_it_is_with_the_step(tmp_path):
    shared = torch.ones(4)
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.save(
        {"a": shared, "b": shared.view(torch.int32)}, step=3
    )  # torch.save refuses two types of one memory
    with pytest.raises(RuntimeError, match="view the same data as different types") as raised:
        checkpoints.close()
    assert raised.value.__notes__ == [
        "this was the checkpoint of step 3; the newest complete one is none"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_forked_worker_saves_with_what_the_kernel_made(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)

    def work(core):
        save(checkpoints, 2)

    launch(work, cores=1, backend="cpu", progress="off")
    assert checkpoints.newest().step == 2


def test_a_full_disk_is_an_error_with_a_fix_and_the_old_checkpoints_still_load(tmp_path):
    ran = in_tiny(
        tmp_path,
        """
import torch
state = lambda step: {"x": torch.full((60_000,), float(step))}  # 240 kB
checkpoints = CheckpointStore(folder, keep_last=2)
for step in (1, 2):
    checkpoints.save(state(step), step=step)
checkpoints.close()
other = Path(folder, "other")
other.write_bytes(bytes(400_000))
checkpoints.save(state(3), step=3)
try:
    checkpoints.save(state(4), step=4)
except CheckpointError as error:
    print(error, error.errno, sep="\\n")
print(sorted(path.name[:13] for path in Path(folder).iterdir()))
print(checkpoints.newest().step, CheckpointStore(folder).newest().state["x"].mean().item())
other.unlink()
checkpoints.save(state(4), step=4)
checkpoints.close()
print(checkpoints.newest().step)
""",
    )
    assert ran.returncode == 0, ran.stderr
    fact, found, fix, number, names, newest, after = ran.stdout.splitlines()
    assert fact == "the checkpoint of step 3 could not be written: no space left on device"
    assert "step-00000002-" in found
    assert "free some space there, or keep_last=1 (now 2)" in fix
    assert (number, newest, after) == ("28", "2 2.0", "4")
    assert names == "['other', 'step-00000001', 'step-00000002']"


def test_a_read_only_disk_is_an_error_at_once_and_a_run_resumes_from_its_copy(tmp_path):
    save(CheckpointStore(tmp_path / "run"), 3)
    (tmp_path / "disk").mkdir()
    ran = in_tiny(
        tmp_path / "disk",
        """
import os, shutil, subprocess
os.chdir(os.path.dirname(folder))
shutil.copytree("run", folder, dirs_exist_ok=True)
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
try:
    CheckpointStore(folder)
except CheckpointError as error:
    print(error)
    fix = str(error).splitlines()[-1]
eval(fix.strip())
""",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(
        f"no checkpoints can be saved in {tmp_path / 'disk'}: it cannot be written to\n  fix:"
    )
    assert CheckpointStore(tmp_path / "checkpoints").newest().step == 3


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match=f"in {folder}: "):
            CheckpointStore(folder)


def test_a_folder_that_is_gone_is_an_error_of_the_save(tmp_path):
    checkpoints = CheckpointStore(tmp_path / "run")
    (tmp_path / "run").rmdir()
    with pytest.raises(
        CheckpointError, match="step 1 could not be written: no such file or directory"
    ):
        save(checkpoints, 1)
    (tmp_path / "run").mkdir()  # the fix
    save(checkpoints, 1)


def test_a_save_leaves_nothing_behind_in_memory(tmp_path):
    checkpoints = CheckpointStore(tmp_path)
    gc.collect()
    gc.disable()  # a collection comes when it comes: after minutes, in a training whose objects are few and large
    try:
        held = []
        for step in range(3):
            checkpoints.save({"weights": torch.full((40, 2**18), float(step))}, step=step)  # 40 MiB
            checkpoints.close()
            held.append(own_memory())
        assert held[-1] - held[0] < 20 * 2**20
    finally:
        gc.enable()


def test_a_full_disk_with_one_kept_checkpoint_is_not_told_to_keep_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for keep_last in (1, 2):
        store = CheckpointStore(tmp_path, keep_last)
        with monkeypatch.context() as patched:
            patched.setattr("tpukit.training.checkpoints.save_tensors", full)
            store.save(a_state(1), step=1)
            with pytest.raises(CheckpointError, match="free some space there, or") as caught:
                store.close()
        assert ("keep_last=1" in caught.value.fix) == (keep_last > 1)
