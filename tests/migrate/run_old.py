"""Run a migrated notebook to its end on two cores, on small inputs that stand in for its own.

    python run_old.py new.ipynb fixture

Prints, last, a line of JSON: how many launches there were, and whether the cores' weights are equal.
"""

import json
import sys
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from torch.optim.optimizer import register_optimizer_step_post_hook

import tpukit
from tpukit.migrate import on_old_rank
from tpukit.standin import why_not

HERE = Path(__file__).parent
CELL_OF_THE_KIT = "# @title The kit"


def sources(path):
    """Return the code of each cell as Python; of a script its whole text."""
    if path.suffix == ".py":
        return [path.read_text()]
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [text for text in texts if not text.startswith(CELL_OF_THE_KIT)]


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
    """Runs the cells that nbconvert wrote as calls, and nothing for the shell."""

    def __init__(self, scope):
        self.scope = scope

    def run_cell_magic(self, magic, line, text):
        if magic in ("time", "capture"):
            exec(text, self.scope)

    def system(self, command):
        """Leave the machine as it is."""


def main():
    """Run the cells one after the other, as "Run all" would."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    fixture = {}
    exec((HERE / "fixtures" / f"{name}.py").read_text(), fixture)
    runs, launch = [], tpukit.launch

    def on_two_cores(fn, *args, backend, cores=2):
        assert why_not() is None
        runs.append(launch(fn, *args, cores=2, backend="xla:standin", progress="off", seed=0))
        return runs[-1]

    tpukit.launch, tpukit.on_old_rank = on_two_cores, with_weights
    scope = {"__name__": "__main__"}
    scope["get_ipython"] = lambda: Shell(scope)
    for text in sources(path):
        for old, new in fixture.get("SMALLER", {}).items():
            text = text.replace(old, new)
        lines = [line for line in text.split("\n") if not line.lstrip().startswith(("!", "%"))]
        exec(compile(TransformerManager().transform_cell("\n".join(lines)), path.name, "exec"), scope)
    weights = [[run.results[0] == other for other in run.results[1:]] for run in runs]
    moved = sum(len(run.results[0]) for run in runs)
    print(json.dumps({"launches": len(runs), "weights": moved, "equal": all(all(one) for one in weights)}))


if __name__ == "__main__":
    main()
