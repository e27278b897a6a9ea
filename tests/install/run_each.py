"""Run by the Python of a clean environment: the command lines of `headrace` that stand on its input, as JSON, each in a
process and an empty folder of its own. Prints, for each, its exit code, what it wrote, and the files that it left.

The processes are forked from this one, which has imported all commands: that would be most of what each takes.
"""

import importlib
import json
import os
import pkgutil
import sys
import tempfile
import traceback
from pathlib import Path

from headrace import cli


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
    """Is a command line of `headrace` in a folder, writing to these files; its exit code."""
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
    print(json.dumps([run(args) for args in json.load(sys.stdin)]))
