"""What a pool can refuse, and why. Each class keeps its identity across Ray and HTTP."""

from __future__ import annotations

import errno

from headrace.data.errors import FrameError, HeadraceError

#: What the system says of a disk, a quota or a file that is full.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class PoolError(HeadraceError):
    """Whatever a pool refuses or fails at."""

    code = "pool_error"


class Conflict(PoolError):
    """A step index or a call id that is taken by other content, or a trajectory of another group."""

    code = "conflict"


class NotFound(PoolError):
    """No such trajectory, step, group or lease."""

    code = "not_found"


class Gone(NotFound):
    """It was here: consumed, dropped or forgotten, and its content with it."""

    code = "gone"


class WasForgotten(Gone):
    """It was here, and was removed for good because somebody asked for that."""

    code = "forgotten"


class NotRegistered(PoolError):
    """A batch was asked for before any trainer registered."""

    code = "not_registered"


class LeaseLost(PoolError):
    """The lease expired, or was ended before: its groups may be with another consumer."""

    code = "lease_lost"


class PoolFull(PoolError):
    """The channel is full and its overflow policy is `reject`, or `block` ran out of time."""

    code = "pool_full"


class PoolClosed(PoolError):
    """The channel was shut down, or the pool was closed."""

    code = "pool_closed"


class PoolUnreachable(PoolError):
    """The pool's process did not answer in time."""

    code = "pool_unreachable"


class UnreadableAnswer(PoolUnreachable, FrameError):
    """What came back is not what a pool of this release answers: of another release, or of no pool. The call may have
    been carried out."""

    code = "unreadable_answer"


class Unauthorized(PoolError):
    """The caller presented no key, or a wrong one."""

    code = "unauthorized"


class InternalError(PoolError):
    """A fault of the pool's own; its log has the traceback."""

    code = "internal"


class JournalError(PoolError):
    """The journal could not be written, synced or opened."""

    code = "journal_error"


class DiskFull(JournalError):
    """No room for what was to be kept: nothing of it was stored."""

    code = "disk_full"


class JournalLocked(JournalError):
    """Another process has the journal open."""

    code = "journal_locked"


class JournalDamaged(JournalError):
    """Damage that is no torn tail: the message names the segment and where everything around it was saved."""

    code = "journal_damaged"
