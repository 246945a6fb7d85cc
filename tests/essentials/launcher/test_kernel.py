"""Launches from a real Jupyter kernel: a process with threads and streams of its own, and a user who interrupts."""

import base64
import textwrap

import psutil
import pytest
from helpers.kernels import HANGS, Kernel

WORK = """
import os, time, torch, tpukit
def work(core, fail=False):
    core.print("a line from", core.rank)
    if fail and core.rank == 1:
        raise KeyError("here")
    return core.mean(torch.ones(2))
"""


@pytest.fixture(scope="module")
def kernel():
    started = Kernel()
    started.run(WORK)
    yield started
    started.close()


def test_launch_again_after_an_exception_and_nothing_is_left(kernel):
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")
    assert "a line from 0" in kernel.run("tpukit.launch(work, cores=2)")
    kernel.run("tpukit.launch(work, True, cores=2)")
    name, trace = kernel.error
    assert name == "WorkerError"
    assert "core 1 of 2 raised KeyError: 'here'" in trace
    assert "found: work(), cell " in trace
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")
    assert kernel.workers() == []
    assert (
        kernel.run(
            "from tpukit.essentials.backends import xla; print(xla.runtime_started())"
        ).strip()
        == "False"
    )


def test_print_from_a_worker_arrives_in_whole_lines(kernel):
    out = kernel.run(
        "def talk(core):\n    for _ in range(50): print('a', 'b', core.rank)\ntpukit.launch(talk, cores=2)"
    )
    assert out.splitlines().count("[core 0] a b 0") == 50
    assert out.splitlines().count("[core 1] a b 1") == 50


def test_the_widgets_of_a_worker_fill_no_log(kernel):
    kernel.run(
        "import logging\nfrom tqdm.auto import tqdm\nfrom traitlets.log import get_logger\n"
        "def bar(core):\n    told = logging.Handler()\n    told.emit, said = lambda record: said.append(record), []\n"
        "    get_logger().addHandler(told)\n    for _ in tqdm(range(3)): pass\n    return len(said)\n"
    )
    assert "tqdm_notebook" in kernel.run("print(tqdm.__mro__)")
    out = kernel.run("print(tpukit.launch(bar, cores=2).results)")
    assert "a widget cannot be shown from a worker" in out
    assert "[0, 0]" in out, out


def test_an_interrupt_ends_the_workers_keeps_the_log_and_the_next_launch_works(kernel):
    kernel.run(
        "import mmap, signal, threading\n"
        "begun = mmap.mmap(-1, 2)\n"
        "def wait(core):\n    core.log(loss=0.5); core.flush()\n    core.barrier()\n    begun[core.rank] = 1\n"
        "    time.sleep(900)\n"
        "def interrupt():\n    while not all(begun[:]): time.sleep(0.02)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n    tpukit.launch(wait, cores=2)\n"
        "except KeyboardInterrupt as error:\n    kept = error.run.log\n"
    )
    assert kernel.error is None
    assert kernel.run("print(kept)").strip() == "[{'step': 1, 'loss': 0.5}]"
    assert kernel.workers() == []
    assert "tensor([1., 1.])" in kernel.run("print(tpukit.launch(work, cores=2).results)")


def test_a_killed_kernel_takes_its_workers_along():
    kernel = Kernel()
    try:
        kernel.client.execute(
            "import time, tpukit\ntpukit.launch(lambda core: time.sleep(600), cores=2)"
        )
        workers = kernel.wait_for_workers(2)
        kernel.process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=HANGS)
        assert alive == []
    finally:
        kernel.close()


def test_two_notebooks_at_once_do_not_collide(kernel):
    other = Kernel()
    try:
        other.run(WORK)
        many = "print([tpukit.launch(work, cores=2).results[0].tolist() for _ in range(5)] == [[1, 1]] * 5)"
        waiting = other.client.execute(many)
        assert kernel.run(many).splitlines()[-1] == "True"
        assert other.client.get_shell_msg(timeout=HANGS)["parent_header"]["msg_id"] == waiting
        assert (
            other.run("print(tpukit.launch(work, cores=2).results)").count("tensor([1., 1.])") == 2
        )
    finally:
        other.close()


