"""Run by the Python of a clean environment: runs the command lines of `headrace` that come on its input, each a line of
JSON, in a process and an empty folder of their own. Of each it prints, as a line of JSON, the exit code, what it wrote,
and the files that it left.

The processes are forked from this one, which has imported all commands and what the slowest of them import later: that
would be most of what each takes.
"""

import importlib
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from headrace import cli

#: What `gateway`, `serve` and `env` import before they see that an extra is missing.
IMPORTED_LATER = ("headrace.gateway.process", "headrace.envs.cli")


def run(args: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as said, tempfile.TemporaryDirectory() as folder:
        out, err = Path(said, "out"), Path(said, "err")
        child = os.fork()
        if child == 0:
            os._exit(_become(args, folder, out, err))
        _, status = os.waitpid(child, 0)
        return {
            "code": os.waitstatus_to_exitcode(status),
            "out": out.read_text(),
            "err": err.read_text(),
            "left": os.listdir(folder),
        }


def _become(args: list[str], folder: str, out: Path, err: Path) -> int:
    """Is a command line of `headrace` in a folder, without input, writing to these files; its exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    try:
        cli.main(args)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
    return 1


if __name__ == "__main__":
    for module in pkgutil.walk_packages(cli.__path__, "headrace.cli."):
        importlib.import_module(module.name)
    for name in IMPORTED_LATER:
        with suppress(ImportError):  # it needs an extra
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
