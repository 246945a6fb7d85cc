"""Jobs on this machine: each runs its own start script, papermill and a kernel, as a machine elsewhere would."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import papermill
import pytest
from helpers.executed import outputs

from tpukit.__main__ import main
from tpukit.cloud.answers import CloudError
from tpukit.cloud.job import OVER, CellFailedError, Job, JobFailedError, find, jobs, submit
from tpukit.cloud.job_folder import open_folder, read_json, write_json
from tpukit.cloud.local import LocalTarget
from tpukit.cloud.run_notebook import _Attempt, read_secrets
from tpukit.cloud.start_script import package_list, start_script
from tpukit.cloud.target import JobOptions, JobPlan, PlatformState
from tpukit.profiling import find_tpu

ROOT = Path(__file__).parents[2]
PLAIN = JobOptions(torch="none", grace=5.0)  # without torch, which would take a minute to install
COUNT = """import os, time
done = int(open('checkpoint').read()) if os.path.exists('checkpoint') else 0
resumed = done
while done < steps:
    time.sleep(0.1 if resumed or done < 30 else 600)
    done += 1
    open('checkpoint.tmp', 'w').write(str(done)); os.replace('checkpoint.tmp', 'checkpoint')
    print('step', done, flush=True)"""
WAIT = "print('go', flush=True)\nimport time\ntime.sleep(600)"


@pytest.fixture
def send(tmp_path, machine):
    sent = []

    def send(*args, options=PLAIN, timeout=600, **others):
        others.setdefault("bucket", tmp_path / "jobs")
        sent.append(submit(*args, options=options, timeout=timeout, **others))
        return sent[-1]

    yield send
    for job in sent:
        kill_machine(job)


def processes(job):
    """Return the numbers of all processes of a job: its folder is in their command or environment."""
    work = handle(job)["work"].encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if any(work in (process / one).read_bytes() for one in ("cmdline", "environ")):
                found.append(int(process.name))
    return found


def kill_machine(job):
    """End all processes of a job at once and lose its disk, as a preemption without notice does."""
    if handle(job):
        for number in processes(job):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(handle(job)["work"], ignore_errors=True)


def handle(job):
    return read_json(job.folder, "handle.json")


def place(job, name):
    return Path(job.address, name)


def wait_for(condition, job=None, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert job is None or job.state not in OVER, job.logs()
        assert time.monotonic() < end, job and job.logs()
        time.sleep(0.1)


def result(job):
    job.wait(240, every=0.2)
    return job.result()


def test_a_fresh_environment_gives_the_outputs_of_a_local_run(
    make_notebook, send, tmp_path, monkeypatch
):
    monkeypatch.delenv("TPUKIT_ENVIRONMENT")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("from a file")
    (tmp_path / "helper.py").write_text("def twice(x): return 2 * x")
    (tmp_path / "requirements.txt").write_text("six==1.17.0\n")
    book = make_notebook(
        "import helper, tpukit, six; print(n, helper.twice(n), open('data/a.txt').read())",
        "open('made.txt', 'w').write(name); open('metrics.json', 'w').write('{\"loss\": 1}'); {'n': n}",
        parameters="n = 1\nname = 'a'",
    )
    parameters = {"n": 21, "name": "001"}
    requirements = tmp_path / "requirements.txt"
    job = send(book, parameters=parameters, files=["data", "helper.py"], requirements=requirements)
    assert job.state in ("starting", "running")
    found = result(job)
    (tmp_path / "local").mkdir()
    shutil.copytree(tmp_path / "data", tmp_path / "local/data")
    shutil.copy(tmp_path / "helper.py", tmp_path / "local")
    where = {"kernel_name": "python3", "cwd": tmp_path / "local", "progress_bar": False}
    papermill.execute_notebook(book, tmp_path / "local.ipynb", parameters, **where)
    assert outputs(found.notebook) == outputs(tmp_path / "local.ipynb")
    assert found.files["made.txt"].read_text() == "001" == (tmp_path / "local/made.txt").read_text()
    assert found.files.keys() == {
        "made.txt",
        "metrics.json",
    }  # the files that were sent are here already
    assert found.metrics["loss"] == 1
    assert found.metrics["job"]["state"] == "succeeded"
    assert "21 42 from a file" in found.page.read_text()
    assert "21 42 from a file" in job.logs()
    assert not Path(handle(job)["work"]).exists()  # deleted after the results were compared
    assert not Path(f"/proc/{handle(job)['pid']}").exists()  # no zombie is left in this process
    manifest = read_json(job.folder, "manifest.json")
    assert manifest.keys() >= {"out/made.txt", "notebook.ipynb", "notebook.html", "metrics.json"}


def test_a_failing_cell_raises_here_with_its_traceback(make_notebook, send):
    book = make_notebook(
        "open('before.txt', 'w').write('kept')",
        "def deep(x):\n    return 1 / x\ndeep(n)",
        "print('never')",
        parameters="n = 1",
    )
    job = send(book, parameters={"n": 0})
    with pytest.raises(CellFailedError, match="ZeroDivisionError: division by zero") as caught:
        result(job)
    assert caught.value.ename == "ZeroDivisionError"
    assert "return 1 / x" in str(caught.value)
    assert caught.value.cell == 3  # of the source from 1, whatever papermill has inserted
    assert "cell 3 of " in str(caught.value)
    assert caught.value.state == job.state == "failed"
    assert job.download().files["before.txt"].read_text() == "kept"
    assert "never" not in job.logs()
    before = job.folder.read("notebook.ipynb")
    again = subprocess.run(["bash", place(job, "run.sh")], capture_output=True, timeout=60)
    assert (
        again.returncode == 1
    )  # what the platform does with a container that failed: it costs a second
    assert job.folder.read("notebook.ipynb") == before
    with pytest.raises(ValueError, match="has ended: failed"):
        job.start()


def test_the_cell_that_runs_has_its_number_in_the_notebook_that_was_sent(
    make_notebook, send, capsys
):
    book = make_notebook("1", "open('go', 'w').close()\n" + WAIT, "3", parameters="n = 1")
    job = send(book, parameters={"n": 2})
    wait_for(lambda: job.folder.read("out/go") is not None, job)
    with pytest.raises(TimeoutError, match="is running"):
        job.wait(0.1, every=600)  # it does not sleep beyond the timeout
    assert ": running, cell 3 of 4\n" in capsys.readouterr().out


def test_another_process_with_the_number_of_a_job_is_not_the_job(tmp_path):
    handle = {"pid": os.getpid(), "started": "a moment ago", "work": str(tmp_path), "grace": 5.0}
    assert LocalTarget().state(handle).word == "gone"
    LocalTarget().cancel(handle)  # it would end this process


def test_a_machine_that_is_lost_is_followed_by_one_that_resumes(make_notebook, send, tmp_path):
    (tmp_path / "sent.txt").write_text("deleted by the first attempt")
    first = "import os\nif os.path.exists('sent.txt'): os.remove('sent.txt'); open('gone', 'w').close(); first = True"
    remove = "if os.path.exists('gone') and resumed: os.remove('gone')"
    book = make_notebook(
        first,
        COUNT,
        remove,
        "print('resumed at', resumed, 'reached', done, os.listdir())",
        parameters="steps = 1",
    )
    job = send(book, parameters={"steps": 60}, files=["sent.txt"])

    def step():
        return int(job.folder.read("out/checkpoint") or 0)

    wait_for(lambda: step() >= 10, job)
    saved_notebook = place(job, "notebook.ipynb").read_bytes()
    kill_machine(job)
    wait_for(lambda: job.state == "interrupted")
    with pytest.raises(JobFailedError, match="interrupted"):
        job.wait(10)
    saved = step()
    assert json.loads(saved_notebook)["cells"][2]["metadata"]["papermill"]["status"] == "completed"
    found = result(job.start())
    last = outputs(found.notebook)[-1][1][0]["text"]
    at, reached = map(int, re.match(r"resumed at (\d+) reached (\d+)", last).groups())
    assert 10 <= saved == at
    assert reached == 60 == step()
    assert "sent.txt" not in last
    assert "gone" not in found.files
    assert place(job, "notebook-attempt-1.ipynb").exists()
    assert read_json(job.folder, "result.json")["attempt"] == 2


def test_a_file_that_changes_all_the_time_and_checkpoints_that_live_a_second_are_saved(
    make_notebook, send
):
    cell = """import os, time
