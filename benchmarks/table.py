"""Run the benchmarks one after the other, and write their results as one table.

    python benchmarks/table.py [--only recording step]

Each benchmark prints a table and, last, one line of JSON; the rows come from these lines. They are
also kept in `runs/bench.jsonl`, and `--from runs/bench.jsonl` writes the table again.

    tpukit      tpukit's figure
    best peer   the best figure of the others in the same run, and their name
    limit       the most that the machine allows, such as a copy of the same bytes
    ratio       tpukit's figure over the peer's, or over the limit if there is no peer. For a time,
                below 1 is better; for a rate such as "times the tutorial's", above 1.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
LIBRARIES = ("webdataset", "grain", "spdl", "dataloader")
LOOPS = ("hand_written", "lightning", "accelerate", "tutorial")


class Row(NamedTuple):
    """A question and its answer, as texts; the ratio is a number or None."""

    question: str
    tpukit: str = ""
    peer: str = ""
    limit: str = ""
    ratio: float | None = None


def of_input(found: dict) -> list[Row]:
    """Return the rows of input.py; its rates are in times of the tutorial's pipeline."""
    cache = found["cache_1_thread"]
    jpeg = found["jpeg_2_processes"]
    peers = {name: found[name] for name in LIBRARIES if found.get(name)}
    best = max(peers, key=peers.get, default=None)
    copied = cache / found["memcpy_fraction"]
    rows = [
        Row(
            "images from the pixel cache, one thread: times the tutorial's",
            f"{cache:.0f}",
            "tutorial 1",
            f"copy of the bytes {copied:.0f}",
            cache,
        )
    ]
    if best:
        decoded = found["jpeg_per_core"] / found["decoder_fraction"]
        rows.append(
            Row(
                "images from JPEG, two processes: times the tutorial's",
                f"{jpeg:.1f}",
                f"{best} {peers[best]:.1f}",
                f"decoder alone {2 * decoded:.1f}",
                jpeg / peers[best],
            )
        )
    rows.append(
        Row("a step with real batches over one without", limit="1", ratio=found["step_ratio"])
    )
    return rows


def of_packing(found: dict) -> list[Row]:
    """Return the row of packing.py."""
    ours = f"{found['with']:.2f} s"
    return [
        Row(
            "packing with a digest of each image",
            ours,
            limit=f"without {found['without']:.2f} s",
            ratio=found["ratio"],
        )
    ]


def of_step(found: dict) -> list[Row]:
    """Return the row of step.py: `fit` over the fastest other loop, in its worst case."""
    ratios = {name: found[f"vs_{name}"] for name in LOOPS if found.get(f"vs_{name}")}
    best = max(ratios, key=ratios.get, default=None)
    if best is None:
        return []
    return [Row("a step of fit, worst case", peer=best, ratio=ratios[best])]


def of_unet(found: dict) -> list[Row]:
    """Return the row of unet.py."""
    ours = f"{found['images_per_second']} images/s"
    return [Row("a U-Net's step of fit", ours, "by hand", ratio=found["vs_hand_written"])]


def of_session(found: dict) -> list[Row]:
    """Return a row of session.py per backend."""
    rows = []
    for name, row in found.items():
        if isinstance(row, dict):
            question = f"the second run of a session, {name}"
            launched = f"a launch {row['second_launch']:.2f} s"
            rows.append(Row(question, f"{row['second']:.3f} s", launched, ratio=row["over_launch"]))
    return rows


def of_recording(found: dict) -> list[Row]:
    """Return the rows of recording.py."""
    ours = found["record_ms"]
    replayed = found["replay_ms"]
    chip = f"chip's step {found['chip_ms']:.0f} ms"
    theirs = f"PyTorch's Adam {found['pytorch_ms']:.1f} ms"
    captured = f"fit, captured {ours:.1f} ms"
    return [
        Row("host time of a step", f"{ours:.1f} ms", theirs, chip, found["vs_pytorch"]),
        Row("the same, replayed", f"{replayed:.1f} ms", captured, chip, found["replay_vs_record"]),
    ]


