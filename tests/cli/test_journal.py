"""Looking after a journal: verify, repair, compact, backup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.command import Command, steps

from headrace import DataPool


@pytest.fixture
def long_journal(tmp_path: Path) -> Path:
    """Forty groups, one commit each, in several segments."""
    folder = tmp_path / "long"
    with DataPool(folder, durability="os", segment_mb=0.002) as pool:
        for n in range(40):
            pool.submit_steps(steps(f"g{n}", 0))
    assert len(list(folder.glob("*.seg"))) > 3
    return folder


def test_a_sound_journal_is_said_to_be_sound(headrace: Command, journal: Path) -> None:
    done = headrace("pool", "verify", journal)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "sound"
    assert "16 submitted" in done.out
    found = json.loads(headrace("pool", "verify", journal, "--json").out)
    assert (found["sound"], found["damage"], found["torn"], found["balanced"]) == (True, [], None, True)


def test_damage_in_the_middle_is_named_and_nothing_is_changed(headrace: Command, long_journal: Path) -> None:
    _flip(long_journal / "000000000002.seg", 500)
    before = _content(long_journal)
    done = headrace("pool", "verify", long_journal)
    assert done.code == 1
    assert "DAMAGE     000000000002.seg, bytes " in done.out
    assert "`headrace pool repair` puts what reads back in place" in done.out
    found = json.loads(headrace("pool", "verify", long_journal, "--json").out)
    assert found["sound"] is False
    assert [damage["file"] for damage in found["damage"]] == ["000000000002.seg"]
    assert _content(long_journal) == before


def test_a_missing_segment_is_damage(headrace: Command, long_journal: Path) -> None:
    (long_journal / "000000000002.seg").unlink()
    done = headrace("pool", "verify", long_journal)
    assert done.code == 1
    assert "000000000002.seg, the whole file: the segment is missing" in done.out


def test_a_journal_whose_only_segment_is_gone_is_repaired(headrace: Command, journal: Path) -> None:
    for segment in journal.glob("*.seg"):
        segment.unlink()
    assert "the segment is missing" in headrace("pool", "stats", journal).err
    assert headrace("pool", "repair", journal).code == 0
    assert headrace("pool", "stats", journal).code == 0


def test_a_torn_tail_is_said_and_is_no_damage(headrace: Command, journal: Path) -> None:
    segment = max(journal.glob("*.seg"))
    segment.write_bytes(segment.read_bytes() + segment.read_bytes()[:30])
    done = headrace("pool", "verify", journal)
    assert done.code == 0
    assert f"torn tail  {segment.name}, " in done.out
    assert "nothing acknowledged is in it" in done.out


def test_a_damaged_journal_is_not_read_but_repaired(headrace: Command, long_journal: Path) -> None:
    _flip(long_journal / "000000000002.seg", 500)
    refused = headrace("pool", "stats", long_journal)
    assert refused.code == 1
    assert f"`headrace pool repair {long_journal}` puts everything around it in place" in refused.err

    done = headrace("pool", "repair", long_journal)
    assert done.code == 0
    assert "damage: 000000000002.seg, bytes " in done.out
    assert re.search(r"channel train: \d+ steps are lost\n", done.out)
    assert f"the damaged files are in {long_journal / 'damaged'}" in done.out

    verified = headrace("pool", "verify", long_journal)
    assert verified.code == 0
    assert "were lost in an earlier repair; the ledger is set right" in verified.out
    kept = int(headrace("pool", "stats", long_journal).rows[0]["queued"])
    assert 70 <= kept < 80
    with DataPool(long_journal) as pool:
        assert pool.fetch_batch(kept // 2, timeout=0) is not None


def test_a_sound_journal_is_not_repaired(headrace: Command, journal: Path) -> None:
    before = _content(journal)
    done = headrace("pool", "repair", journal)
    assert done.code == 0
    assert "is not damaged" in done.out
    after = _content(journal)
    assert {name: after[name] for name in before if "lock" not in name} == {
        name: data for name, data in before.items() if "lock" not in name
    }


def test_compacting_leaves_what_lives(headrace: Command, long_journal: Path) -> None:
    with DataPool(long_journal, durability="os") as pool:
        pool.fetch_batch(39, timeout=0)
        ledger = pool.stats()["ledger"]
    done = headrace("pool", "compact", long_journal)
    assert done.code == 0
    assert done.out.startswith(f"compacted {long_journal}: ")
    assert len(list(long_journal.glob("*.snap"))) == 1
    assert json.loads(headrace("pool", "stats", long_journal, "--json").out)["ledger"] == ledger
    assert headrace("pool", "verify", long_journal).code == 0


def test_a_backup_is_a_journal_of_its_own(headrace: Command, journal: Path, tmp_path: Path) -> None:
    done = headrace("pool", "backup", journal, "--to", tmp_path / "copy")
    assert done.code == 0
    assert done.out == f"backed up {journal} to {tmp_path / 'copy'}\n"
    assert headrace("pool", "verify", tmp_path / "copy").code == 0
    ours, theirs = (
        json.loads(headrace("pool", "stats", path, "--json").out)["channels"] for path in (journal, tmp_path / "copy")
    )
    assert ours == theirs


def test_a_backup_does_not_overwrite(headrace: Command, journal: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("mine")
    done = headrace("pool", "backup", journal, "--to", tmp_path / "full")
    assert done.code == 1
    assert "is not empty" in done.err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["something"]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
