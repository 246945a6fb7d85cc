"""The notebook that this process may be the kernel of."""

import sys


def running_shell():
    """Return IPython's shell; None outside of IPython. Does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def current_cell() -> int | None:
    """Return the number of the notebook cell that runs now; None outside of IPython."""
    shell = running_shell()
    return shell.execution_count if shell else None
