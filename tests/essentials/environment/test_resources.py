import os
import re
import subprocess
import sys

import pytest

from tpukit.essentials.environment.platforms import Machine
from tpukit.essentials.environment.resources import (
    OwnMemory,
    available_memory,
    cpus,
    find_cpus,
    find_memory,
    peak_memory,
)

GIB = 2**30
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


def machine(folder, groups="", files=(), meminfo="", affinity=None):
    """Make /proc and /sys/fs/cgroup as a process in these control groups sees them."""
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    if meminfo:
        (proc / "meminfo").write_text(meminfo)
    for name, text in dict(files).items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(f"{text}\n")
    return Machine(proc=proc, cgroup=cgroup, affinity=affinity)


@pytest.mark.parametrize(
    ("groups", "files", "expected", "evidence"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2, "CPU quota in"),
        ("0::/box\n", {"box/cpu.max": "200000 100000"}, 2, "box"),
        (
            "0::/box\n",
            {"box/cpu.max": "max 100000", "cpu.max": "200000 100000"},
            2,
            "CPU quota in",
        ),  # the group above
        ("0::/box\n", {"box/cpu.max": "150000 100000"}, 2, "box"),  # one and a half are two
        ("0::/\n", {"cpu.max": "50000 100000"}, 1, "CPU quota in"),  # half a processor is still one
        (
            "1:cpu,cpuacct:/docker/4f\n0::/\n",  # version 1; a container sees its own group as the root
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2,
            "CPU quota in",
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            96,
            "affinity",
        ),
        ("0::/\n", {"cpu.max": "max 100000"}, 96, "affinity"),
        ("0::/\n", {"cpu.max": "20000000 100000"}, 96, "affinity"),  # a quota of 200 allows all
        ("0::/\n", {"cpu.max": "nonsense"}, 96, "affinity"),
        ("", {}, 96, "affinity"),
    ],
)
def test_a_containers_quota_counts_on_a_machine_of_96_processors(
    tmp_path, groups, files, expected, evidence
):
    found, source = find_cpus(machine(tmp_path, groups, files, affinity=96))
    assert found == expected
    assert evidence in source


def test_a_quota_above_the_affinity_adds_no_processors(tmp_path):
    bound = machine(tmp_path, "0::/\n", {"cpu.max": "400000 100000"}, affinity=1)
    assert find_cpus(bound) == (1, "CPU affinity of this process")


@LINUX
def test_without_a_quota_the_affinity_of_this_process_counts(tmp_path):
    assert cpus(machine(tmp_path)) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "gibibytes", "evidence"),
    [
        ({}, 64, "meminfo"),
        ({"memory.max": "max"}, 64, "meminfo"),
        ({"memory.max": 16 * GIB}, 16, "memory.max"),
        ({"memory.max": 999 * GIB}, 64, "meminfo"),
        ({"mine/memory.max": 8 * GIB, "memory.max": 16 * GIB}, 8, "mine/memory.max"),
        ({"mine/memory.max": "max", "memory.max": 16 * GIB}, 16, "memory.max"),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712"},
            64,
            "meminfo",
        ),  # version 1: no limit
        ({"memory/old/memory.limit_in_bytes": 4 * GIB}, 4, "memory.limit_in_bytes"),
    ],
)
def test_memory_is_what_the_control_group_allows(tmp_path, files, gibibytes, evidence):
    meminfo = f"MemTotal:       {64 * 2**20} kB\nMemFree:  1 kB\n"
    where = machine(tmp_path, "4:memory,hugetlb:/old\n1:cpu,cpuacct:/\n0::/mine\n", files, meminfo)
    found, source = find_memory(where)
    assert found == gibibytes * GIB
    assert evidence in source


STAT_2 = "anon 100\nfile 60\ninactive_file 20\nactive_file 30\n"
STAT_1 = "cache 1\nactive_file 1\ninactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n"
LEFT = {  # in KiB, as /proc/meminfo has it
    "no limit": ({}, "", 800),
    "version 2": (
        {"box/memory.max": 500, "box/memory.current": 200, "box/memory.stat": STAT_2},
        "0::/box",
        350,
    ),
    "version 2, no limit": ({"box/memory.max": "max", "box/memory.current": 200}, "0::/box", 800),
    "the limit of a group above": ({"memory.max": 300, "memory.current": 200}, "0::/box", 100),
    "a limit above what is free": (
        {"box/memory.max": 5000, "box/memory.current": 1},
        "0::/box",
        800,
    ),
    "version 1": (
        {
            "memory/memory.limit_in_bytes": 500,
            "memory/memory.usage_in_bytes": 400,
            "memory/memory.stat": STAT_1,
        },
        "4:memory:/",
        150,
    ),
    "all used": ({"box/memory.max": 500, "box/memory.current": 510}, "0::/box", 0),
}


@pytest.mark.parametrize("name", LEFT)
def test_available_memory_is_what_the_kernel_and_every_limit_leave(tmp_path, name):
    files, groups, expected = LEFT[name]
    in_bytes = {
        file: re.sub(r"\d+", lambda kib: str(int(kib[0]) * 1024), str(text))
        for file, text in files.items()
    }
    meminfo = "MemTotal:  1 kB\nMemFree:   10 kB\nMemAvailable:     800 kB\n"
    assert (
        available_memory(machine(tmp_path, groups and f"{groups}\n", in_bytes, meminfo))
        == expected * 1024
    )


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="Windows has no sysconf")
def test_where_the_kernel_does_not_say_half_of_the_memory_is_assumed(tmp_path):
    assert (
        available_memory(Machine(proc=tmp_path, cgroup=tmp_path))
        == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )


@LINUX
def test_peak_memory_grows_with_what_is_allocated_and_never_shrinks():
    before = peak_memory()
    block = bytearray(b"x") * (before + 64 * 2**20)  # more than was ever resident
    during = peak_memory()
    del block
    assert during >= before + 64 * 2**20
    assert (
        peak_memory() >= during - 2**20
    )  # what each processor has not yet told the kernel is missing in it


@LINUX
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    held = bytearray(b"x") * 2**29
    command = "from tpukit.essentials.environment import peak_memory; print(peak_memory())"
    peak = int(subprocess.check_output([sys.executable, "-c", command]))
    assert peak < len(held)


def test_the_most_of_own_memory_counts_what_came_and_went_between_two_reads_and_no_mapped_file(
    tmp_path,
):
    status = tmp_path / "self" / "status"
    status.parent.mkdir()

    def now(own, mapped, peak):
        status.write_text(
            f"VmHWM: {peak} kB\nRssAnon:\t {own} kB\nRssFile:\t {mapped} kB\nRssShmem:\t 1 kB\n"
        )

    now(100, 9, 500)  # the peak of before is not this one's
    memory = OwnMemory(Machine(proc=tmp_path))
    assert memory.most() == 100 * 1024
    for own, mapped, peak, expected in [
        (150, 9, 500, 150),
        (120, 99, 500, 150),
        (120, 899, 1020, 150),  # a file of 800 kB was mapped
        (120, 9, 1100, 200),  # and let go, when the process held 80 kB more
        (120, 9, 1110, 1100),  # again the peak rose, with no file in sight
        (120, 9, 1110, 1100),
    ]:
        now(own, mapped, peak)
        assert memory.most() == expected * 1024


def test_where_the_system_does_not_say_own_memory_is_unknown(tmp_path):
    assert OwnMemory(Machine(proc=tmp_path)).most() == 0
