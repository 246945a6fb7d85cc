"""Write a proof on a chip into the table of evidence: a row for each kind of machine.

    python -m tools.chip.evidence_row runs/proof-colab.json [--evidence docs/evidence.md]

Takes the JSON that `python -m tools.chip` printed, or its whole output. Refuses a proof that is not
of a TPU, not complete, or that failed. It replaces the row of the same kind of machine.
"""

import argparse
import datetime
import sys
from pathlib import Path

from tools.chip.result import NoProof, read_result_of_a_chip

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence.md"
_BEGIN = "| [a proof](../tools/chip/parts.py)"
_HEADER = "| what | where | result |"


def row(found: dict) -> str:
    """Return the row of the table for a proof."""
    versions = found["versions"]
    rates = found["parts"]["rates"]
    day = datetime.date.fromisoformat(found["date"])
    where = (
        f"{machine(found)}; torch {versions['torch']}, torch_xla {versions['torch_xla']}, "
        f"libtpu {versions['libtpu']}, Python {versions['python']}; "
        f"{found['code']}, {day.day} {day:%B %Y}"
    )
    numbers = (
        f"{rates['network']} at {rates['size']} pixels, batches of {rates['batch_size']} a core: "
        f"{rates['images_per_second_with_input']:,.0f} images/s from the cache, "
        f"{rates['images_per_second_without_input']:,.0f} on a batch that is there"
    )
    passed = f"all {len(found['parts'])} parts passed in {found['seconds']:,.0f} s"
    return f"{_BEGIN} | {where} | {passed}; {numbers} |"


def machine(found: dict) -> str:
    """Return the kind of machine, as the platforms name it: "Kaggle v5e-8"."""
    return f"{found['platform']} {found['generation']}-{found['cores']}"


def with_row(evidence: str, found: dict) -> str:
    """Return the page of evidence with the row of a proof.

    It replaces the row of the same kind of machine.

    Raises:
        NoProof: this page has no such table.
    """
    lines = evidence.split("\n")
    if _HEADER not in lines:
        raise NoProof(
            f"the page has no table that begins with {_HEADER}",
            fix="give docs/evidence.md of this repository",
        )
    rows = [number for number, line in enumerate(lines) if line.startswith(_BEGIN)]
    same = [number for number in rows if lines[number].startswith(f"{_BEGIN} | {machine(found)};")]
    if same:
        lines[same[0]] = row(found)
        return "\n".join(lines)
    last = rows[-1] if rows else lines.index(_HEADER) + 1  # below the line under the header
    return "\n".join([*lines[: last + 1], row(found), *lines[last + 1 :]])


def main(arguments: list[str] | None = None) -> int:
    """Write the row, or say why there is none to write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the JSON of a proof, or all that it printed")
    parser.add_argument(
        "--evidence", type=Path, default=EVIDENCE, help="the page (default: docs/evidence.md)"
    )
    given = parser.parse_args(arguments)
    try:
        found = read_result_of_a_chip(given.file)
        text = with_row(given.evidence.read_text(), found)
    except (NoProof, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    given.evidence.write_text(text)
    print(row(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
