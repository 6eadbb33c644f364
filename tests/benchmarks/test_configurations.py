"""Configurations that others ran: the rows of a file, their mistakes, what must follow from them."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks.configurations import Pricer, Row, main, read
from parplan.errors import ParplanError
from parplan.planner.mesh.step import MIXED, PLAIN

ROW = Row(6, 1024, 4096, 16, 8, 32_000, 0, 1024, 2, 4, "h100-sxm", 2, 2, 2, 1, 1, 4, 1, "none")
PRICER = Pricer(own=False)
OWN = Pricer()


def columns(row: Row) -> dict[str, str]:
    return {one.name: str(getattr(row, one.name)) for one in fields(Row)}


def written(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.full
def test_rows_are_priced_and_written_beside_their_own_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path / "runs.csv", columns(ROW) | {"measured": "123"}, columns(ROW) | {"measured": "99", "zero": "0"}
    )
    out = tmp_path / "priced.csv"
    assert main([str(file), "--only-rows", "--csv", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1: 2 tensor x 2 data x 2 stages, 4 micro-batches of 1, sharded state" in printed
    with out.open(newline="") as lines:
        known = list(csv.DictReader(lines))
    assert [one["measured"] for one in known] == ["123", "99"]
    found = PRICER.priced(ROW)
    tokens = ROW.batch * ROW.sequence / found.step.seconds / ROW.devices
    assert float(known[0]["tokens_per_s_device"]) == pytest.approx(tokens, rel=1e-3)
    assert float(known[0]["memory_gib"]) < float(known[1]["memory_gib"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dp": "4"}, r"dp x tp x pp = 4 x 2 x 2 are not the 8 devices of 2 nodes"),
        ({"zero": "2"}, "zero is 0, 1 or 3 and recompute none or full"),
        ({"recompute": "some"}, "zero is 0, 1 or 3 and recompute none or full"),
        ({"layers": ""}, "no layers"),
        ({"layers": "many"}, "layers is 'many'; it is a whole number"),
        ({"layers": "1"}, "1 layers are no 2 stages"),
        ({"heads": "15"}, "heads divide hidden"),
        ({"preset": "h1000"}, "there is no device preset 'h1000'"),
    ],
)
def test_mistakes_are_told_with_their_row(
    changed: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "runs.csv", columns(ROW), columns(ROW) | changed)
    assert main([str(file), "--only-rows"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "row 2" in error


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.csv")]) == 1
    assert "cannot read the configurations" in capsys.readouterr().err
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ParplanError, match="no row; the first line names the columns"):
        read(tmp_path / "empty.csv")


@pytest.mark.full
def test_what_saves_memory_takes_time() -> None:
    found = {
        (zero, recompute): PRICER.priced(replace(ROW, zero=zero, recompute=recompute)).step
        for zero in (0, 1, 3)
        for recompute in ("none", "full")
    }
    for zero in (0, 1, 3):
        whole, again = found[zero, "none"], found[zero, "full"]
        assert again.nbytes < whole.nbytes
        assert 1.2 < again.seconds / whole.seconds < 1.4
    assert found[1, "none"].nbytes < found[0, "none"].nbytes
    plain = Pricer(held=PLAIN, own=False).priced(ROW).step
    assert plain.nbytes < found[1, "none"].nbytes
    stage = found[0, "none"].stages[0]
    numbers = PRICER.priced(ROW).row.size.block_parameters / ROW.tp * ROW.layers / ROW.pp
    assert stage.nbytes > MIXED.resident * numbers


@pytest.mark.full
def test_without_sequence_parallelism_norms_run_on_every_device() -> None:
    row = replace(ROW, dp=1, tp=8, pp=1, nodes=1, gpus_per_node=8)
    cut, whole = (PRICER.priced(replace(row, sequence_parallel=own)).step for own in (1, 0))
    assert whole.seconds >= cut.seconds  # as long, where launching takes longest
    assert whole.nbytes > cut.nbytes


@pytest.mark.full
def test_tied_weights_are_on_both_ends_of_a_pipeline() -> None:
    tied, apart = (PRICER.priced(replace(ROW, tied=own)).step for own in (1, 0))
    assert tied.nbytes == pytest.approx(apart.nbytes, rel=1e-3)
    alone = replace(ROW, dp=8, tp=1, pp=1)
    tied, apart = (PRICER.priced(replace(alone, tied=own)).step for own in (1, 0))
    assert tied.nbytes < apart.nbytes


@pytest.mark.full
def test_the_plans_own_choice_is_no_slower_than_a_row_that_fits() -> None:
    rows = [
        replace(ROW, dp=8, tp=1, pp=1, zero=3, grad_acc=1),
        replace(ROW, dp=4, tp=2, pp=1, zero=1, grad_acc=2),
        replace(ROW, dp=2, tp=1, pp=4, zero=0, grad_acc=4),
        replace(ROW, dp=1, tp=4, pp=2, zero=0, grad_acc=8, recompute="full"),
    ]
    for row in rows:
        found = OWN.priced(row)
        assert row.batch == 8
        assert found.chosen is not None
        assert found.step.nbytes <= found.limit
        assert found.chosen.step.nbytes <= found.limit
        assert found.chosen.step.seconds <= found.step.seconds
        assert found.chosen.bound_s <= found.chosen.step.seconds


@pytest.mark.full
def test_a_machine_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = '[[devices]]\npreset = "h100-sxm"\ncount = 16\n'
    links = '[[links]]\npreset = "nvlink4"\nsize = 4\n[[links]]\npreset = "ndr400"\nsize = 16\n'
    slow = "[[links.measured]]\nhosts = 2\nbytes = [1048576, 1073741824]\ngb_per_s = [1.0, 4.0]\n"
    runs = written(tmp_path / "runs.csv", columns(replace(ROW, dp=2, tp=4, pp=1)))
    steps = []
    for text in (devices + links, devices + links + slow):
        machine = tmp_path / "machine.toml"
        machine.write_text(text)
        out = tmp_path / "priced.csv"
        assert main([str(runs), "--only-rows", "--cluster", str(machine), "--csv", str(out)]) == 0
        with out.open(newline="") as lines:
            steps += [float(one["step_s"]) for one in csv.DictReader(lines)]
    assert steps[1] > steps[0]
    big = written(tmp_path / "big.csv", columns(replace(ROW, dp=8, nodes=8)))
    assert main([str(big), "--only-rows", "--cluster", str(machine)]) == 1
    assert "has no 8 nodes of 4" in capsys.readouterr().err
