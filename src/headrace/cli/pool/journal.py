"""`headrace pool verify`, `repair`, `compact` and `backup`: looking after a pool's journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.cli.common import FolderCommand, TargetCommand, connected, folder_of, megabytes, print_json
from headrace.commands import FAILED, command
from headrace.pool.journal.scan import Scan


class PoolVerifyCommand(FolderCommand):
    """Read all of a journal and say what was found. Nothing is changed. Damage makes the exit code 1.

    A torn tail is not damage: it is what a crash in the middle of a write leaves, and nothing acknowledged is in it.
    """

    as_json: bool = Field(False, alias="json", description="print JSON")

    def execute(self) -> None:
        from headrace.pool.journal.repair import verify
        from headrace.pool.readonly import JournalView, lock_shared, unlock

        held = lock_shared(self.folder)
        try:
            report = _report(verify(self.folder))
        finally:
            unlock(held)
        if report["sound"]:
            # What can be read must also add up: it is replayed, as a pool would, and the ledger is checked.
            with JournalView(self.folder) as view:
                stats = view.stats()
                report["ledger"], report["balanced"] = stats["ledger"], stats["balanced"]
                report["orphans"] = view.orphans
                ledgers = [channel["ledger"] for channel in stats["channels"].values()]
                report["lost"] = sum(ledger["dropped"].get("damaged", 0) for ledger in ledgers)
            report["sound"] = report["balanced"]
        if self.as_json:
            print_json(report)
        else:
            _print_report(report)
        if not report["sound"]:
            raise SystemExit(FAILED)


class PoolRepairCommand(FolderCommand):
    """Put what reads back of a damaged journal in its place. The damaged files are moved to its folder `damaged`."""

    def execute(self) -> None:
        from headrace.pool.journal.repair import DAMAGED, repair
        from headrace.pool.readonly import JournalView, lock_shared, unlock

        unlock(lock_shared(self.folder))
        found = repair(self.folder)
        if not found.damage:
            print(f"{self.folder} is not damaged: {found.commits} commits; nothing was changed")
            return
        for damage in found.damage:
            print(f"damage: {damage}")
        with JournalView(self.folder) as view:
            losses = [event for event in view.events() if event.kind == "damage" and "lost" in event.detail]
        for event in losses:
            where, what = (f"channel {event.channel}", "steps") if event.channel else ("desk", "groups")
            print(f"{where}: {event.detail['lost']} {what} are lost", end="")
            returned = event.detail["returned"]
            print(f"; at least {returned} that had gone are queued again" if returned else "")
        print(f"repaired: what reads back is in place; the damaged files are in {self.folder / DAMAGED}")


class PoolCompactCommand(TargetCommand):
    """Rewrite a journal as a snapshot of what lives, and delete the rest."""

    def execute(self) -> None:
        folder = folder_of(self.target)
        if folder is None:
            with connected(self) as pool:
                before = pool.stats()["journal_bytes"]
                pool.compact()
                after = pool.stats()["journal_bytes"]
        else:
            with _opened(folder) as pool:
                before = pool.describe()["journal_bytes"]
                pool.compact()
                after = pool.describe()["journal_bytes"]
        print(f"compacted {self.target}: {megabytes(before)} before, {megabytes(after)} now")


class PoolBackupCommand(TargetCommand):
    """Copy a journal, as it is now, to an empty folder, and check the copy. A pool that runs goes on meanwhile; the
    folder is then one on its machine, and over HTTP one below what the server has as --backups.
    """

    to: Path = Field(description="the folder to copy to; it must be new or empty")

    def execute(self) -> None:
        folder = folder_of(self.target)
        if folder is None:
            with connected(self) as pool:
                pool.backup(self.to if self.target.startswith("http") else self.to.absolute())
        else:
            with _opened(folder) as pool:
                pool.backup(self.to)
        print(f"backed up {self.target} to {self.to}")


def _opened(folder: Path) -> Any:
    """A pool on an existing journal. Raises `HeadraceError` where the folder has none."""
    from headrace.pool.embedded import DataPool
    from headrace.pool.readonly import lock_shared, unlock

    unlock(lock_shared(folder))
    return DataPool(folder)


def _report(found: Scan) -> dict[str, Any]:
    """A scan's findings, as `--json` prints them."""
    return {
        "sound": not found.damage,
        "snapshot": found.layout.snapshot.name if found.layout.snapshot is not None else None,
        "segments": [path.name for path in found.layout.segments],
        "commits": found.commits,
        "bytes": found.bytes,
        "damage": [
            {"file": damage.path.name, "start": damage.start, "end": damage.end, "why": damage.why, "text": str(damage)}
            for damage in found.damage
        ],
        "torn": None
        if found.torn is None
        else {"file": found.torn[0].name, "start": found.torn[1], "bytes": found.torn[2], "why": found.torn[3]},
    }


def _print_report(report: dict[str, Any]) -> None:
    """Prints a scan's findings for people, the verdict last."""
    print(f"snapshot   {report['snapshot'] or 'none'}")
    print(f"segments   {len(report['segments'])}, {report['commits']} commits, {megabytes(report['bytes'])}")
    for damage in report["damage"]:
        print(f"DAMAGE     {damage['text']}")
    if report["torn"] is not None:
        torn = report["torn"]
        print(f"torn tail  {torn['file']}, {torn['bytes']} bytes after byte {torn['start']}: {torn['why']};")
        print("           nothing acknowledged is in it, and the next pool to open the journal cuts it off")
    if "ledger" in report:
        print(f"ledger     {', '.join(f'{count} {name}' for name, count in report['ledger'].items())}")
        if not report["balanced"]:
            print("DAMAGE     the ledger does not balance")
        for kind, count in report["orphans"].items():
            print(f"note       {count} facts ({kind}) are about what is not there: lost in an earlier repair")
        if report["lost"]:
            print(f"note       {report['lost']} steps were lost in an earlier repair; the ledger is set right")
    print("sound" if report["sound"] else "damaged: `headrace pool repair` puts what reads back in place")


verify_app = command("verify", PoolVerifyCommand)
repair_app = command("repair", PoolRepairCommand)
compact_app = command("compact", PoolCompactCommand)
backup_app = command("backup", PoolBackupCommand)
