"""Graphs of the kit, compiled for real by the TPU's own compiler; `make compile-check` does it with all of them."""

import pytest
from compiler.graphs import compile_for, record_graph

from tpukit.backends.standin.build import why_not
from tpukit.preflight.compiler import CompileFailed
from tpukit.preflight.libtpu import NoLibtpu, fetch_libtpu
from tpukit.preflight.recording import Recording

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # torch_xla's own


@pytest.fixture(scope="module", autouse=True)
def _libtpu():
    if reason := why_not():
        pytest.skip(reason)
    try:
        fetch_libtpu()
    except NoLibtpu as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["broadcast", "all_reduce max int64", "fit, bf16"])
def test_the_compiler_takes_the_graph(name):
    made = compile_for("v5e-8", record_graph(name))
    assert made.code_bytes > 0
    assert made.cycles > 0 or name != "fit, bf16"


def test_a_graph_that_it_refuses_is_called_so():
    recording = record_graph("all_reduce sum int64")
    (graph,) = recording.graphs
    broken = Recording(recording.chip, (type(graph)(graph.module[: len(graph.module) // 2], graph.options),), True)
    with pytest.raises(CompileFailed):
        compile_for("v5e-8", broken)
