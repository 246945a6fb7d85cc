import os
import tempfile

import pytest
import torch

from tpukit.graphcache import cache_folder, kept_graphs
from tpukit.launch import launch

XLA = pytest.mark.xla


@pytest.mark.parametrize(
    ("environ", "begins"),
    [
        ({"XDG_CACHE_HOME": "/somewhere", "HOME": "/a"}, "/somewhere/tpukit/graphs/"),
        ({"XDG_CACHE_HOME": "", "HOME": "/a"}, "/a/.cache/tpukit/graphs/"),
        ({"HOME": "/a"}, "/a/.cache/tpukit/graphs/"),
    ],
)
def test_graphs_are_kept_in_the_users_cache(environ, begins):
    assert str(cache_folder(0, environ)).startswith(begins)


def test_without_a_home_they_are_temporary_files():
    assert cache_folder(0, {}).is_relative_to(tempfile.gettempdir())


def test_each_rank_has_a_folder_of_its_own():
    assert cache_folder(0, {}).parent == cache_folder(1, {}).parent
    assert cache_folder(0, {}) != cache_folder(1, {})


def train(home, own=None):
    """Run one step through the TPU's own backend, on XLA:CPU, which writes graphs and cannot read them either."""

    def work(core):
        from tpukit.backends.xla import Tpu

        if own:
            os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(own)
        backend = Tpu()
        with kept_graphs(backend, environ={"XDG_CACHE_HOME": str(home)}):
            product = torch.ones(3, device=core.device) * 5
            backend.sync()
        return sorted(name for name in backend.metrics() if name.startswith("PersistentCache")), product.tolist()

    return launch(work, cores=1, backend="xla", progress="text").results[0]


@XLA
def test_graphs_are_kept_and_where_they_cannot_be_read_that_is_learnt_once(tmp_path, capfd):
    folder = cache_folder(0, {"XDG_CACHE_HOME": str(tmp_path)})
    assert train(tmp_path) == (["PersistentCacheMiss"], [5.0, 5.0, 5.0])
    kept = [file.stat().st_size for file in folder.iterdir()]
    assert kept
    assert min(kept) > 0

    capfd.readouterr()
    assert train(tmp_path) == (["PersistentCacheDeserializeFailure", "PersistentCacheLoad"], [5.0, 5.0, 5.0])
    assert [file.name for file in folder.iterdir()] == ["unreadable"]
    assert "cannot read the graphs it kept on disk (its issue 9094)" in capfd.readouterr().out

    assert train(tmp_path) == ([], [5.0, 5.0, 5.0])


@XLA
def test_a_users_own_cache_is_left_alone(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    train(tmp_path, own)
    assert list(own.iterdir())
    assert not list(cache_folder(0, {"XDG_CACHE_HOME": str(tmp_path)}).iterdir())


class Backend:
    """A core that has read what it kept; no machine without a TPU has one."""

    rank = 0
    keeps_graphs = True

    def __init__(self, **metrics):
        self.counted, self.opened = {name: (count, 0.0) for name, count in metrics.items()}, []

    def open_cache(self, folder):
        self.opened.append(folder)
        return True

    def metrics(self):
        return self.counted


def test_graphs_that_were_read_are_kept_though_one_was_cut_off(tmp_path, capsys):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with kept_graphs(Backend(PersistentCacheHit=3, PersistentCacheDeserializeFailure=1), environ=environ):
        (cache_folder(0, environ) / "123").write_bytes(b"a graph")
    assert [file.name for file in cache_folder(0, environ).iterdir()] == ["123"]
    assert capsys.readouterr().out == ""


def test_the_oldest_graphs_go_first_whatever_version_wrote_them(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    here, old = cache_folder(0, environ), cache_folder(0, environ).parents[1] / "torch_xla-1.0" / "core-7"
    for number, folder in enumerate((old, old, here, here)):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / str(number)
        file.write_bytes(bytes(100))
        os.utime(file, (number, number))
    with kept_graphs(Backend(), environ=environ, limit=250):
        pass
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["2", "3"]


@pytest.mark.parametrize("home", ["/proc/nowhere", "/dev/null"])
def test_a_folder_that_cannot_be_written_costs_only_the_cache(home):
    backend = Backend()
    with kept_graphs(backend, environ={"XDG_CACHE_HOME": home}):
        pass
    assert backend.opened == []


def test_an_error_in_the_block_is_the_blocks(tmp_path):
    with pytest.raises(KeyError), kept_graphs(Backend(), environ={"XDG_CACHE_HOME": str(tmp_path)}):
        raise KeyError
