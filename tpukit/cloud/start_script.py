"""Write the script that starts a job on any machine, and the list of packages that it installs."""

from tpukit.cloud.target import JobOptions, JobPlan
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import RELEASES

_OLDEST = (3, 11)  # the oldest Python that tpukit and torch_xla support
_NEWEST = (3, 13)  # the newest Python for which torch_xla 2.9 has wheels
# The only platform for which torch_xla and libtpu have wheels.
_XLA_ONLY = "sys_platform == 'linux' and platform_machine == 'x86_64'"
# The packages that `run_notebook` needs.
_RUNNER = (
    "pip",
    "papermill>=2.6,<3",
    "ipykernel>=6.29,<8",
    "nbconvert>=7.16,<8",
    "google-crc32c>=1.5",
)

_SCRIPT = """#!/usr/bin/env bash
# Start the job on this machine, for the first time or again: bash run.sh [ADDRESS [WORK]]
#   ADDRESS: for results, a path or gs://bucket/folder; by default the folder of this file
#   WORK: a folder on the machine's own disk; by default a new one
# An image may name its environment in TPUKIT_ENVIRONMENT; missing packages are added.
# Exit code 0: it has succeeded. 1: it is over (see result.json) or cancelled. 75: interrupted,
# start it again.
set -uo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
address=${1:-$folder}
work=${2:-$(mktemp -d)}
mkdir -p "$work"
# The notebook is executed in another folder, so both paths become absolute.
work=$(cd "$work" && pwd)
case $address in gs://* | /*) ;; *) address=$PWD/$address ;; esac
environment=${TPUKIT_ENVIRONMENT:-$work/environment}
export TPUKIT_STARTED=$(date +%s)  # the time limit includes the installation

for place in "$folder" "$address"; do  # over already: to start it again costs seconds
    if [ -e "$place/cancel" ]; then exit 1; fi
    if [ -e "$place/result.json" ]; then
        grep -q '"state": "succeeded"' "$place/result.json" && exit 0
        exit 1
    fi
done

fail() {  # text without quotes
    echo "$1" >> "$work/setup.log"
    cat "$work/setup.log"
    mkdir -p "$folder/log"
    cp "$work/setup.log" "$folder/log/00-setup.txt"
    printf '{"state": "failed", "phase": "setup", "error": "%s"}\\n' "$1" > "$folder/.result.part"
    mv "$folder/.result.part" "$folder/result.json"
    exit 1
}

# In the background, because bash handles a signal only between two commands.
child=
trap 'kill $child 2> /dev/null; exit 75' TERM INT
run() {
    "$@" >> "$work/setup.log" 2>&1 &
    child=$!
    wait $child
}
limit=
command -v timeout > /dev/null && limit="timeout @TIMEOUT@"
retry() {  # a network may fail for a while
    for pause in 3 9 0; do
        run $limit "$@" && return 0
        [ $pause = 0 ] && return 1
        run sleep $pause
    done
}

find_python() {
    for name in python@PYTHON@ python3; do
        "$name" -c 'import sys
if @OLDEST@ <= sys.version_info[:2] <= @NEWEST@: print(sys.executable)
else: sys.exit(1)' 2> /dev/null && return
    done
    echo @PYTHON@  # uv fetches it
}

: > "$work/setup.log"
export PATH="$PATH:$work/uv/bin"
if ! command -v uv > /dev/null; then
    retry python3 -m pip install --quiet --disable-pip-version-check --target "$work/uv" uv \\
        || fail "uv cannot be installed"
fi
if [ ! -x "$environment/bin/python" ]; then
    run uv venv --quiet --python "$(find_python)" "$environment" \\
        || fail "there is no Python @PYTHON@"
fi
version=$("$environment/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != @CALLER@ ]; then
    echo "tpukit: the job runs on Python $version, it was sent from Python @CALLER@" \\
        >> "$work/setup.log"
fi
packages=(-r packages.txt)
[ -e "$folder/in/requirements.txt" ] && packages+=(-r requirements.txt)
case $address in gs://*) packages+=("google-cloud-storage>=2.14,<4") ;; esac
cd "$folder/in"
@INSTALL@
cd "$work"
trap - TERM INT
export PATH="$environment/bin:$PATH" PYTHONNOUSERSITE=1 JUPYTER_PREFER_ENV_PATH=1
export IPYTHONDIR="$work/ipython"@DEVICE@
exec "$environment/bin/python" -m tpukit.cloud.run_notebook "$address" "$folder" "$work"
"""
_INSTALL = """install=(uv pip install --quiet --python "$environment/bin/python")
retry "${install[@]}" "${packages[@]}" || fail "the packages cannot be installed; see the log"
"""
_ALONE = """retry "${install[@]}" --no-deps ./@WHEEL@ \\
    || fail "tpukit cannot be installed; see the log"
"""
_BACKEND = """if [ -z "${UV_TORCH_BACKEND+set}" ]; then  # a TPU needs no CUDA libraries (4 GB)
    index=https://download.pytorch.org/whl/cpu/torch/
    if "$environment/bin/python" -c 'import sys, urllib.request as request
request.urlopen(sys.argv[1], timeout=20)' $index 2> /dev/null; then
        export UV_TORCH_BACKEND=cpu
    else
        echo "tpukit: $index cannot be reached; torch comes from the default index" \\
            >> "$work/setup.log"
    fi
elif [ -z "$UV_TORCH_BACKEND" ]; then
    unset UV_TORCH_BACKEND
fi
"""


