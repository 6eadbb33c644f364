"""Files are whole or as they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from parplan.errors import ParplanError
from parplan.files import check_writable, replacing, write_files


def test_files_are_written_and_nothing_is_left_beside(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text("old")
    a.chmod(0o640)
    write_files({str(a): "new µ\n", str(b): "b"})
    assert (a.read_text(encoding="utf-8"), b.read_text()) == ("new µ\n", "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert a.stat().st_mode & 0o777 == 0o640


def test_one_that_cannot_be_written_leaves_the_other_as_it_was(tmp_path: Path) -> None:
    a = tmp_path / "a.json"
    a.write_text("old")
    with pytest.raises(ParplanError, match=r"cannot write .*missing/b\.json: No such file"):
        write_files({str(a): "new", str(tmp_path / "missing" / "b.json"): "b"})
    assert a.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_files({str(link): "new"})
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_files({str(pipe): "text"})
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("path", "words"),
    [(".", "--out .*: that is a folder; name a file in it"), ("missing/plan.json", "there is no folder .*missing")],
)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(ParplanError, match=words):
        check_writable(str(tmp_path / path), "--out")


def test_a_good_place_is_accepted_and_left_alone(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "plan.json"), "--out")
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_file_keeps_its_link_and_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    with replacing(link) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert link.is_symlink()
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"new", 0o640)


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    left = tmp_path / f".run.pt.{'0' * 32}.tmp"
    left.write_bytes(b"half")
    with replacing(path) as first:
        assert not left.exists()
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
