"""The journal: what a pool acknowledged, on disk.

    000000000007.snap    the state when segment 7 began, as facts
    000000000007.seg     facts since, one frame a commit, numbered without a gap; at its end, that another follows
    000000000008.seg     ...
    mark                 the last commits that were acknowledged: an end that is missing is missed
    lock                 held by the one process that has the journal open
    reserve              room kept for acknowledgements when the disk is full
    *.torn               tails that were cut off, to look at
    saved/, damaged/     what reads back of a damaged journal; the damaged files that a repair replaced

A commit is appended before it is applied, and applied before it is acknowledged. `os` acknowledges what the kernel
has (survives the process), `fsync` what the disk has (survives the machine). Recovery reads the newest snapshot and
the segments from it on. What a crash can leave of a write that nobody was promised is a torn tail: cut off, kept aside,
and said. Anything else that does not read back is damage: an error, with all that does read back saved beside it.

Order is what makes this hold. A segment, then its head, then its name in the directory are on the disk before anything
is written behind them; a snapshot is whole on the disk before it gets its name, and has its name there before what it
replaces is deleted; what a recovery reads is on the disk before the pool answers for it.
"""

from headrace.pool.journal.files import Files
from headrace.pool.journal.journal import Journal

__all__ = ["Files", "Journal"]
