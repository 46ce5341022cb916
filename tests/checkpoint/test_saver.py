"""One process that saves by itself: what it commits, what it leaves when it fails, and who is fenced out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import raftkv.checkpoint
from raftkv.checkpoint import registry as registry_module
from raftkv.checkpoint import saver as saver_module
from raftkv.checkpoint.commit import attempt
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.errors import DigestMismatch, FenceBroken, FilesChanged, StaleStep, StorageError
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.saver import Saver, Termination
from raftkv.checkpoint.storage import transfer
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.transfer import local_directory
from raftkv.checkpoint.storage.verify import verify
from raftkv.checkpoint.sync import Attempt
from raftkv.client import lease
from raftkv.errors import ConfigError
from tests.integrations.importers import fabricated as made


@pytest.fixture
def registry(raftkv_client, tmp_path) -> raftkv.checkpoint.Registry:
    return raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))


@pytest.mark.long
def test_files_below_the_uri_are_committed(registry):
    saver = Saver(registry)
    assert saver.newest() is None
    with saver.saving(4, kind="torch_save", metrics={"loss": 1.0}) as saving:
        made.write(Path(saving.uri), {"model.pt": b"m", "ranks/0/state.pt": b"s"})
        saving.metrics["loss"] = 0.5
    newest = saver.newest()
    assert newest == saving.checkpoint
    assert (newest.file_count, newest.size_bytes, newest.metrics) == (2, 2, {"loss": 0.5})
    assert verify(newest).is_whole


@pytest.mark.parametrize("is_same_disk", [True, False])
def test_a_directory_is_moved(registry, tmp_path, monkeypatch, is_same_disk):
    def rename(old, new):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not is_same_disk:
        monkeypatch.setattr(transfer.os, "rename", rename)
    folder = made.write(tmp_path / "out/checkpoint-4", made.trainer(4))
    done = Saver(registry).save_directory(4, str(folder))
    assert not folder.exists()
    assert {name: (Path(done.uri) / name).read_bytes() for name in made.trainer(4)} == made.trainer(4)
    assert verify(done).is_whole


@pytest.mark.parametrize("is_same_disk", [True, False])
@pytest.mark.parametrize("trouble", ["name", "metric", "link", "many"])
def test_a_directory_that_cannot_be_saved_stays_where_it_was(registry, tmp_path, monkeypatch, is_same_disk, trouble):
    """Put it back: it was moved below the uri of the registry, and deleted there as what a failed attempt had left."""
    if not is_same_disk:
        monkeypatch.setattr(transfer, "_rename", lambda *_: False)
    folder = made.write(tmp_path / "out", {"model.pt": b"m"})
    if trouble == "name":
        (folder / "half\nname.pt").write_bytes(b"n")
    if trouble == "link":
        (folder / "gone.pt").symlink_to(tmp_path / "nowhere")
    if trouble == "many":
        monkeypatch.setattr(attempt, "PREPARED_MAX_BYTES", 10)
    with pytest.raises((ConfigError, StorageError)):
        Saver(registry).save_directory(4, str(folder), metrics={"loss": "low"} if trouble == "metric" else {})
    registry.collect()
    assert (folder / "model.pt").read_bytes() == b"m"
    assert list(Path(registry.uri).glob("step-*")) == []


@pytest.mark.parametrize("is_same_disk", [True, False])
@pytest.mark.parametrize("what", ["write_manifest", "check_files"])
def test_a_directory_that_is_not_committed_for_its_disk_stays(raftkv_client, tmp_path, monkeypatch, is_same_disk, what):
    """Fail behind the bytes, before the commit: the source was deleted already, and the copy is garbage."""

    async def refuse(*_):
        raise StorageError("no space left")

    monkeypatch.setattr(registry_module, what, refuse)
    if not is_same_disk:
        monkeypatch.setattr(transfer, "_rename", lambda *_: False)
    registry = raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))
    folder = made.write(tmp_path / "out", {"model.pt": b"m"})
    with pytest.raises(StorageError, match="no space left"):
        Saver(registry).save_directory(4, str(folder))
    registry.collect()
    assert (folder / "model.pt").read_bytes() == b"m"
    assert list(Path(registry.uri).glob("step-*")) == []


def test_a_directory_that_comes_back_has_no_manifest_and_can_be_saved_again(raftkv_client, tmp_path, monkeypatch):
    """The disk fails when the manifest is there and is to be made durable."""
    write, failures = registry_module.write_manifest, [StorageError("input/output error")]

    async def fail_once(*what):
        await write(*what)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(registry_module, "write_manifest", fail_once)
    registry = raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))
    folder = made.write(tmp_path / "out", {"model.pt": b"m"})
    with pytest.raises(StorageError, match="input/output error"):
        Saver(registry).save_directory(4, str(folder))
    assert os.listdir(folder) == ["model.pt"]
    assert Saver(registry).save_directory(4, str(folder)).file_count == 1
    other = made.write(tmp_path / "other", {"model.pt": b"m", MANIFEST: b"of a checkpoint that lies here"})
    with pytest.raises(ConfigError, match="is the name of the manifest"):
        Saver(registry).save_directory(5, str(other))
    assert (other / MANIFEST).exists()


def test_a_source_that_cannot_be_deleted_does_not_undo_its_copy(registry, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(transfer, "_rename", lambda *_: False)
    monkeypatch.setattr(transfer.shutil, "rmtree", refuse)
    folder = made.write(tmp_path / "out", {"model.pt": b"m"})
    done = Saver(registry).save_directory(4, str(folder))
    assert registry.latest() == done
    assert verify(done).is_whole
    assert (folder / "model.pt").exists()


def test_a_link_to_a_directory_is_no_part_of_a_checkpoint(registry, tmp_path):
    """Commit nothing that lies elsewhere: the files behind it were committed, and could not be loaded."""
    elsewhere = made.write(tmp_path / "elsewhere", {"tokenizer.json": b"t"})
    folder = made.write(tmp_path / "out", {"model.pt": b"m"})
    (folder / "tokenizer").symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"tokenizer.*is a link to a directory"):
        Saver(registry).save_directory(4, str(folder))
    assert (folder / "model.pt").exists()
    assert (folder / "tokenizer").is_symlink()


@pytest.mark.parametrize("is_same_disk", [True, False])
def test_a_link_is_not_moved_for_what_it_leads_to(registry, tmp_path, monkeypatch, is_same_disk):
    """Commit no link: the bytes stayed where they were, for any program to delete."""
    if not is_same_disk:
        monkeypatch.setattr(transfer, "_rename", lambda *_: False)
    folder = made.write(tmp_path / "out/checkpoint-4", {"model.pt": b"m"})
    (tmp_path / "out/best").symlink_to(folder)
    for name in ("best", "best/"):
        with pytest.raises(ConfigError, match="is a link; name the directory that it leads to"):
            Saver(registry).save_directory(4, f"{tmp_path}/out/{name}")
    assert (tmp_path / "out/best").is_symlink()
    assert (folder / "model.pt").exists()


def test_a_forked_child_keeps_no_lock_of_a_copy(raftkv_client, tmp_path, monkeypatch):
    """Let others have the copy while a child lives that was forked in the middle: it has the lock's file open too."""
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri="memory://bucket/forked")
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", {"model.pt": b"m"})))
    children, download = [], transfer._download

    def fork(*given):
        children.append(os.fork())
        if not children[-1]:
            signal.pause()
        download(*given)

    monkeypatch.setattr(transfer, "_download", fork)
    copy = local_directory(done, str(tmp_path / "cache"))
    try:
        with open(f"{copy}.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_block_that_raises_commits_nothing_and_the_step_can_be_saved_again(registry):
    saver = Saver(registry)
    with pytest.raises(KeyError, match="boom"), saver.saving(4) as saving:
        raise KeyError("boom")
    assert saving.checkpoint is None
    assert saver.newest() is None
    with saver.saving(4) as saving:
        made.write(Path(saving.uri), {"model.pt": b"m"})
    with pytest.raises(StaleStep), saver.saving(3):
        pass


def test_a_saver_of_before_is_fenced_out_in_the_middle_of_its_save(registry):
    def save(data: bytes, meanwhile=None) -> None:
        with Saver(registry).saving(4) as saving:
            made.write(Path(saving.uri), {"model.pt": data})
            if meanwhile:
                meanwhile()

    with pytest.raises(FenceBroken):
        save(b"old", meanwhile=lambda: save(b"new"))
    assert (Path(registry.latest().uri) / "model.pt").read_bytes() == b"new"


def test_a_checkpoint_as_a_directory_of_this_machine(registry, tmp_path, raftkv_client):
    with Saver(registry).saving(4) as saving:
        made.write(Path(saving.uri), {"a/model.pt": b"m"})
    assert local_directory(saving.checkpoint) == saving.uri
    (Path(saving.uri) / "a/model.pt").write_bytes(b"x")
    with pytest.raises(DigestMismatch, match=r"a/model\.pt"):
        local_directory(saving.checkpoint)


@pytest.mark.parametrize("is_local", [True, False])
def test_file_that_was_not_committed_reaches_no_loader(raftkv_client, tmp_path, is_local):
    """A loader of HF takes an added ``optimizer.pt``, and only the committed files were compared."""
    uri = str(tmp_path / "job") if is_local else f"memory://bucket/{tmp_path.name}"
    registry = raftkv.checkpoint.Registry(raftkv_client, "strange", uri=uri)
    done = Saver(registry).save_directory(4, str(made.write(tmp_path / "out", {"model.pt": b"m"})))
    path = Path(local_directory(done, str(tmp_path / "cache")))
    (path / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(DigestMismatch, match=r"optimizer\.pt was not committed with it"):
        local_directory(done, str(tmp_path / "cache"))


def test_a_checkpoint_of_elsewhere_is_downloaded_once(raftkv_client, tmp_path):
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri="memory://bucket/far")
    folder = made.write(tmp_path / "out", {"model.pt": b"m", "a/b": b""})
    done = Saver(remote).save_directory(4, str(folder))
    with pytest.raises(ConfigError, match="is not a local disk; name a directory"):
        local_directory(done)
    path = Path(local_directory(done, str(tmp_path / "cache")))
    assert ((path / "model.pt").read_bytes(), (path / "a/b").read_bytes()) == (b"m", b"")
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {path.name, f"{path.name}.lock"}
    os.utime(path / "model.pt", (1, 1))
    assert local_directory(done, str(tmp_path / "cache")) == str(path)
    assert (path / "model.pt").stat().st_mtime == 1


def test_processes_of_one_look_download_and_compare_once(raftkv_client, tmp_path, monkeypatch):
    """Each of eight ranks of a machine fetched a copy of its own, of which seven were thrown away."""
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri="memory://bucket/look")
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", {"model.pt": b"m"})))
    copied, compared = [], []
    copy_files, verify_copy = transfer.copy_files, transfer.verify
    monkeypatch.setattr(transfer, "copy_files", lambda *words: copied.append(words) or copy_files(*words))
    monkeypatch.setattr(transfer, "verify", lambda copy: compared.append(copy) or verify_copy(copy))
    with ThreadPoolExecutor(8) as pool:
        cache = str(tmp_path / "cache")
        paths = set(pool.map(lambda _: local_directory(done, cache, "look-1"), range(8)))
    assert (len(paths), len(copied), len(compared)) == (1, 1, 0)
    Path(paths.pop(), "model.pt").write_bytes(b"x")
    assert Path(local_directory(done, cache, "look-2"), "model.pt").read_bytes() == b"m"
    assert (len(copied), len(compared)) == (2, 1)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_holds_copies_too(raftkv_client, tmp_path, monkeypatch, error):
    def refuse(*_: object) -> None:
        raise OSError(error, "none here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri=f"memory://bucket/no-locks-{error}")
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", {"model.pt": b"m"})))
    path = local_directory(done, str(tmp_path / "cache"), "look")
    assert Path(path, "model.pt").read_bytes() == b"m"


def test_equal_numbers_without_locks_do_no_harm(raftkv_client, tmp_path, monkeypatch):
    """Download beside each other: in containers, each the first process of its own, one deleted what another wrote."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "none here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri="memory://bucket/same-number")
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", {"model.pt": b"m"})))
    is_copied, is_begun, is_read, copy = threading.Event(), threading.Event(), threading.Event(), transfer.copy_files

    def first(*given):
        monkeypatch.setattr(transfer, "copy_files", second)
        records = copy(*given)
        is_copied.set()
        is_begun.wait(90)
        return records

    def second(source, files, target):
        Path(target.root).mkdir(exist_ok=True)
        Path(target.root, "model.pt").write_bytes(b"")  # as one that is being written
        is_begun.set()
        is_read.wait(90)
        return copy(source, files, target)

    monkeypatch.setattr(transfer, "copy_files", first)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(local_directory, done, str(tmp_path / "cache"))
        is_copied.wait(90)
        other = threads.submit(local_directory, done, str(tmp_path / "cache"))
        found = Path(one.result(), "model.pt").read_bytes()
        is_read.set()
        assert [found, Path(other.result(), "model.pt").read_bytes()] == [b"m", b"m"]


def test_forked_child_ends_with_the_first_sigterm():
    """The child only noted the signal: programs that end workers by ``terminate`` and ``join`` waited for ever."""
    told = Termination()
    told.hold()
    try:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGTERM)
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert (status, told.is_asked) == (-signal.SIGTERM, False)
    finally:
        told.let_go()


@pytest.mark.parametrize("damage", ["flipped", "cut off", "gone", "a link", "another manifest", "a cut manifest"])
def test_a_downloaded_copy_that_was_damaged_is_fetched_again(raftkv_client, tmp_path, damage):
    """A copy that was there was handed out as it was: wrong bytes, without a word."""
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri=f"memory://bucket/{tmp_path.name}")
    contents = {"model.pt": b"m" * 1000, "a/b": b"b"}
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", contents)))
    path = Path(local_directory(done, str(tmp_path / "cache")))
    os.utime(path / "a/b", (1, 1))
    file, manifest = path / "model.pt", path / MANIFEST
    if damage == "a link":
        (tmp_path / "elsewhere").write_bytes(b"x" * 1000)
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "gone":
        file.unlink()
    elif damage in ("flipped", "cut off"):
        file.write_bytes(b"m" * 999 + (b"n" if damage == "flipped" else b""))
    else:
        file.write_bytes(b"x" * 1000)
        manifest.write_bytes(b"" if damage == "a cut manifest" else manifest.read_bytes().replace(b"1000", b"1001"))
    assert local_directory(done, str(tmp_path / "cache")) == str(path)
    assert {name: (path / name).read_bytes() for name in contents} == contents
    assert not file.is_symlink()
    assert (path / "a/b").stat().st_mtime == 1  # what is right is not fetched
    assert verify(replace(done, uri=str(path))).is_whole
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {path.name, f"{path.name}.lock"}


@pytest.mark.parametrize("what", ["first", "again"])
def test_a_download_that_fails_or_is_killed_leaves_nothing_in_the_cache(raftkv_client, tmp_path, monkeypatch, what):
    """A full disk stayed full: what was downloaded up to then lay there for ever, once for each process that tried."""
    remote = raftkv.checkpoint.Registry(raftkv_client, "far", uri=f"memory://bucket/{tmp_path.name}")
    contents = {"a.pt": b"a", "b.pt": b"b"}
    done = Saver(remote).save_directory(4, str(made.write(tmp_path / "out", contents)))
    cache, copy_files = tmp_path / "cache", transfer.copy_files
    if what == "again":
        path = Path(local_directory(done, str(cache)))
        (path / "b.pt").unlink()

    def fill(source, files, target):
        copy_files(source, files[:1], target)
        raise StorageError("No space left on device")

    with monkeypatch.context() as full:
        full.setattr(transfer, "copy_files", fill)
        with pytest.raises(StorageError, match="No space"):
            local_directory(done, str(cache))
    assert list(cache.glob("*.part")) == []
    made.write(cache / f"{done.id.directory}.1.part", {"a.pt": b"a"})  # of a process that was killed
    made.write(cache / "step-000000000005.g1.7.1.part", {"a.pt": b"a"})  # of another checkpoint
    path = Path(local_directory(done, str(cache)))
    assert {name: (path / name).read_bytes() for name in contents} == contents
    assert [entry.name for entry in cache.glob("*.part")] == ["step-000000000005.g1.7.1.part"]


def test_each_commit_applies_the_policy(registry):
    saver = Saver(registry, policy=Policy(keep_last=1, keep_best=[Best("loss")]))
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, 0.5)):
        with saver.saving(step, metrics={"loss": loss}) as saving:
            made.write(Path(saving.uri), {"model.pt": b"m"})
    assert [found.step for found in registry.checkpoints()] == [2, 4]
    assert len(list(Path(registry.uri).glob("step-*"))) == 2


def test_a_directory_that_was_deleted_while_it_was_written_is_not_committed(registry):
    saver = Saver(registry)
    with saver.saving(1) as saving:
        made.write(Path(saving.uri), {"model.pt": b"m"})

    def save_without():
        with saver.saving(2) as saving:
            shutil.rmtree(saving.uri)

    def save_nothing():
        with saver.saving(2):
            pass

    with pytest.raises(StorageError, match=r"^cannot read .*/step-0*2\..*: No such file or directory"):
        save_without()
    with pytest.raises(StorageError, match=r"^there are no files below .*/step-0*2\."):
        save_nothing()
    assert registry.latest().step == 1


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda uri: os.truncate(f"{uri}/model.pt", 3)])
def test_files_that_go_between_their_digests_and_the_commit_are_not_committed(registry, monkeypatch, damage):
    def digest_tree(uri):
        files = original(uri)
        damage(uri)
        return files

    original = transfer.digest_tree
    monkeypatch.setattr(saver_module, "digest_tree", digest_tree)

    def save():
        with Saver(registry).saving(1) as saving:
            made.write(Path(saving.uri), {"model.pt": b"model"})
        return saving

    with pytest.raises(FilesChanged, match=r"step-0*1\..*: model\.pt, which rank 0 had prepared, (is not|has 3 bytes)"):
        save()
    assert registry.checkpoints() == []
    monkeypatch.undo()
    assert verify(save().checkpoint).is_whole


@pytest.mark.parametrize(
    ("error", "module", "limit"),
    [(KeyError("boom"), attempt, "GIVE_UP_S"), (KeyboardInterrupt("boom"), lease, "FAREWELL_S")],
)
def test_an_error_in_a_block_is_not_held_up_by_a_cluster_that_is_away(registry, monkeypatch, error, module, limit):
    async def away(self, reason):
        await asyncio.Event().wait()

    monkeypatch.setattr(attempt, "GIVE_UP_S", 3600)
    monkeypatch.setattr(module, limit, 0.05)
    monkeypatch.setattr(attempt.Attempt, "abort", away)
    failures = []

    def save():
        try:
            with Saver(registry).saving(4):
                raise error
        except type(error) as raised:
            failures.append(raised)

    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    saving.join(90)
    assert failures == [error]


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_termination_is_held_back_once_and_only_on_the_main_thread(before):
    kept = signal.signal(signal.SIGTERM, before)
    try:
        told = Termination()
        with ThreadPoolExecutor(1) as other:
            other.submit(told.hold).result()
        assert signal.getsignal(signal.SIGTERM) is before
        told.hold()
        signal.raise_signal(signal.SIGTERM)
        is_ignored = before is signal.SIG_IGN
        assert told.is_asked != is_ignored
        if not is_ignored:
            with pytest.raises(KeyboardInterrupt):
                told.deliver()
        told.let_go()
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, kept)


def _save_in_block(registry, directory):
    with Saver(registry).saving(100, metrics={"loss": 0.5}) as saving:
        Path(saving.uri, "model.bin").write_bytes(b"weights")


def _save_directory(registry, directory):
    Saver(registry).save_directory(100, str(directory), metrics={"loss": 0.5})


@pytest.mark.parametrize("save", [_save_in_block, _save_directory])
def test_metrics_outlive_a_program_that_dies_before_its_commit(registry, tmp_path, monkeypatch, save):
    directory = tmp_path / "written"
    directory.mkdir()
    Path(directory, "model.bin").write_bytes(b"weights")

    def die(*_, **__):
        raise SystemExit

    async def say_nothing(*_):
        return None

    with monkeypatch.context() as dying:
        for kind in (attempt.Attempt, Attempt):
            dying.setattr(kind, "commit", die)
        dying.setattr(attempt.Attempt, "give_up", say_nothing)
        dying.setattr(Attempt, "give_up", lambda *_: None)
        with pytest.raises(SystemExit):
            save(registry, directory)
    (taken,) = registry.take_over(registry.claim())
    assert taken.checkpoint.metrics == {"loss": 0.5}
    assert registry.best("loss") == taken.checkpoint


def test_link_in_the_place_of_a_lock_cuts_no_file(raftkv_client, tmp_path):
    """In a directory for downloads that users share another may plant it."""
    registry = raftkv.checkpoint.Registry(raftkv_client, "job", uri=f"memory://{tmp_path}")
    attempt = registry.begin(registry.claim(), 100)
    attempt.prepare(0, [Place(attempt.uri).write("model.bin", b"weights")])
    done = attempt.commit()
    precious = tmp_path / "precious"
    precious.write_text("of another")
    (tmp_path / f"{done.id.directory}.lock").symlink_to(precious)
    with pytest.raises(StorageError, match="cannot lock a copy"):
        local_directory(done, str(tmp_path), "a look")
    assert precious.read_text() == "of another"
