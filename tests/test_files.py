"""Files are whole or as they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from parplan.errors import ParplanError
from parplan.files import check_writable, write_files


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
