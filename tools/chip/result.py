"""Write the outcome of a proof as JSON, and read and check it."""

import datetime
import json
import re
import subprocess
from pathlib import Path

from tpukit.essentials.display import PathNotFoundError, TpukitError
from tpukit.essentials.environment import MachineInfo

FORMAT = 1
PARTS = (
    *(
        "check",
        "health",
        "launch",
        "collectives",
        "samples",
        "by hand",
        "fit",
        "resume",
        "fault",
        "interrupt",
    ),
    *("profile", "kept", "rates"),
)


class NoProof(TpukitError, ValueError):
    """The text is not the JSON of a proof on a chip."""


def summarize(
    host: MachineInfo,
    topology,
    outcomes: dict[str, dict],
    *,
    run: str,
    code: str,
    date: str,
    seconds: float,
):
    """Return what becomes the line of JSON."""
    names = ("python", "torch", "torch_xla", "libtpu", "torchvision")
    return {
        "tpukit_proof": FORMAT,
        "passed": bool(outcomes) and all(one["passed"] for one in outcomes.values()),
        "run": run,
        "code": code,
        "date": date,
        "seconds": round(seconds, 1),
        "platform": host.platform,
        "chips": host.chips,
        "generation": host.generation,
        "backend": topology.backend if topology else None,
        "device": topology.device if topology else None,
        "cores": topology.cores if topology else 0,
        "dry_run": topology.is_dry_run if topology else None,
        "versions": {name: host.versions.get(name) for name in names},
        "parts": outcomes,
    }


def find_result(text: str) -> dict | None:
    """Return the last line of a text that is the JSON of a proof.

    The text may be the file, or the whole output of a run.
    """
    for line in reversed(text.splitlines()):
        if '"tpukit_proof"' in line:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and "tpukit_proof" in found:
                return found
    return None


def read_result_of_a_chip(file: str | Path) -> dict:
    """Return a file's proof, whole, passed, and of a chip.

    Raises:
        NoProof: it is not; the message says why, and what to do.
        FileNotFoundError: there is no such file.
    """
    path = Path(file)
    if not path.is_file():
        raise PathNotFoundError(
            f"no such file: {path}", fix="make chip-colab or make chip-kaggle writes one"
        )
    text = path.read_text(errors="replace")
    found = find_result(text)
    if found is None:
        raise NoProof(
            f"{path} has no line that is a proof's JSON",
            found=f"{len(text)} characters that begin with {text[:60]!r}",
            fix="give the file of `python -m tools.chip --result FILE`, or its whole output",
        )
    if found["tpukit_proof"] != FORMAT:
        raise NoProof(
            f"{path} is a proof of format {found['tpukit_proof']!r}, this tpukit reads {FORMAT}",
            fix="run it again with this tpukit",
        )
    wrong = _wrong_fields(found)
    if wrong:
        raise NoProof(
            f"{path} is no whole proof",
            found=f"{'; '.join(wrong)}",
            fix="give the line as it was printed, unchanged and not cut off",
        )
    if not found["chips"] or found["dry_run"] or found["backend"] != "xla":
        raise NoProof(
            f"{path} is not of a TPU: it proves nothing about one",
            found=f"{found['platform']}, {found['chips']} chips, backend {found['backend']!r}, "
            f"{found['device']}",
            fix="make chip-colab, make chip-kaggle, or python -m tools.chip on a TPU machine",
        )
    if found["cores"] < found["chips"]:
        raise NoProof(
            f"{path} is of a part of a TPU: {found['cores']} cores of {found['chips']} chips",
            fix="run it again without --cores",
        )
    failed = {name: one for name, one in found["parts"].items() if not one["passed"]}
    if failed or not found["passed"]:
        errors = "; ".join(f"{name}: {one.get('error', '')[:200]}" for name, one in failed.items())
        raise NoProof(
            f"{path} is of a proof that failed", found=errors, fix="correct it, and run it again"
        )
    return found


def code_that_runs() -> str:
    """Return the commit of this clone, with "+" if files have changed; else tpukit's version."""
    from tpukit import __version__

    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    try:
        at = subprocess.run(
            [*git, "rev-parse", "--show-toplevel", "--short", "HEAD"],
            capture_output=True,
            text=True,
        )
        if at.returncode or Path(at.stdout.split("\n")[0]).resolve() != root.resolve():
            return f"version {__version__}"
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "tpukit"], capture_output=True, text=True
        )
    except OSError:  # no git here
        return f"version {__version__}"
    mark = "+" if changed.stdout.strip() else ""
    return f"commit {at.stdout.split()[-1]}{mark}"


def _wrong_fields(found: dict) -> list[str]:
    kinds = {
        **{
            "passed": bool,
            "run": str,
            "code": str,
            "date": str,
            "seconds": int | float,
            "platform": str,
        },
        **{
            "chips": int,
            "generation": str | None,
            "backend": str | None,
            "device": str | None,
            "cores": int,
        },
        **{"dry_run": bool | None, "versions": dict, "parts": dict},
    }
    wrong = [
        f"{name} is {found.get(name)!r}"
        for name, kind in kinds.items()
        if not isinstance(found.get(name), kind)
    ]
    if wrong:
        return wrong
    texts = [found[name] for name in ("code", "platform", "generation")]
    texts += [found["versions"].get(name) for name in ("python", "torch", "torch_xla", "libtpu")]
    # They become words of a table: nothing may end its cell.
    wrong += [
        f"{one!r} is no name or version"
        for one in texts
        if not re.fullmatch(r"[\w.+() -]{1,60}", one or "none")
    ]
    try:
        datetime.date.fromisoformat(found["date"])
    except ValueError:
        wrong.append(f"date is {found['date']!r}")
    missing = [name for name in PARTS if name not in found["parts"]]
    wrong += [f"the parts {', '.join(missing)} are missing"] if missing else []
    for name, part in found["parts"].items():
        if not isinstance(part, dict) or not isinstance(part.get("passed"), bool):
            wrong.append(f"the part {name} does not say whether it passed")
    rates = found["parts"].get("rates")
    if not wrong and rates["passed"]:
        numbers = [
            rates.get(f"images_per_second_{kind}") for kind in ("without_input", "with_input")
        ]
        numbers += [rates.get("size"), rates.get("batch_size")]
        is_right = all(isinstance(one, int | float) and one > 0 for one in numbers)
        wrong += [] if is_right and rates.get("network") == "resnet34" else [f"rates are {rates}"]
    return wrong
