"""The notebook of this process, if the process is a notebook's kernel."""

import sys


def running_shell():
    """Return IPython's shell; None outside of IPython. It does not import IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    return ipython.get_ipython()


def current_cell() -> int | None:
    """Return the number of the notebook cell that runs now; None outside of IPython."""
    shell = running_shell()
    if shell is None:
        return None
    return shell.execution_count
