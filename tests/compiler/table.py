"""Compile every graph that tpukit makes with the TPU's own compiler, for three machines; print a table.

    python tests/compiler/table.py [--only WORD] [--libtpu VERSION]

No TPU is needed. The cells are seconds; the last line is JSON; the exit status is 0 when nothing was refused. What was
compiled before comes from a cache, with the seconds it took then.
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
from graphs import CHIPS, GRAPHS, LIBTPUS, compile_for, record_graph  # noqa: E402

from tpukit.preflight.compiler import CompileError  # noqa: E402
from tpukit.preflight.libtpu import fetch_libtpu  # noqa: E402


def main() -> int:
    """Compile, print a row as it is done, and at the end what was refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="graphs whose name holds this")
    parser.add_argument("--libtpu", choices=LIBTPUS, help="one version of the compiler only")
    options = parser.parse_args()
    libtpus = (options.libtpu,) if options.libtpu else LIBTPUS
    for version in libtpus:
        fetch_libtpu(version)
    columns = [(chip, version) for chip in CHIPS for version in libtpus]
    print(f"{'':24}" + "".join(f"{f'{chip} {version}':>16}" for chip, version in columns))
    compiled, refused = 0, {}
    for name in (name for name in GRAPHS if options.only in name):
        recording, cells = record_graph(name), []
        for chip, version in columns:
            try:
                cells.append(f"{compile_for(chip, recording, version).seconds:.1f}")
                compiled += 1
            except CompileError as error:
                cells.append("refused")
                refused[f"{name}, {chip}, libtpu {version}"] = str(error)
        print(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    for name, why in refused.items():
        print(f"\n{name}:\n{textwrap.indent(why, '  ')}")
    print(json.dumps({"compiled": compiled, "refused": len(refused)}))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
