"""`parplan doctor`: about ten lines on this machine, whatever state it is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parplan import __version__
from parplan.cli import doctor as probes
from parplan.cli.main import main
from parplan.cost_models.profile.store import ProfileStore
from tests.profiler.prefilled import prefill

NAMES = ["parplan", "torch", "devices", "links", "cache", "profile", "settings"]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine everywhere: CPU devices only."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def doctor(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, list[str]]:
    """The lines by the names in front of them; nothing goes to standard error."""
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        assert line == line.rstrip()
        name, text = line[:10].strip(), line[10:]
        found.setdefault(name or [*found][-1], []).append(text)
    assert list(found) == NAMES
    return found


def test_about_ten_lines_on_a_machine_without_a_profile(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor(capsys)
    assert sum(map(len, found.values())) <= 12
    assert found["parplan"][0].startswith(f"{__version__} on Python ")
    assert found["torch"][0].startswith(torch.__version__)
    assert "gloo" in found["torch"][0]
    assert found["devices"][1:] == ["no accelerator"]
    assert "GB/s" in found["links"][0]
    assert found["cache"] == [f"{own_cache / 'profiles.sqlite'}: none yet"]
    assert found["profile"] == ["nothing measured: costs are estimates; `parplan profile TARGET` measures"]
    assert not own_cache.exists() or not list(own_cache.iterdir()), "it writes nothing"


def test_what_was_measured_is_counted(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProfileStore() as store:
        prefill(store, 2)
    found = doctor(capsys)
    assert found["cache"][0].endswith(" bytes")
    assert all(line.endswith(": used here") for line in found["profile"])
    assert 1 <= len(found["profile"]) <= 4


@pytest.mark.parametrize("state", ["damaged", "a folder", "foreign"])
def test_a_store_that_cannot_be_used(own_cache: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    own_cache.mkdir(exist_ok=True)
    file = own_cache / "profiles.sqlite"
    if state == "a folder":
        file.mkdir()
    elif state == "damaged":
        file.write_bytes(b"no database " * 1000)
    else:
        import sqlite3

        with sqlite3.connect(file) as other:
            other.execute("CREATE TABLE theirs (id INTEGER)")
        other.close()
    found = doctor(capsys, code=1)
    for name in ("cache", "profile"):
        assert found[name][-1].startswith("BROKEN: ProfileError: ")
        assert str(file) in found[name][-1]
    assert not any("BROKEN" in line for name in NAMES if name not in ("cache", "profile") for line in found[name])


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        pytest.param(torch.accelerator, "is_available", ["devices", "links", "profile"], id="a driver that fails"),
        pytest.param(probes, "version", ["parplan"], id="a package that is not installed"),
    ],
)
def test_what_raises_is_told_and_the_rest_goes_on(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: Any, name: str,
    broken: list[str],
) -> None:  # fmt: skip
    def fail(*args: object) -> bool:
        raise RuntimeError("CUDA driver\nversion is insufficient")

    monkeypatch.setattr(where, name, fail)
    found = doctor(capsys, code=1)
    assert [one for one in NAMES if "BROKEN" in found[one][-1]] == broken
    for one in broken:
        assert found[one][-1] == "BROKEN: RuntimeError: CUDA driver version is insufficient"
