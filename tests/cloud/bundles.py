"""Functions of a notebook, as they are and as a bundle: `make bundles`. Each is called in both; refused is right, too.

    python tests/cloud/bundles.py [name of one]

A case of bundles.txt is the notebook's cells, in the order in which they run; they define `f`, whose result has a repr
that says all about it. Cells run in IPython, the bundle in an interpreter of its own.
"""

import contextlib
import io
import json
import linecache
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path

RUNNER = """
import importlib.util, io, contextlib, json, sys
spec = importlib.util.spec_from_file_location("contents", sys.argv[1])
contents = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contents)
runner = sys.modules["__main__"]
for folder in sys.argv[2:]:
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            said = repr(contents.load_trainer("from_the_notebook", "f")(None))
    except Exception as error:
        said = f"raised {type(error).__name__}: {error}"
    print(json.dumps(said))
    sys.path.remove(folder)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
"""


def read_cases(text):
    """Return {name: cells}: a case begins with "== name", "--" stands between its cells, and "####" is a heading."""
    parts = re.split("^== (.*)\n", re.sub("^####.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]
    cells = ([cell.rstrip("\n") + "\n" for cell in re.split("^--\n", case, flags=re.MULTILINE)] for case in parts[1::2])
    return dict(zip(parts[::2], cells, strict=True))


CASES = read_cases(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def in_notebooks(names):
    """Yield (name, what the notebook's function returns, the bundle or the words of the refusal)."""
    from IPython.core.interactiveshell import InteractiveShell

    from tpukit.cloud.bundle import make_bundle

    sys.modules["__main__"] = types.ModuleType("__main__")  # a kernel's is the notebook
    shell = InteractiveShell.instance(user_module=sys.modules["__main__"])
    shell.history_manager.enabled = False  # nothing is written to the disk
    own = dict(shell.user_ns)
    for name in names:
        shell.user_ns.clear()
        shell.user_ns.update(own)
        shell.history_manager.input_hist_raw[:] = [""]
        shell.compile.reset_compiler_flags()
        for cell in [one for one in linecache.cache if one.startswith("<ipython")]:
            del linecache.cache[cell]
        shell.execution_count = 1
        for module in ("beside", "pack", "pack.inner"):
            sys.modules.pop(module, None)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("beside.py").write_text("FACTOR = 2\ndef double(x):\n    return FACTOR * x\n")
            Path("pack").mkdir()
            Path("pack/inner.py").write_text("X = 'inner'\n")
            sys.path.insert(0, "")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                for cell in CASES[name]:
                    shell.run_cell(cell, store_history=True)
                try:
                    made = make_bundle(shell.user_ns["f"])
                except (TypeError, ValueError) as error:
                    made = str(error)
                try:
                    here = repr(shell.user_ns["f"](None))
                except Exception as error:  # of any function
                    here = f"raised {type(error).__name__}: {error}"
            sys.path.remove("")
            yield name, here, made


def as_bundles(bundles, at_once):
    """Return what each bundle's function returns, in interpreters of their own, so many at once."""
    from tpukit.cloud import contents

    said = []
    for first in range(0, len(bundles), at_once):
        with tempfile.TemporaryDirectory() as folder:
            for number, bundle in enumerate(bundles[first : first + at_once]):
                for path, content in bundle.contents.items():
                    to = Path(folder, str(number), path)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_bytes(content)
            folders = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
            command = [sys.executable, "-P", "-c", RUNNER, contents.__file__, *folders]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
            said += [json.loads(line) for line in done.stdout.splitlines()]
            assert done.returncode == 0, done.stderr
    return said


def round_trip(names, at_once=1):
    """Return {name: (what came of it, the words)} of these cases: "equal", "refused" or "wrong"."""
    found = list(in_notebooks(names))
    made = [(name, here, bundle) for name, here, bundle in found if not isinstance(bundle, str)]
    there = as_bundles([bundle for *_, bundle in made], at_once)
    outcome = {name: ("refused", words) for name, _, words in found if isinstance(words, str)}
    for (name, here, _), said in zip(made, there, strict=True):
        outcome[name] = ("equal" if here == said else "wrong", f"{here} here, {said} as a bundle")
    return {name: outcome[name] for name in names}


def main(names):
    """Print what came of each function, and the numbers as the last line."""
    outcome = round_trip(names or list(CASES))
    for name, (what, words) in outcome.items():
        print(f"{what:8} {name}: {textwrap.shorten(words, 150)}")
    came = [what for what, _ in outcome.values()]
    print(json.dumps({"functions": len(came), **{one: came.count(one) for one in ("equal", "refused", "wrong")}}))
    return "wrong" in came


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