def start_script(plan: JobPlan, wheel: str) -> str:
    """Return the text of run.sh.

    Args:
        plan: the plan of the job.
        wheel: the file name of tpukit's wheel, which is in the job's subfolder `in`.
    """
    caller = tuple(int(number) for number in plan.python.split("."))
    wanted = plan.python if _OLDEST <= caller <= _NEWEST else "3.12"
    install = _INSTALL + _ALONE if plan.options.torch == "none" else _BACKEND + _INSTALL
    device = "" if plan.target == "local" else " PJRT_DEVICE=TPU"
    values = {
        "INSTALL": install.rstrip(),
        "WHEEL": wheel,
        "DEVICE": device,
        "TIMEOUT": f"{plan.timeout:.0f}",
        "PYTHON": wanted,
        "CALLER": plan.python,
        "OLDEST": str(_OLDEST),
        "NEWEST": str(_NEWEST),
    }
    # The script contains $ and { }, so neither string.Template nor str.format can fill it in.
    text = _SCRIPT
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def package_list(options: JobOptions, wheel: str) -> list[str]:
    """Return the packages that every job with these options installs, as lines of packages.txt.

    torch, torch_xla and libtpu are pinned, because each release of torch_xla works with exactly one
    release of torch and a few of libtpu.

    Args:
        options: the options of the job.
        wheel: the file name of tpukit's wheel, which is in the job's subfolder `in`.

    Raises:
        ValueError: torch_xla has no release for this torch.
    """
    if options.torch == "none":
        return list(_RUNNER)
    torch = options.torch or list(RELEASES)[-1]
    if torch not in RELEASES:
        raise InvalidValueError(
            f"no torch_xla works with torch {torch}",
            found=f"torch_xla works with torch {', '.join(RELEASES)}",
            fix=f'JobOptions(torch="{list(RELEASES)[-1]}"), or torch="none" for another framework',
        )
    release = RELEASES[torch]
    return [
        *_RUNNER,
        f"./{wheel}",
        f"torch=={torch}",
        f"torchvision=={release.torchvision}",
        f"torch_xla=={release.torch_xla[-1]}; {_XLA_ONLY}",
        f"libtpu=={release.libtpu[-1]}; {_XLA_ONLY}",
    ]
