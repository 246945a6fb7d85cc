"""Run the parts of a proof, one after the other, in the process that `supervisor` watches."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tools.chip.parts import PARTS, Proof
from tpukit.essentials.environment import MachineInfo, setup
from tpukit.essentials.launcher import choose_topology, die_with_parent


def main(
    parts: list[str],
    *,
    folder: Path,
    outcomes: Path,
    backend: str | None,
    cores: int | None,
    seconds: float,
):
    """Run the parts; append a line of JSON to the outcomes when each begins and when it ends."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with outcomes.open("a", buffering=1) as file:

        def tell(**facts: object) -> None:
            file.write(json.dumps(facts) + "\n")

        setup()  # Kaggle's variables, which keep chips from starting
        host = MachineInfo.read()
        proof = Proof(host, choose_topology(host, cores, backend), folder, seconds)
        # XLA:CPU compiles in a tenth of the time then, and these graphs run a few times
        if proof.topology.is_dry_run:
            os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        import torch._dynamo  # noqa: F401  an optimiser does: here once, or in each core of each launch

        for name in parts:
            print(f"---- {name}: {' '.join(PARTS[name].__doc__.split())}", flush=True)
            tell(begins=name)
            began = time.monotonic()
            try:
                outcome = {"passed": True, **PARTS[name](proof)}
            except (
                BaseException
            ) as error:  # SIGINT that came too late included: the other parts go on
                traceback.print_exc(file=sys.stdout)
                # without the traceback of a core
                told = f"{type(error).__name__}: {error}".partition("\n\n")[0]
                outcome = {"passed": False, "error": told[:2000]}
            tell(ends=name, outcome={"seconds": round(time.monotonic() - began, 1), **outcome})


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(
        given.pop("parts"),
        **{**given, "folder": Path(given["folder"]), "outcomes": Path(given["outcomes"])},
    )
