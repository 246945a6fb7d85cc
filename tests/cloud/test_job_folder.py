"""The folder of a job, as a path and as a bucket: the same answers from both."""

import os
import threading

import pytest

from tpukit.cloud.job_folder import Stored, open_folder, read_json, stored_file, write_json


@pytest.fixture(params=["path", "bucket"])
def folder(request, tmp_path):
    if request.param == "path":
        yield open_folder(tmp_path / "jobs").below("one")
        return
    pytest.importorskip("google.cloud.storage", reason="pip install google-cloud-storage")
    from doubles.vertex_double import VertexDouble
    from google.auth.credentials import AnonymousCredentials

    with VertexDouble(tmp_path):
        yield open_folder("gs://bucket/jobs/", credentials=AnonymousCredentials()).below("one")


def test_files_are_written_read_listed_and_deleted(folder, tmp_path):
    assert folder.read("a.txt") is None
    assert folder.names() == []
    folder.write("a.txt", b"one")
    folder.write("a.txt", b"two")
    (tmp_path / "local.bin").write_bytes(bytes(range(256)) * 100)
    folder.write("out/deep/b.bin", tmp_path / "local.bin")
    assert folder.read("a.txt") == b"two"
    assert folder.names() == ["a.txt", "out/deep/b.bin"]
    assert folder.names("out/") == ["out/deep/b.bin"]
    folder.download("out/deep/b.bin", tmp_path / "back/b.bin")
    assert (tmp_path / "back/b.bin").read_bytes() == (tmp_path / "local.bin").read_bytes()
    assert folder.stored("out/deep/b.bin") == stored_file(tmp_path / "local.bin")
    assert folder.stored("none") is None
    folder.delete("a.txt")
    folder.delete("a.txt")
    assert folder.names() == ["out/deep/b.bin"]


@pytest.mark.parametrize("name", ["film.1.part", "film.part", "notes.tmp", ".hidden"])
def test_a_file_of_the_user_is_listed_whatever_its_name(folder, name):
    folder.write(f"in/files/{name}", b"the user's")
    assert folder.names() == [f"in/files/{name}"]
    assert folder.below("in/files").names() == [name]


def test_a_file_is_created_once_however_many_try(folder):
    made = []

    def create(number):
        made.append(folder.create("job.json", b"%d" % number))

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, False, True]


def test_jobs_are_the_folders_of_a_folder(folder):
    folder.write("out/x", b"")
    assert open_folder(folder.address.rpartition("/")[0]).folders() == ["one"]
    assert folder.folders() == ["out"]


def test_json_that_is_half_written_is_nothing(folder):
    write_json(folder, "state.json", {"a": [1]})
    assert read_json(folder, "state.json") == {"a": [1]}
    folder.write("state.json", b'{"a"')
    assert read_json(folder, "state.json") == {}


def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    folder.write("notebook.ipynb", b"whole")

    def replace(*_):
        assert len(os.listdir(tmp_path)) == 2
        assert folder.names() == ["notebook.ipynb"]  # the new file is not yet one of the folder
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        folder.write("notebook.ipynb", b"other")
    assert folder.read("notebook.ipynb") == b"whole"
    assert folder.names() == ["notebook.ipynb"]


def test_the_checksum_is_that_of_cloud_storage(tmp_path):
    (tmp_path / "a").write_bytes(b"123456789")
    assert stored_file(tmp_path / "a") == Stored(
        9, "4waSgw=="
    )  # the check value of CRC-32C, 0xe3069283


@pytest.mark.parametrize("address", ["gs://", "gs://A_B", "s3://bucket/x", "gs:///x"])
def test_an_address_that_is_no_bucket_is_refused(address):
    with pytest.raises(ValueError, match="is not the address of a bucket"):
        open_folder(address)
