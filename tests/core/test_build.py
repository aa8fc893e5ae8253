"""A build from start to end with the numpy engine: stops, resumes, and what a person reads."""

from pathlib import Path

import pytest

from tests.conftest import Spill, write_folder


def adapter(spill: Spill, target: object, out: Path, *options: object) -> bytes:
    done = spill("export", target, "--out", out, *options)
    assert done.code == 0, done.err
    return (out / "adapter_model.safetensors").read_bytes()


def test_a_build_in_one_go_prints_its_table_and_names_the_next_command(spill: Spill, folder: Path) -> None:
    done = spill("build", folder)
    assert done.code == 0, done.err
    assert "1 eval:base   numpy   alpha    " in done.out
    assert done.out.splitlines()[-1].startswith("done; next: spill ask ")


@pytest.mark.parametrize(
    "stop", ["eval:base", "eval:base:1", "eval:base:4", "tune:1", "tune:3", "tune:5", "tune", "eval:tuned:2"]
)
def test_a_stop_anywhere_changes_nothing(spill: Spill, folder: Path, tmp_path: Path, stop: str) -> None:
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    stopped = spill("build", folder, "--state", tmp_path / "halves", "--stop-after", stop)
    assert stopped.code == 0
    assert "next: spill resume" in stopped.out
    done = spill("resume", folder, "--state", tmp_path / "halves")
    assert done.code == 0, done.err
    whole = adapter(spill, folder, tmp_path / "a", "--state", tmp_path / "whole")
    assert adapter(spill, folder, tmp_path / "b", "--state", tmp_path / "halves") == whole


def test_a_state_alone_is_enough(spill: Spill, folder: Path, model: Path, tmp_path: Path) -> None:
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    assert spill("build", folder, "--state", tmp_path / "s", "--stop-after", "tune:2").code == 0
    moved = tmp_path / "other machine"
    (tmp_path / "s").rename(moved)
    folder.rename(tmp_path / "gone")
    done = spill("resume", moved, "--student", model, "--engine", "numpy")
    assert done.code == 0, done.err
    assert adapter(spill, moved, tmp_path / "b", "--student", model) == adapter(
        spill, tmp_path / "whole", tmp_path / "a", "--student", model
    )


def test_every_unit_may_be_a_commit(spill: Spill, folder: Path, tmp_path: Path) -> None:
    assert spill("build", folder, "--state", tmp_path / "often", "--commit-every", "0").code == 0
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    assert adapter(spill, folder, tmp_path / "a", "--state", tmp_path / "often") == adapter(
        spill, folder, tmp_path / "b", "--state", tmp_path / "whole"
    )


def test_a_finished_build_writes_nothing(spill: Spill, folder: Path) -> None:
    assert spill("build", folder).code == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in (folder / ".spill").rglob("*"))
    again = spill("build", folder)
    assert again.code == 0
    assert "eval:tuned" in again.out
    assert sorted((p, p.stat().st_mtime_ns) for p in (folder / ".spill").rglob("*")) == before


def test_two_machines_stand_in_the_table(
    spill: Spill, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    assert spill("build", folder, "--stop-after", "tune:2").code == 0
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    assert spill("resume", folder).code == 0
    reference = write_folder(tmp_path / "reference", model)
    assert spill("build", reference).code == 0
    table = spill("table", folder, "--reference", reference / ".spill" / "state").out
    assert "2 tune        numpy   alpha -> beta  " in table
    assert table.splitlines()[1].split()[-1] != "-"
