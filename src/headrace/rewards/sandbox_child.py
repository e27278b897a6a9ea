"""Confines a program and runs it: the first program of a sandbox's process, which `sandbox.py` starts.

It is run by its path and imports nothing of Headrace's. Its argument is a file with what to run; what it could hold and
how the program ended go, as lines of JSON, to the descriptor that the file names. Each measure is tried, and told if it
holds:

- `namespaces`: users, processes, network and mounts of its own, where the kernel lets this user make them. Processes
  end with the first of them, and the scratch folder is a file system of bounded size.
- `user`: where it was started by root, a user that owns nothing.
- `files` (Landlock): nothing but the scratch folder is written, nothing but Python and the system's libraries read, no
  process outside traced or looked into.
- `network` (seccomp): no socket is made, whatever else is allowed; nor a new session, so that a signal to the process
  group reaches all.
- `signals`: no process outside is signalled, nor its limits changed, by whatever of these there is: processes or a user
  of its own; signals by Landlock from its version 6 on and limits by seccomp; all of it by seccomp, and then a process
  of the program's signals itself alone.

Nothing outlives the process that started it: each process here ends with its parent, and this one, which sees the end
of whoever started it, ends the whole group then.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWIPC = 0x20000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
CAPABILITIES_VERSION = 0x20080522
#: Capabilities that let a user read what root alone may: reading, or, where there is not that one, all of it.
CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE = 2, 1
#: From this user id on, one for each sandbox: above what systems give to people and services.
FIRST_UID = 1_500_000_000
NOBODY = 65534

#: By machine: seccomp's number for it, and the numbers of what is denied.
DENIED = {
    "x86_64": (0xC000003E, {"socket": 41, "ptrace": 101, "setpgid": 109, "setsid": 112, "mount": 165, "keyctl": 250,
                            "unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
                            "open_by_handle_at": 304, "bpf": 321, "io_uring_setup": 425}),
    "aarch64": (0xC00000B7, {"socket": 198, "ptrace": 117, "setpgid": 154, "setsid": 157, "mount": 40, "keyctl": 219,
                             "unshare": 97, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
                             "open_by_handle_at": 265, "bpf": 280, "io_uring_setup": 425}),
}  # fmt: skip
#: By machine: the numbers of what reaches other processes of the same user.
REACHING = {
    "x86_64": {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
               "pidfd_send_signal": 424, "fcntl": 72, "ioctl": 16, "prlimit64": 302},
    "aarch64": {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
                "pidfd_send_signal": 424, "fcntl": 25, "ioctl": 29, "prlimit64": 261},
}  # fmt: skip
#: Those of them that send a signal, and whose first argument says to which process.
SENDING = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
#: What names a process that gets a signal whenever there is something to read: of fcntl, and of ioctl.
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
KILL, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
X32_NUMBERS = 0x40000000
#: Where a call's number, its machine and its arguments stand, of which each has eight bytes, the lower four first.
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16
#: An instruction of a filter: what it does, how many to leave out where it holds and where not, and its operand.
Instruction = tuple[int, int, int, int]
PERMITTED: Instruction = (RETURN, 0, 0, ALLOW)
REFUSED: Instruction = (RETURN, 0, 0, ERRNO | errno.EPERM)

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
#: What can be allowed below a folder, by Landlock's version: all of version 1, then refer, truncate, ioctl_dev.
RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
#: The version from which Landlock shuts off signals to processes outside, and abstract sockets.
SCOPING = 6
#: What a Python needs to read beside itself.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the starting thread had blocked
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    report_to = spec["report_fd"]
    os.set_inheritable(report_to, False)
    held: list[str] = []

    def tell(**what: object) -> None:
        os.write(report_to, (json.dumps({"held": held, **what}) + "\n").encode())

    try:
        uid = enter(spec, held)
        # What a program started has lost its parent by then, and a namespace to end it may not be had: the group is.
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(os.getpid(), signal.SIGKILL))
        end_with_parent(signal.SIGTERM, lambda: os.getppid() == spec["parent"])
        here, kept_open = os.pipe()  # which this process keeps open to its end: the first of a namespace sees no parent
        first = os.fork()  # with a namespace of processes, this is its first: all others end with it
        if first:
            os.close(report_to)
            os.waitpid(first, 0)
            os._exit(0)
        os.close(kept_open)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL, lambda: not select.select([here], [], [], 0)[0])
        supervisor = os.getpid()
        program = os.fork()
        if program:
            _, status, used = os.wait4(program, 0)
            code = os.waitstatus_to_exitcode(status)
            tell(exit_code=code, cpu_s=used.ru_utime + used.ru_stime, max_rss_mb=used.ru_maxrss / 1024)
            os._exit(0)
        begin(spec, held, uid, supervisor, tell)
    except BaseException as error:
        tell(error=f"{type(error).__name__}: {error}")
        os._exit(1)


def end_with_parent(how: signal.Signals, has_one: Callable[[], bool]) -> None:
    """Has the kernel send this process a signal once its parent ends, and ends it here where that is over: `has_one`
    says whether the parent is there. The kernel forgets it with every change of user, so it comes after the last one;
    a program that this process becomes keeps it."""
    if LIBC.prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "pdeathsig")
    if not has_one():
        os._exit(1)


def enter(spec: dict[str, Any], held: list[str]) -> int | None:
    """Enters namespaces, makes the scratch folder and writes the program's files into it; the user to become, if
    any."""
    root = os.geteuid() == 0
    uid = FIRST_UID + os.getpid() if root else None
    if spec["namespaces"] and succeeds_in_a_child(lambda: isolate(spec, root)):
        isolate(spec, root)
        held.append("namespaces")
    os.chdir(spec["scratch"])
    for name, text in spec["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    if root:
        os.chmod(".", 0o777)
    return uid


def succeeds_in_a_child(call: Callable[[], None]) -> bool:
    """Whether a call raises nothing, found out by a child, so that nothing half done is left where it does: systems
    allow namespaces and then forbid what they are for."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def isolate(spec: dict[str, Any], root: bool) -> None:
    """Enters namespaces of its own, with a file system of bounded size for the scratch folder. Users of their own are
    needed where it is not root who asks. Raises `OSError`."""
    uid, gid = os.geteuid(), os.getegid()
    kinds = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS
    if LIBC.unshare(kinds if root else kinds | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    size = f"size={spec['limits']['files_mb']}m,nr_inodes={spec['limits']['files']},mode=0777"
    mount("tmpfs", spec["scratch"], "tmpfs", MS_NOSUID | MS_NODEV, size)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    def named(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    if LIBC.mount(named(source), named(target), named(kind), ctypes.c_ulong(flags), named(options)):
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def begin(spec: dict[str, Any], held: list[str], uid: int | None, supervisor: int, tell: Callable[..., None]) -> None:
    """Becomes the program, confined, which ends with its `supervisor`."""
    limits = spec["limits"]
    given = os.open(spec["stdin"], os.O_RDONLY)
    os.dup2(given, 0)
    os.close(given)
    if uid is not None and become(uid, spec["argv"][0]):
        held.append("user")
    end_with_parent(signal.SIGKILL, lambda: os.getppid() == supervisor)
    apart = uid == os.geteuid() or "namespaces" in held  # no process outside is of its user, or in its sight
    others = 0 if apart else tasks_of(os.getuid())
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, limits["files_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
    ):
        resource.setrlimit(kind, (most, most))
    if os.geteuid() != 0:  # whom no limit of processes holds
        held.append("processes")
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    scoped = False
    if landlock(spec["readable"]):
        held.append("files")
        scoped = landlock_version() >= SCOPING
    filtered = seccomp(signals=not (apart or scoped), limits=not apart)
    if filtered:
        held.append("network")
    if apart or filtered:
        held.append("signals")
    lacking = [name for name in spec["must_hold"] if name not in held]
    if lacking:
        tell(lacking=lacking)
        os._exit(1)
    tell()
    try:
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        raise OSError(error.errno, f"{spec['argv'][0]} cannot be run by the sandbox's user: {error.strerror}") from None


def become(uid: int, python: str) -> bool:
    """Whether root could become a user that owns nothing: one of its own, or nobody.

    A Python in root's own folder, as pyenv and uv put it there, would be out of that user's reach: the user then keeps
    the capability to read. What may be read is Landlock's to say, and without Landlock nothing is kept.
    """
    LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    for one in (uid, NOBODY):
        try:
            os.setgroups([])
            os.setresgid(one, one, one)
            os.setresuid(one, one, one)
        except OSError:
            continue
        reading = 0 if os.access(python, os.X_OK) or landlock_version() < 1 else kept_capabilities()
        if not capabilities(reading) and reading:
            capabilities(0)
        return True
    return False


def kept_capabilities() -> int:
    """Of the capabilities that this process may use, the one that reads what root alone may, as a set of bits."""
    with open("/proc/self/status", "rb") as file:
        permitted = next(int(line.split()[1], 16) for line in file if line.startswith(b"CapPrm"))
    return next((1 << one for one in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if permitted >> one & 1), 0)


def capabilities(which: int) -> bool:
    """Leaves this process, and the program that it becomes, these capabilities and no others."""
    header = struct.pack("=Ii", CAPABILITIES_VERSION, 0)
    if LIBC.capset(header, struct.pack("=6I", which, which, which, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    one = which.bit_length() - 1
    return not which or LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, one, 0, 0) == 0


def tasks_of(uid: int) -> int:
    """How many threads a user has: the limit of processes counts them all."""
    found = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return found


def landlock_version() -> int:
    """Landlock's version here; below 1 where there is none."""
    return int(LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def landlock(readable: list[str]) -> bool:
    """Whether files were shut off: writing but in this folder, reading but of the system's and of `readable`."""
    version = landlock_version()
    if version < 1:
        return False
    rights = RIGHTS[max(known for known in RIGHTS if known <= version)]
    network = 3 if version >= 4 else 0  # TCP: bind, connect
    scoped = 3 if version >= SCOPING else 0  # abstract sockets, signals
    fields = (rights, network, scoped)[: 3 if version >= SCOPING else 2 if version >= 4 else 1]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = LIBC.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    reading = READ_FILE | READ_DIR | EXECUTE
    for path, allowed in (
        (".", rights),
        *((path, reading) for path in (*SYSTEM, *readable)),
        *((path, READ_FILE | WRITE_FILE) for path in DEVICES),
    ):
        try:
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            allowed &= READ_FILE | WRITE_FILE | EXECUTE
        if LIBC.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, at), 0):
            raise OSError(ctypes.get_errno(), f"landlock, {path}")
        os.close(at)
    return bool(LIBC.syscall(LANDLOCK_RESTRICT, rules, 0) == 0)


def seccomp(*, signals: bool, limits: bool) -> bool:
    """Whether sockets, and what would lead around the other measures, were shut off; with `signals` also signals to
    other processes, and with `limits` their limits."""
    if platform.machine() not in DENIED:
        return False
    machine, denied = DENIED[platform.machine()]
    reaching = REACHING[platform.machine()]
    lines: list[Instruction] = [(LOAD, 0, 0, MACHINE_AT), (JUMP_EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL)]
    lines.append((LOAD, 0, 0, NUMBER_AT))
    if platform.machine() == "x86_64":
        lines += [(JUMP_AT_LEAST, 0, 1, X32_NUMBERS), REFUSED]
    for number in (*denied.values(), *((reaching["pidfd_send_signal"],) if signals else ())):
        lines += [(JUMP_EQUAL, 0, 1, number), REFUSED]
    if signals:
        for name in SENDING:  # to itself, as abort() does; 0 would be its group, which others are in
            lines += by_argument(reaching[name], 0, [os.getpid()], PERMITTED, REFUSED)
        lines += by_argument(reaching["fcntl"], 1, [F_SETOWN, F_SETOWN_EX], REFUSED, PERMITTED)
        lines += by_argument(reaching["ioctl"], 1, [FIOSETOWN, SIOCSPGRP], REFUSED, PERMITTED)
    if limits:
        lines += by_argument(reaching["prlimit64"], 0, [0, os.getpid()], PERMITTED, REFUSED)
    lines.append(PERMITTED)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = struct.pack("@HP", len(lines), ctypes.addressof(code))
    return bool(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def by_argument(
    number: int, argument: int, values: Sequence[int], where_one: Instruction, otherwise: Instruction
) -> list[Instruction]:
    """What to do about the call of this number, by one of its arguments, of 32 bits: whether it is one of `values`."""
    compared = [(JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    lines = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *compared, otherwise, where_one]
    return [(JUMP_EQUAL, 0, len(lines), number), *lines]


if __name__ == "__main__":
    main()