def shown(kernel, work, options="cores=2"):
    """Run a worker function and return what the notebook shows: (kind, text or data) in order."""
    kernel.run(f"def show(core):\n{textwrap.indent(textwrap.dedent(work), '    ')}")
    messages = []
    code = f"run = tpukit.launch(show, {options}, progress='text')"
    kernel.client.execute_interactive(code, output_hook=messages.append, timeout=HANGS)
    kinds = {"display_data": "data", "stream": "text", "update_display_data": "data"}
    contents = [(one["msg_type"], one["content"]) for one in messages]
    assert "error" not in dict(contents), contents
    return [(kind, content[kinds[kind]]) for kind, content in contents if kind in kinds]


def test_what_a_worker_displays_is_shown_by_the_kernel_with_the_cores_name(kernel):
    came = shown(
        kernel,
        """
        from IPython.display import HTML, display
        import pandas
        display(HTML(f"<b>{core.rank}</b>"), pandas.DataFrame({"a": [core.rank]}))
        """,
    )
    pages = [data["text/html"] for kind, data in came if kind == "display_data"]
    assert sorted(page for page in pages if page.startswith("<b>")) == ["<b>0</b>", "<b>1</b>"]
    assert sum("<table" in page for page in pages) == 2
    text = "".join(data for kind, data in came if kind == "stream")
    assert text.count("[core 0] shows:") == text.count("[core 1] shows:") == 2


def test_a_figure_of_a_worker_is_an_image_in_the_notebook(kernel):
    kernel.run("%matplotlib inline\nimport matplotlib.pyplot as plt")
    came = shown(kernel, "plt.plot([1, 2]); plt.show()", options="cores=1")
    (image,) = [data["image/png"] for kind, data in came if kind == "display_data"]
    assert base64.b64decode(image).startswith(b"\x89PNG")
    assert "shows:" not in "".join(
        data for kind, data in came if kind == "stream"
    )  # there is one core


def test_a_display_can_be_updated_from_the_worker(kernel):
    work = """
    from IPython.display import HTML, display
    handle = display(HTML("before"), display_id=True)
    handle.update(HTML("after"))
    """
    came = shown(kernel, work, options="cores=1")
    assert [(kind, data["text/html"]) for kind, data in came if kind != "stream"] == [
        ("display_data", "before"),
        ("update_display_data", "after"),
    ]


@pytest.mark.parametrize(
    ("work", "line", "most"),
    [
        (
            "display(HTML('x' * 11_000_000))",
            "a display of more than 10 MB is not shown; save it to a file",
            0,
        ),
        (
            "for n in range(500): display(HTML(str(n)))",
            "displays above 10 per second are not shown",
            60,
        ),
        (
            "import ipywidgets; display(ipywidgets.IntSlider())",
            "a widget cannot be shown from a worker",
            0,
        ),
    ],
    ids=["too large", "too many", "a widget"],
)
def test_what_is_not_shown_is_said_once(kernel, work, line, most):
    came = shown(kernel, f"from IPython.display import HTML, display\n{work}", options="cores=1")
    assert "".join(data for kind, data in came if kind == "stream").count(line) == 1
    assert sum(kind == "display_data" for kind, _ in came) <= most


def test_a_display_in_a_dataloaders_process_does_not_mix_with_the_workers_messages(kernel):
    kernel.run(
        "class Displaying:\n    def __len__(self): return 8\n"
        "    def __getitem__(self, n):\n"
        "        from IPython.display import HTML, display\n        display(HTML('x' * 1_000_000)); return n\n"
    )
    work = "return sum(len(batch) for batch in core.batches(Displaying(), batch_size=2, workers=2))"
    shown(kernel, work, options="cores=1")
    assert kernel.run("print(run.results)").strip() == "[8]"


def test_log_lines_of_a_worker_name_the_core(kernel):
    kernel.run("import logging; logging.basicConfig(level=logging.INFO, force=True)")
    came = shown(kernel, "logging.info('here'); logging.getLogger('mine').warning('there')")
    lines = "".join(data for kind, data in came if kind == "stream").splitlines()
    wanted = [
        f"[core {rank}] {line}"
        for rank in range(2)
        for line in ("INFO:root:here", "WARNING:mine:there")
    ]
    assert sorted(line for line in lines if line.startswith("[core")) == sorted(wanted)