for step in range(10_000):
    open('log.txt', 'a').write(f'{step}\\n')
    open('new', 'w').write('whole'); os.replace('new', f'step-{step:08}-0a1b2c3d.pt')
    if step: os.remove(f'step-{step - 1:08}-0a1b2c3d.pt')
    time.sleep(0.5)"""
    job = send(make_notebook(cell))
    wait_for(lambda: job.folder.names("out/step-"), job)
    first = job.folder.names("out/step-")
    wait_for(
        lambda: first[0] not in job.folder.names("out/step-") and job.folder.names("out/step-"), job
    )
    wait_for(lambda: (job.folder.read("out/log.txt") or b"").startswith(b"0\n1\n"), job)


def test_a_signal_lets_the_cell_save_and_another_attempt_goes_on(make_notebook, send):
    save = """import os, time
try:
    print('begun', flush=True)
    time.sleep(600 if not os.path.exists('last') else 0)
except KeyboardInterrupt:
    time.sleep(2)
    open('last', 'w').write('saved')
    raise"""
    job = send(make_notebook(save, "print('second attempt')"))
    wait_for(lambda: "begun" in job.logs(), job)
    os.kill(handle(job)["pid"], signal.SIGTERM)
    wait_for(lambda: job.state == "interrupted")
    assert job.folder.read("out/last") == b"saved"
    assert job.folder.read("result.json") is None
    first_work = Path(handle(job)["work"])
    assert "second attempt" in result(job.start()).notebook.read_text()
    assert not first_work.exists()  # its environment may take gigabytes


def test_cancel_ends_every_process_and_may_be_repeated(make_notebook, send):
    job = send(make_notebook("open('kept', 'w').close()\n" + WAIT))
    wait_for(lambda: "go" in job.logs(), job)
    assert job.cancel().state == "cancelled"
    with pytest.raises(JobFailedError, match="cancelled"):
        job.result()
    left = processes(job)
    assert not left
    assert job.cancel().state == "cancelled"
    assert "kept" in job.download().files
    with pytest.raises(ValueError, match="has ended"):
        job.start()


def test_cancel_during_the_installation(make_notebook, send):
    job = send(make_notebook("1"))
    assert job.cancel().state == "cancelled"
    with pytest.raises(JobFailedError, match="cancelled"):
        result(job)
    assert subprocess.run(["bash", place(job, "run.sh")], timeout=60).returncode == 1


def test_the_marker_alone_ends_a_job(make_notebook, send, monkeypatch):
    """As on a platform that cannot signal the process."""
    monkeypatch.setattr(LocalTarget, "cancel", lambda self, handle: None)
    job = send(make_notebook(WAIT))
    wait_for(lambda: "go" in job.logs(), job)
    job.cancel()
    wait_for(lambda: job.state == "cancelled")


def test_another_process_takes_a_job_up(make_notebook, send, tmp_path):
    job = send(make_notebook("import time; time.sleep(2); print('answer', 6 * 7)"), name="mine")
    program = """import sys