def of_compile(found: dict) -> list[Row]:
    """Return the row of compile.py."""
    return [
        Row(
            "compile time with the cache",
            f"{found['warm_s']:.1f} s",
            f"without {found['cold_s']:.1f} s",
            ratio=found["ratio"],
        )
    ]


def of_startup(found: dict) -> list[Row]:
    """Return a row of startup.py per backend, and one for the second session."""
    rows = []
    for name, row in found.items():
        if isinstance(row, dict):
            seconds = sum(row[part] for part in ("import", "first launch", "model", "first step"))
            rows.append(Row(f"from import to the first step, {name}", f"{seconds:.1f} s"))
    if "ratio" in found:
        question = "compiling in the second session over the first"
        rows.append(Row(question, limit="target 0.08", ratio=found["ratio"]))
    return rows


def of_exams(found: dict) -> list[Row]:
    """Return the row of exams.py."""
    return [Row(f"the challenge's score of {found['rows']:,} images", f"{found['score_s']} s")]


def of_job(found: dict) -> list[Row]:
    """Return the rows of job.py."""
    ours = found["tpukit"]
    peers = {name: row for name, row in found.items() if name != "tpukit"}
    rows = []
    for part, question in (
        ("lines", "a small job: lines of code"),
        ("first_step_s", "a small job: seconds to the first step"),
        ("whole_s", "a small job: seconds in all"),
        ("message_lines", "a small job: lines of the message after an error"),
    ):
        best = min(peers, key=lambda name, part=part: peers[name][part])
        theirs = peers[best][part]
        rows.append(Row(question, f"{ours[part]:g}", f"{best} {theirs:g}", "", ours[part] / theirs))
    return rows


ROWS = {
    "input": of_input,
    "packing": of_packing,
    "step": of_step,
    "unet": of_unet,
    "session": of_session,
    "recording": of_recording,
    "compile": of_compile,
    "startup": of_startup,
    "exams": of_exams,
    "job": of_job,
}


def main() -> None:
    """Run the benchmarks or read their lines; print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="run these")
    parser.add_argument("--from", dest="kept", type=Path, help="a file of lines of JSON")
    options = parser.parse_args()
    if options.kept:
        lines = [json.loads(line) for line in options.kept.read_text().splitlines()]
        found = {line["benchmark"]: line["found"] for line in lines}
    else:
        found = run(options.only, kept=Path("runs", "bench.jsonl"))
    rows = []
    for name, of in found.items():
        rows += ROWS[name](of)
    print(table(rows))
    print(json.dumps({row.question: row.ratio and round(row.ratio, 3) for row in rows}))


def run(names: list[str], *, kept: Path) -> dict[str, dict]:
    """Run benchmarks, write each line of JSON to a file, and return them by name."""
    kept.parent.mkdir(exist_ok=True)
    found = {}
    with kept.open("w") as lines:
        for name in names:
            print(f"benchmarks/{name}.py", flush=True)
            line = last_line([sys.executable, FOLDER / f"{name}.py"])
            if line is None:
                continue
            found[name] = json.loads(line)
            lines.write(json.dumps({"benchmark": name, "found": found[name]}) + "\n")
            lines.flush()
    return found


def last_line(command: list) -> str | None:
    """Run a program, show its output, and return the last line; None if the program failed."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        for line in program.stdout:
            print(line, end="", flush=True)
            last = line
    if program.returncode:
        print(f"{command[-1].name} ended with {program.returncode}: left out of the table")
        return None
    return last


def table(rows: list[Row]) -> str:
    """Return the rows as a table, each column as wide as its longest text."""
    cells = [("question", "tpukit", "best peer", "limit", "ratio")]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        cells.append((row.question, row.tpukit, row.peer, row.limit, ratio))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    main()
