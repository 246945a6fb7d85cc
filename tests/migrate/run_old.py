"""Run a migrated notebook to its end on two cores, on small inputs that stand in for its own.

    python run_old.py new.ipynb fixture

A fixture makes its files when it is run, in a folder `kaggle/working` beside `kaggle/input`, and may say:

    SMALLER    what a user would set: sizes, numbers of epochs and cores, by the text that stands for it
    DECIDED    lines that are a stop or a note, by what it says to write there
    LOST       what a notebook uses and no cell of it sets, by name
    ARGUMENTS  of a script

Packages that are not installed, or would download, are stood in for by those in `others`. Prints, last, a line of JSON:
how many launches there were, how many weights moved, and whether they are equal on the cores.
"""

import json
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

import tpukit
from tpukit.migrate import on_old_rank
from tpukit.migrate.magics import is_python, magic_of, mask
from tpukit.standin import why_not

HERE = Path(__file__).parent
CELL_OF_THE_KIT = "# @title The kit"


def sources(path):
    """Return the code of each cell as Python; of a script its whole text."""
    if path.suffix == ".py":
        return [path.read_text()]
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [text for text in texts if is_python(magic_of(text)[0]) and not text.startswith(CELL_OF_THE_KIT)]


def with_weights(fn):
    """Return a worker that runs an old one and returns the sums of all weights that its optimizers moved."""
    run = on_old_rank(fn)

    def old_and_weights(core, *args):
        kept = []
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: kept.append(optimizer) if optimizer not in kept else None
        )
        run(core, *args)
        hook.remove()
        groups = [group["params"] for optimizer in kept for group in optimizer.param_groups]
        return [float(one.detach().cpu().double().abs().sum()) for params in groups for one in params]

    return old_and_weights


class Shell:
    """Runs the cells that nbconvert wrote as calls, and for the shell nothing but scripts that a cell has written."""

    def __init__(self, scope):
        self.scope = scope

    def run_cell_magic(self, magic, line, text):
        if magic in ("time", "capture"):
            exec(text, self.scope)
        elif magic == "writefile":
            Path(line).write_text(text)

    def system(self, command):
        """Run a script; leave the machine as it is."""
        if found := re.match(r"python3? (\w+\.py)(.*)", command):
            sys.argv = [found[1], *shlex.split(found[2])]
            exec(compile(Path(found[1]).read_text(), found[1], "exec"), {"__name__": "__main__"})


def in_a_place_like_kaggle(folder):
    """Go where a notebook of Kaggle works, where modules that it writes are found."""
    working = folder / "kaggle/working"
    working.mkdir(parents=True)
    (folder / "kaggle/input").mkdir()
    os.chdir(working)
    sys.path[:0] = [str(working), str(HERE / "others")]


def main():
    """Run the cells one after the other, as "Run all" would."""
    path, name = Path(sys.argv[1]).resolve(), sys.argv[2]
    in_a_place_like_kaggle(path.parent / f"{path.stem}-files")
    fixture = {}
    exec((HERE / "fixtures" / f"{name}.py").read_text(), fixture)
    sys.argv = [str(path), *fixture.get("ARGUMENTS", ())]
    launch, told = tpukit.launch, Path.cwd() / "weights.jsonl"  # a file: a notebook may launch in a process of its own
    told.touch()

    def on_two_cores(fn, *args, backend, cores=2):
        assert why_not() is None
        run = launch(fn, *args, cores=2, backend="xla:standin", progress="off", seed=0)
        with told.open("a") as file:
            print(json.dumps(run.results), file=file)
        return run

    tpukit.launch, tpukit.on_old_rank = on_two_cores, with_weights
    scope = {"__name__": "__main__", "__file__": str(path), **fixture.get("LOST", {})}
    scope["get_ipython"] = lambda: Shell(scope)
    changes = {"/kaggle/": "../../kaggle/", **fixture.get("SMALLER", {}), **fixture.get("DECIDED", {})}
    texts = "\0".join(sources(path))
    for old, new in changes.items():
        assert old in texts or old == "/kaggle/", f"the fixture replaces what is not there: {old}"
        texts = texts.replace(old, new)
    try:
        for text in texts.split("\0"):
            exec(compile(mask(text)[0], path.name, "exec"), scope)  # lines for the shell are left out
    except SystemExit as end:  # a script that says itself where it ends
        if end.code:
            raise
    for child in multiprocessing.active_children():
        child.join()
    runs = [json.loads(line) for line in told.read_text().splitlines()]
    equal = all(other == first for first, *others in runs for other in others)
    print(json.dumps({"launches": len(runs), "weights": sum(len(one[0]) for one in runs), "equal": equal}), flush=True)


if __name__ == "__main__":
    main()
