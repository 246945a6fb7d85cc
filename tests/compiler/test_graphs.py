"""Graphs of tpukit, compiled for real by the TPU's own compiler; `make compile-check` does it with all of them."""

import pytest
from compiler.graphs import compile_for, ones, record_graph

from tpukit.preflight.compiler import CompileError
from tpukit.preflight.libtpu import LibtpuNotFoundError, fetch_libtpu
from tpukit.preflight.recording import record
from tpukit.profiling import find_tpu
from tpukit.simulator.build import why_not

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # torch_xla's own


@pytest.fixture(scope="module", autouse=True)
def _libtpu():
    if reason := why_not():
        pytest.skip(reason)
    try:
        fetch_libtpu()
    except LibtpuNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["broadcast", "all_reduce max int64", "fit, bf16"])
def test_the_compiler_takes_the_graph(name):
    made = compile_for("v5e-8", record_graph(name))
    assert made.code_bytes > 0
    assert made.cycles > 0 or name != "fit, bf16"


def largest_by_torch_xla(core):
    """Take the max of int64 over the cores as torch_xla does, and not as tpukit."""
    import torch_xla.core.xla_model as xm

    kept = xm.all_reduce(xm.REDUCE_MAX, ones(core, "int64"))
    core.backend.sync()
    return kept


def test_what_the_compiler_refuses_is_called_so():
    with pytest.raises(CompileError, match="Supported lowering only of Sum all reduce"):
        compile_for("v5e-8", record(largest_by_torch_xla, chip=find_tpu("v5e-8"), progress="off"))