from tpukit.cloud.job import find, jobs
job = find('mine', sys.argv[1])
print(job.state)
job.wait(240, every=0.2)
print(job.result().notebook.read_text(), jobs(sys.argv[1]))"""
    command = [sys.executable, "-c", program, tmp_path / "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "answer 42" in done.stdout, done.stderr
    assert done.stdout.split()[0] in ("starting", "running")
    assert re.search(r"mine +succeeded +local +no TPU +20", done.stdout)
    assert job.state == "succeeded"
    with pytest.raises(FileNotFoundError, match=r"there is no job(.|\n)*fix: .*: bucket="):
        find("mine", tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there are mine"):
        find("other", tmp_path / "jobs")
    assert [one.name for one in jobs(tmp_path / "jobs")] == ["mine"]


def test_sent_twice_is_one_job_and_a_name_is_not_shared(make_notebook, send, tmp_path):
    book = make_notebook("import time; time.sleep(1)")
    first = send(book, name="once")
    assert handle(send(book, name="once")) == handle(first)
    with pytest.raises(ValueError, match="already"):
        send(make_notebook("print('other')"), name="once")
    result(first)
    with pytest.raises(ValueError, match="ended: succeeded"):
        send(make_notebook("import time; time.sleep(1)"), name="once")


def test_a_submission_that_broke_off_is_completed_by_the_next(
    make_notebook, send, monkeypatch, tmp_path
):
    book = make_notebook("print('done')")
    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "start", lambda self, plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            send(book, name="twice")
    assert find("twice", tmp_path / "jobs").state == "starting"
    assert "done" in result(send(book, name="twice")).notebook.read_text()


def test_a_job_that_was_cancelled_before_its_start_is_over(
    make_notebook, send, monkeypatch, tmp_path
):
    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "start", lambda self, plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            send(make_notebook("1"), name="never")
    job = find("never", tmp_path / "jobs")
    assert job.cancel().state == "cancelled"
    assert job.wait(0.1, every=0.05) == "cancelled"


def test_a_job_that_runs_is_not_started_a_second_time(make_notebook, send):
    job = send(make_notebook(WAIT))
    first = handle(job)
    assert handle(job.start()) == first


def test_the_time_limit_counts_all_attempts(make_notebook, send):
    job = send(make_notebook(WAIT), timeout=60)
    wait_for(lambda: "go" in job.logs(), job)
    kill_machine(job)
    first = place(job, "attempts/0001.json")
    about = json.loads(first.read_text())
    first.write_text(
        json.dumps(about | {"started": about["started"] - 55})
    )  # as if it had run for so long
    with pytest.raises(JobFailedError, match="no result: timed out; the time limit of 60 s"):
        result(job.start())


def test_a_machine_that_was_thought_lost_leaves_the_job_to_the_next(make_notebook, send):
    job = send(make_notebook(WAIT))
    wait_for(lambda: "go" in job.logs(), job)
    place(job, "attempts/0002.json").write_text("{}")
    wait_for(lambda: job.state == "interrupted")
    assert "another machine runs this job now" in job.target.logs(handle(job))
    assert job.folder.read("result.json") is None


def test_an_interruption_before_the_files_are_there_deletes_none_of_them(tmp_path):
    folder = open_folder(tmp_path / "job")
    for name in ("in/files/kept", "in/files/gone", "out/saved"):
        folder.write(name, b"x")
    write_json(folder, "state.json", {"attempt": 1, "deleted": ["gone"]})
    (tmp_path / "first/run").mkdir(parents=True)
    _Attempt(folder, tmp_path / "first").save(
        "interrupted", is_final=True
    )  # by a signal that came early
    assert read_json(folder, "state.json")["deleted"] == ["gone"]
    second = _Attempt(folder, tmp_path / "second")
    second.restore(tmp_path / "job")
    second.save()
    assert sorted(path.name for path in second.directory.iterdir()) == ["kept", "saved"]
    (second.directory / "saved").unlink()
    (second.directory / "gone").write_text("made again")
    second.save(is_final=True)
    assert read_json(folder, "state.json")["deleted"] == []
    assert folder.names("out/") == ["out/gone"]


def test_a_file_that_moves_away_and_back_is_saved_under_its_name_again(tmp_path):
    folder = open_folder(tmp_path / "job")
    attempt = _Attempt(folder, tmp_path / "work")
    attempt.restore(tmp_path / "job")
    first = attempt.directory / "first"
    second = attempt.directory / "second"
    first.write_text("x")
    for moved, name in ((None, "first"), (first, "second"), (second, "first")):
        if moved:
            moved.rename(attempt.directory / name)
        attempt.save(is_final=True)
        assert folder.names("out/") == [f"out/{name}"]


def test_a_kernel_that_dies_is_a_failure_with_a_reason(make_notebook, send):
    job = send(make_notebook("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    with pytest.raises(JobFailedError, match="kernel died"):
        result(job)


def test_packages_that_cannot_be_installed_are_a_failure(make_notebook, send, tmp_path):
    (tmp_path / "requirements.txt").write_text("six==0.0.77\n")
    job = send(make_notebook("1"), requirements=tmp_path / "requirements.txt")
    with pytest.raises(JobFailedError, match="packages cannot be installed(.|\n)*six==0.0.77"):
        result(job)


def test_nothing_of_the_environment_travels_but_secrets_by_reference(
    make_notebook, send, monkeypatch
):
    monkeypatch.setenv("MY_TOKEN", "not for others")
    monkeypatch.setenv("OTHER", "for the job")
    cell = "import os; print(os.environ.get('MY_TOKEN'), len(os.environ['HF_TOKEN']))"
    job = send(make_notebook(cell), secrets={"HF_TOKEN": "env:OTHER"})
    assert "None 11" in result(job).notebook.read_text()
    everything = b"".join(
        path.read_bytes() for path in Path(job.address).rglob("*") if path.is_file()
    )
    assert b"for the job" not in everything
    for wrong in ("hf_abc", "env:NOT_THERE", "projects/p/secrets/s/versions/1"):
        with pytest.raises(ValueError, match="secret"):
            send(make_notebook("1"), secrets={"HF_TOKEN": wrong})


def test_scripts_run_as_notebooks_do(tmp_path, send):
    (tmp_path / "train.py").write_text(
        "import sys\nif __name__ == '__main__':\n    print(sys.argv, __file__)\n    open('made', 'w').close()\n"
    )
    found = result(send(tmp_path / "train.py"))
    assert "['train.py'] train.py" in found.notebook.read_text()
    assert found.files.keys() == {"made"}
    (tmp_path / "fails.py").write_text('# %% tags=["parameters"]\nn = 1\n# %%\nprint(1 / n)\n')
    with pytest.raises(CellFailedError, match="ZeroDivisionError"):
        result(send(tmp_path / "fails.py", parameters={"n": 0}))


def test_a_flood_of_output_is_limited_in_the_notebook(make_notebook, send):
    cell = "for _ in range(30): print('x' * 1_000_000)\nprint('the end')"
    job = send(make_notebook(cell, "print('next')"))
    found = result(job)
    text = found.notebook.read_text()
    assert 10_000_000 < len(text) < 14_000_000
    assert "the rest is in the log" in text
    assert "next" in text
    assert job.logs().count("x") >= 30_000_000


def test_a_cell_that_may_fail_does_not_fail_the_job(make_notebook, send):
    job = send(make_notebook("1 / 0", "print('after')", tags=[(0, "raises-exception")]))
    assert "after" in result(job).notebook.read_text()


def test_a_cell_that_may_fail_and_an_exit_after_it_do_not_fail_the_job(make_notebook, send):
    cells = ("1 / 0", "import sys; sys.exit(0)")
    job = send(make_notebook(*cells, tags=[(0, "raises-exception")]))
    assert result(job).notebook.exists()


def test_a_cell_that_fails_without_a_traceback_in_its_output_fails_the_job(make_notebook, send):
    own = "get_ipython()._showtraceback = lambda kind, value, text: print('own traceback')"
    job = send(make_notebook(own, "1 / 0", "print('after')"))
    with pytest.raises(CellFailedError, match="no traceback in its output"):
        result(job)


def test_all_is_shown_before_anything_is_sent(make_notebook, send, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/large.bin").write_bytes(bytes(3_000_000))
    order = []

    class Target(LocalTarget):
        def start(self, plan):
            order.append(capsys.readouterr().out)
            return super().start(plan)

    send(make_notebook("1"), files=["data"], to=Target(), timeout="2h")
    assert re.search(r"in/files/data/large.bin +3 MiB", order[0])
    for row in ("in/notebook.ipynb", "in/packages.txt", "largest cost"):
        assert row in order[0]


def test_the_table_of_parameters_of_submit_is_short():
    import inspect

    assert len(inspect.signature(submit).parameters) <= 12


@pytest.mark.parametrize(
    ("line", "torch", "message"),
    [
        ("-r other.txt", "none", "names a file of this machine"),
        ("-e .", "none", "names a file of this machine"),
        ("./mine-1.0-py3-none-any.whl", "none", "names a file of this machine"),
        ("wheels/mine-1.0-py3-none-any.whl", "none", "names a file of this machine"),
        ("--find-links wheels", "none", "names a file of this machine"),
        ("mine @ file:///somewhere/mine", "none", "names a file of this machine"),
        ("--index-url https://me:s3cretword@example.com/simple", "none", "looks like a secret"),
        ("torch==2.5.0", None, "contradicts torch==2.9.0"),
        ("Torch-XLA<2.9  # old", None, "contradicts torch_xla==2.9.0"),
        ("libtpu~=0.0.21", "2.8.0", "contradicts libtpu==0.0.17"),
        ("jax>=0.7", "none", "JAX without libtpu"),
        ("torchmetrics>=1.4  # a comment ./x", None, ""),
        ("mine @ https://example.com/mine-1.0.zip#subdirectory=python", None, ""),
        ("torch>=2.8", None, ""),
        ("--find-links https://example.com/wheels", None, ""),
        ("-e git+https://example.com/mine.git", None, ""),
        ("torch==2.5.0", "none", ""),
        ("jax[tpu]==0.7.2", "none", ""),
        ("numpy==2.1.3 --hash=sha256:00", None, ""),
    ],
)
def test_requirements_that_cannot_work_are_refused(tmp_path, make_notebook, line, torch, message):
    (tmp_path / "requirements.txt").write_text(f"# ours\n{line}\n")

    class Stop(LocalTarget):
        def start(self, plan):
            return {}

    options = {"options": JobOptions(torch=torch), "to": Stop(), "bucket": tmp_path / "jobs"}
    given = {"requirements": tmp_path / "requirements.txt", **options}
    if not message:
        submit(make_notebook("1"), **given)
        return
    with pytest.raises(ValueError, match=message):
        submit(make_notebook("1"), **given)
    assert not (tmp_path / "jobs").exists()


def test_a_wheel_of_ones_own_is_sent_and_installed_by_a_cell(make_notebook, send, tmp_path):
    about = "mykit-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "mykit-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("mykit.py", "answer = 42")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: mykit\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    book = make_notebook(
        "%pip install --quiet ./mykit-1.0-py3-none-any.whl", "import mykit; print(mykit.answer)"
    )
    assert (
        "42"
        in outputs(result(send(book, files=["mykit-1.0-py3-none-any.whl"])).notebook)[1][1][0][
            "text"
        ]
    )


def test_what_cannot_run_is_refused_before_anything_is_written(make_notebook, send, tmp_path):
    book = make_notebook("1", parameters="n = 1")
    for wrong, message in (
        ({"parameters": {"typo": 1}}, "no such parameter: typo"),
        ({"parameters": {"n": Path("x")}}, "cannot be sent"),
        ({"files": "data"}, "must be a list"),
        ({"files": ["data"]}, "no such file"),
        ({"to": "dstack"}, "not a target"),
        ({"bucket": "gs://my-bucket/jobs"}, "a folder of this machine"),
        ({"to": "vertex", "chip": "v5e-8"}, "needs a bucket"),
        ({"name": "Not A Name"}, "name"),
        ({"options": JobOptions(torch="2.5.0")}, "no torch_xla works with torch 2.5.0"),
        ({"options": JobOptions(spot=True)}, "spot"),
        ({"options": JobOptions(not_secret=("x",))}, "too short"),
    ):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            send(book, **wrong)
    assert not (tmp_path / "jobs").exists()


def test_secrets_are_read_from_secret_manager_with_the_account_of_the_machine():
    asked = []

    def open_url(request, timeout):
        asked.append((request.full_url, dict(request.header_items())))
        answers = {
            "token": {"access_token": "abc"},
            "access": {"payload": {"data": "dGhlIHNlY3JldA=="}},
        }
        return io.BytesIO(
            json.dumps(answers[request.full_url.replace(":", "/").rpartition("/")[2]]).encode()
        )

    reference = "projects/p/secrets/hf/versions/latest"
    assert read_secrets({"HF_TOKEN": reference, "OTHER": "env:X"}, open_url=open_url) == {
        "HF_TOKEN": "the secret"
    }
    assert asked[0][1] == {"Metadata-flavor": "Google"}
    assert asked[1] == (
        f"https://secretmanager.googleapis.com/v1/{reference}:access",
        {"Authorization": "Bearer abc"},
    )
    assert read_secrets({"OTHER": "env:X"}, open_url=None) == {}


def test_the_start_script_installs_what_belongs_together(make_notebook):
    for torch, libtpu in (("2.8.0", "0.0.17"), ("2.9.0", "0.0.21.1")):
        plan = JobPlan(
            "a", "vertex", "gs://b/a", find_tpu("v5e-8"), 3600, "3.12", "", JobOptions(torch=torch)
        )
        lines = package_list(plan.options, "tpukit.whl")
        assert f"torch=={torch}" in lines
        assert any(line.startswith(f"libtpu=={libtpu};") for line in lines)
        assert "./tpukit.whl" in lines
        script = start_script(plan, "tpukit.whl")
        assert "PJRT_DEVICE=TPU" in script
        assert not re.search("@[A-Z]+@", script)
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_the_python_of_the_job_is_the_callers_else_one_that_fits_with_a_warning(
    tmp_path, monkeypatch
):
    (tmp_path / "bin").mkdir()
    for name, code in (("python3.12", 1), ("python3", 0)):  # the image has another Python
        (tmp_path / f"bin/{name}").write_text(
            f'#!/bin/sh\n[ {code} = 0 ] && exec "{sys.executable}" "$@"\nexit 1\n'
        )
        (tmp_path / f"bin/{name}").chmod(0o755)
    plan = JobPlan("a", "local", str(tmp_path), None, 3600, "3.12", "", JobOptions(torch="none"))
    script = start_script(plan, "tpukit.whl")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/packages.txt").write_text("./nothing.whl\n")
    (tmp_path / "run.sh").write_text(script.replace("3 9 0", "0"))
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["bash", tmp_path / "run.sh"], env=environment, capture_output=True, text=True
    )
    here = "{}.{}".format(*sys.version_info)
    assert (f"runs on Python {here}, it was sent from Python 3.12" in done.stdout) == (
        here != "3.12"
    )
    assert done.returncode == 1
    assert json.loads((tmp_path / "result.json").read_text())["phase"] == "setup"


def test_the_paths_of_a_started_job_may_be_relative(tmp_path):
    (tmp_path / "job" / "in").mkdir(parents=True)
    (tmp_path / "job" / "in" / "packages.txt").write_text("")
    (tmp_path / "environment" / "bin").mkdir(parents=True)
    python = tmp_path / "environment" / "bin" / "python"
    # Nothing is installed, and the environment's Python only writes how the runner is called.
    uv = python.with_name("uv")
    uv.write_text("#!/bin/sh\nexit 0\n")
    call = (
        f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\necho "$*" >> {tmp_path}/calls\n'
    )
    python.write_text(call)
    for program in (uv, python):
        program.chmod(0o755)
    plan = JobPlan("a", "local", str(tmp_path), None, 3600, "3.12", "", JobOptions(torch="none"))
    (tmp_path / "job" / "run.sh").write_text(start_script(plan, "tpukit.whl").replace("3 9 0", "0"))
    environment = {**os.environ, "TPUKIT_ENVIRONMENT": str(tmp_path / "environment")}
    environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    call = ["bash", "job/run.sh", "results", "work"]
    subprocess.run(call, cwd=tmp_path, env=environment, check=True, timeout=60)
    results, job, work = (tmp_path / name for name in ("results", "job", "work"))
    called = (tmp_path / "calls").read_text()
    assert called == f"-m tpukit.cloud.run_notebook {results} {job} {work}\n"
    assert (work / "setup.log").exists()


def test_the_path_of_the_environment_may_have_a_blank(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "packages.txt").write_text("")
    programs = tmp_path / "an environment" / "bin"
    programs.mkdir(parents=True)
    calls = {"uv": f'printf "%s\\n" "$@" >> "{tmp_path}/calls"', "python": "exit 0"}
    for name, call in calls.items():
        (programs / name).write_text(f"#!/bin/sh\n{call}\n")
        (programs / name).chmod(0o755)
    plan = JobPlan("a", "local", str(tmp_path), None, 3600, "3.12", "", JobOptions(torch="none"))
    (tmp_path / "run.sh").write_text(start_script(plan, "tpukit.whl"))
    environment = {**os.environ, "TPUKIT_ENVIRONMENT": str(programs.parent)}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", tmp_path / "run.sh"], env=environment, check=True, timeout=60)
    arguments = (tmp_path / "calls").read_text().splitlines()
    assert [arguments[at + 1] for at, word in enumerate(arguments) if word == "--python"] == [
        str(programs / "python"),
        str(programs / "python"),
    ]


def test_answers_that_do_not_come_do_not_end_the_waiting(make_notebook, send, monkeypatch, capsys):
    looks = iter([CloudError("the cloud did not answer", may_pass=True)] * 3)
    look = Job._look

    def lost(self):
        for error in looks:
            raise error
        return look(self)

    job = send(make_notebook("1"))
    monkeypatch.setattr(Job, "_look", lost)
    assert job.wait(240, every=0.2) == "succeeded"
    assert "no answer the cloud did not answer" in capsys.readouterr().out
    place(job, "notebook.ipynb").write_text("changed by the user, after the results were compared")
    assert job.wait() == "succeeded"
    looks = iter([CloudError("not permitted")])
    with pytest.raises(CloudError, match="not permitted"):
        job.wait()


def test_a_job_is_running_until_its_results_are_copied(make_notebook, send, monkeypatch):
    job = send(make_notebook("1"))
    assert job.wait(240, every=0.2) == "succeeded"
    place(job, "result.json").unlink()  # it is written last, after minutes if checkpoints are large
    monkeypatch.setattr(LocalTarget, "state", lambda self, handle: PlatformState("running"))
    assert job.state == "running"


def test_a_result_that_is_not_complete_keeps_the_machine(make_notebook, send, monkeypatch):
    cleaned = []
    monkeypatch.setattr(LocalTarget, "clean_up", lambda self, handle: cleaned.append(handle))
    job = send(make_notebook("open('made', 'w').write('x')"))
    wait_for(lambda: job.state == "succeeded")
    place(job, "out/made").write_text("half")
    with pytest.raises(CloudError, match="was not deleted: out/made"):
        job.wait()
    assert not cleaned
    place(job, "out/made").write_text("x")
    job.wait()
    job.wait()
    assert len(cleaned) == 1


class Reporting(LocalTarget):
    """A platform that starts nothing, and reports on each job what a test wants."""

    def __init__(self):
        self.report = PlatformState("queued")
        self.starts = 0

    def start(self, plan):
        self.starts += 1
        return {"name": plan.name}

    def state(self, handle):
        return self.report

    def logs(self, handle):
        return "the platform's log"

    def cancel(self, handle):
        self.report = PlatformState("gone", "the TPU VM is deleted")

    def clean_up(self, handle):
        self.report = PlatformState("gone", "the TPU VM is deleted")


@pytest.fixture
def reporting(make_notebook, tmp_path):
    target = Reporting()
    book = make_notebook("1")
    job = submit(book, name="reported", to=target, bucket=tmp_path / "jobs", options=PLAIN)
    return target, job


def test_the_reason_of_the_platform_remains_after_its_record_is_deleted(reporting, tmp_path):
    target, job = reporting
    target.report = PlatformState("failed", "FAILED There is no more capacity in the zone")
    with pytest.raises(JobFailedError, match="failed; FAILED There is no more capacity") as caught:
        job.result()
    assert caught.value.state == job.state == "failed"
    assert target.report.word == "gone"
    again = find("reported", tmp_path / "jobs", to=target)
    assert again.state == again.wait() == "failed"
    with pytest.raises(JobFailedError, match="There is no more capacity"):
        again.result()
    run = subprocess.run(["bash", place(job, "run.sh")], capture_output=True, timeout=60)
    assert run.returncode == 1  # a machine that comes late does not run the job


@pytest.mark.parametrize(
    ("report", "state"),
    [
        (PlatformState("gone", "the TPU VM is deleted"), "cancelled"),
        (PlatformState("failed", "no capacity"), "failed"),
        (PlatformState("cancelled"), "cancelled"),
    ],
)
def test_a_job_that_the_platform_has_ended_is_not_started_again(reporting, report, state):
    target, job = reporting
    if state == "cancelled":
        job.cancel()
    target.report = report
    assert job.state == state
    with pytest.raises(ValueError, match=f"has ended: {state}(.|\n)*under another name"):
        job.start()
    assert target.starts == 1
    assert job.state == state


def test_every_request_of_a_wait_may_remain_without_an_answer(reporting, monkeypatch, capsys):
    target, job = reporting
    lost = CloudError("the cloud did not answer", may_pass=True)
    failures = {"state.json": 2, "result.json": 2, "manifest.json": 2, "log/": 2, "clean_up": 2}

    def fail(name):
        if failures.get(name):
            failures[name] -= 1
            raise lost

    read, names, clean_up = job.folder.read, job.folder.names, target.clean_up
    monkeypatch.setattr(job.folder, "read", lambda name: fail(name) or read(name))
    monkeypatch.setattr(job.folder, "names", lambda prefix="": fail(prefix) or names(prefix))
    monkeypatch.setattr(target, "clean_up", lambda handle: fail("clean_up") or clean_up(handle))
    reports = [PlatformState("running")] * 6 + [PlatformState("gone", "taken back")]
    monkeypatch.setattr(
        target, "state", lambda handle: reports.pop(0) if len(reports) > 1 else reports[0]
    )
    with pytest.raises(JobFailedError, match="interrupted; taken back"):
        job.wait(60, every=0.01)
    assert "no answer the cloud did not answer" in capsys.readouterr().out
    reports[0] = PlatformState("failed", "no capacity")
    assert job.wait(60, every=0.01) == "failed"
    with pytest.raises(JobFailedError, match="failed; no capacity"):
        job.result()
    assert set(failures.values()) == {0}


def test_what_will_not_pass_ends_the_waiting_at_once(reporting, monkeypatch):
    target, job = reporting

    def state(handle):
        raise CloudError("not permitted")

    monkeypatch.setattr(target, "state", state)
    with pytest.raises(CloudError, match="not permitted"):
        job.wait(60)


@pytest.mark.parametrize("folder", ["jobs", "my runs", "jobs/sub"])
def test_the_command_that_is_printed_finds_the_job(
    make_notebook, tmp_path, monkeypatch, capsys, folder
):
    monkeypatch.chdir(tmp_path)
    submit(make_notebook("1"), name="one", to=Reporting(), bucket=folder, options=PLAIN)
    command = capsys.readouterr().out.rpartition("follow it: ")[2]
    assert ("--bucket" in command) == (folder != "jobs")
    python, dash_m, tpukit, *words = shlex.split(command)
    assert (python, dash_m, tpukit) == ("python", "-m", "tpukit")
    monkeypatch.setattr(LocalTarget, "logs", lambda self, handle: "found")
    assert main(words) == 0
    assert capsys.readouterr().out == "found"


@pytest.mark.parametrize(
    ("set_to", "index_answers", "used"),
    [(None, True, "cpu"), (None, False, "unset"), ("cu128", True, "cu128"), ("", True, "unset")],
)
def test_torch_comes_from_the_cpu_index_if_it_answers(tmp_path, set_to, index_answers, used):
    answer = 0 if index_answers else 1
    programs = {
        "bin/uv": f'#!/bin/sh\necho "${{UV_TORCH_BACKEND-unset}}" > {tmp_path}/used\nexit 1\n',
        "environment/bin/python": f'#!/bin/sh\ncase "$2" in *urlopen*) exit {answer};; esac\necho 3.12\n',
        "in/packages.txt": "",
    }
    plan = JobPlan("a", "local", str(tmp_path), None, 3600, "3.12", "")
    programs["run.sh"] = start_script(plan, "tpukit.whl").replace("3 9 0", "0")
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "UV_TORCH_BACKEND"}
    environment |= {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "TPUKIT_ENVIRONMENT": f"{tmp_path}/environment",
    }
    environment |= {} if set_to is None else {"UV_TORCH_BACKEND": set_to}
    assert subprocess.run(["bash", tmp_path / "run.sh"], env=environment).returncode == 1
    assert (tmp_path / "used").read_text() == f"{used}\n"
    assert ("cannot be reached" in (tmp_path / "log/00-setup.txt").read_text()) == (
        used == "unset" and set_to is None
    )
