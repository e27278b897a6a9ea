"""Makes `.venv` and installs Headrace into it, editable: `make demo` and `make setup` call this.

Wheels only, at the versions of constraints.txt, so that no compiler is needed and nothing is built. Where no NVIDIA GPU
is found, torch is its CPU build: the one for CUDA brings some 4 GB of libraries that nothing would use. uv installs
them, from where pip is told to look and in a fifth of its time; what uv cannot, pip does.

An old Python is told so before anything is installed: it must be able to parse this file.
"""

import argparse
import ast
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
if sys.version_info < OLDEST:
    sys.exit(
        "Headrace needs Python {}.{} or newer, and {} is {}.{}.{}. Name another: make setup PYTHON=python3.12".format(
            *OLDEST, sys.executable, *sys.version_info[:3]
        )
    )

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

#: The extras of each set, and what it takes on disk with torch's CPU build, in GB, as measured.
SETS = {
    "demo": ("demo", 1.2),
    "all": ("demo,lora,ray,ray-train,export,envs,rewards,dev", 2.1),
}
#: Paths, as a regular expression, of the larger parts of libraries of which no command of ours imports much.
SELDOM = (
    r"site-packages/(.*/tests?/|transformers/models/(?!auto/|llama/|__init__)|ray/(rllib|data|serve|tune|train|llm)/|networkx/|pip/"
    r"|torch/(_inductor|testing|onnx)/|langsmith/|mypyc?/)"
)
#: What torch for CUDA takes beyond its CPU build, in GB.
CUDA_GB = 3.9

#: A driver that does not answer within so many seconds is as good as none.
GPU_ANSWER_S = 10
#: As installers abbreviate sizes.
MB_BY_UNIT = {"": 1e-6, "k": 1e-3, "m": 1.0, "g": 1e3}
#: Downloads from this size on get a line of their own where output is no terminal, in MB.
LARGE_MB = 20.0
#: Without a terminal, a word this often, in seconds, tells that it still goes on.
PATIENCE_S = 30.0


def main() -> None:
    arguments = argparse.ArgumentParser(description="Make a virtual environment and install Headrace into it.")
    arguments.add_argument("set", choices=SETS, help="what is installed")
    arguments.add_argument("--venv", type=Path, default=Path(".venv"), help="the environment's folder")
    arguments.add_argument(
        "--torch",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="torch's build (auto: cpu where no GPU is found)",
    )
    given = arguments.parse_args()
    try:
        install(given.set, given.venv, cpu=takes_cpu_build(given.torch))
    except subprocess.CalledProcessError as error:
        sys.exit(f"\nsetup: {' '.join(map(str, error.cmd[:5]))} … ended with code {error.returncode}: see above")
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; what is there is kept, and the next `make` goes on")
    took = f"{disk_gb(given.venv):.1f} GB, {time.monotonic() - BEGAN:.0f} s"
    print(
        f"Headrace is installed in {given.venv} ({took}). To use it in this shell:\n\n  . {given.venv}/bin/activate\n"
    )


def install(name: str, venv: Path, *, cpu: bool) -> None:
    """Installs one of `SETS` into `venv`, which is made where it is not there, or only half."""
    extras, size = SETS[name]
    if sys.version_info[:2] > NEWEST:
        print(f"setup: Python {platform.python_version()} is newer than {dotted(NEWEST)}, the newest that is tried")
    python = venv / "bin" / "python"
    if not has_pip(python):
        make_venv(venv)
    elif version_of(python) < OLDEST:
        sys.exit(
            f"setup: {venv} has Python {dotted(version_of(python))}, older than {dotted(OLDEST)}: make clean, and again"
        )
    build = "its CPU build" if cpu else "with CUDA"
    size += 0 if cpu or not on_linux() else CUDA_GB
    print(f"Headrace[{extras}] for Python {dotted(version_of(python))} into {venv}: about {size:.1f} GB, torch {build}")
    with tempfile.TemporaryDirectory() as folder:
        installer = Installer(python, fetch_uv(python, Path(folder)))
        # The build backend comes first and is used without isolation, so that its version is a pinned one too.
        installer.install("hatchling")
        if cpu and torch_of(python) is None:
            install_cpu_torch(installer)
        installer.install("--no-build-isolation", "--editable", f"{ROOT}[{extras}]")
    compile_all(python)
    print(f"Done. To have `headrace` on the path of a shell: . {venv}/bin/activate (or type {venv}/bin/headrace)")


def compile_all(python: Path) -> None:
    """Compiles what was installed, on all cores: pip would take one, and the first start should not have to. What is in
    `SELDOM` is left to whoever imports it first."""
    packages = asked(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    print(f"  {time.monotonic() - BEGAN:4.0f} s  compiling", flush=True)
    # Files that no Python of today reads, such as templates and tests of other versions, are no failure.
    subprocess.run([str(python), "-m", "compileall", "-q", "-j", "0", "-x", SELDOM, packages], capture_output=True)


def make_venv(venv: Path) -> None:
    """Makes an empty environment, in place of one that is there; where that fails or is interrupted, nothing is left of
    it. A folder that was there and no environment keeps what it holds."""
    there, replaced = venv.exists(), (venv / "pyvenv.cfg").exists()
    try:
        subprocess.run([sys.executable, "-m", "venv", *(["--clear"] if replaced else []), str(venv)], check=True)
    except BaseException:
        if replaced or not there:
            shutil.rmtree(venv, ignore_errors=True)
        raise


# -- torch -------------------------------------------------------------------------------------------------------------


def takes_cpu_build(asked: str) -> bool:
    """Whether torch's CPU build is to be found: elsewhere than on Linux, what PyPI has is one."""
    if asked != "auto":
        return asked == "cpu" and on_linux()
    return on_linux() and not has_gpu()


def on_linux() -> bool:
    return platform.system() == "Linux"


def has_gpu() -> bool:
    """Whether NVIDIA's driver tells of a GPU: it may be installed where there is none."""
    if Path("/dev/nvidia0").exists():
        return True
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=GPU_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "GPU 0" in asked.stdout


def install_cpu_torch(installer: "Installer") -> None:
    """torch's CPU build, from where pip looks, or from PyTorch's own index, which uv knows. Without it, a warning."""
    version = pinned("torch")
    if installer.tries(f"torch=={version}+cpu") or installer.uv_tries("--torch-backend", "cpu", f"torch=={version}"):
        return
    print(
        f"setup: torch's CPU build could not be fetched, so what follows brings CUDA's libraries, {CUDA_GB} GB that\n"
        f"  nothing here would use. To do without them: stop this (Ctrl-C), put a wheel of torch {version}+cpu for\n"
        "  this Python into a folder, and run: PIP_FIND_LINKS=FOLDER make setup"
    )


def pinned(name: str) -> str:
    """The version of a package in constraints.txt."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"setup: {CONSTRAINTS} has no pin for {name}")
    return found[1]


# -- what is there -----------------------------------------------------------------------------------------------------


def version_of(python: Path) -> tuple[int, int]:
    major, minor = asked(python, "import sys; print(*sys.version_info[:2])").split()
    return int(major), int(minor)


def has_pip(python: Path) -> bool:
    """Whether an environment's Python runs and has the whole of pip, which is installed into it last, its list of files
    at the very end."""
    code = "import pip, sys; from importlib.metadata import files; sys.exit(files('pip') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def torch_of(python: Path) -> str | None:
    """The version of torch that is installed, 2.13.0+cpu; None where there is none."""
    return (
        asked(python, "from importlib.metadata import *; print(*[d.version for d in distributions(name='torch')])")
        or None
    )


def asked(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def disk_gb(folder: Path) -> float:
    """What a folder takes on disk, each file once."""
    seen: dict[int, int] = {}
    for path, _, files in os.walk(folder):
        for name in files:
            found = os.lstat(os.path.join(path, name))
            seen[found.st_ino] = found.st_blocks * 512
    return sum(seen.values()) / 1e9


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# -- installing --------------------------------------------------------------------------------------------------------

#: What both installers are told: wheels at pinned versions only.
WHEELS = ("--only-binary", ":all:", "--constraint", str(CONSTRAINTS))


class Installer:
    """Installs into one environment, by uv where there is one, else by pip. Their many lines become few."""

    def __init__(self, python: Path, uv: Path | None) -> None:
        self._pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        self._pip += ["--no-compile", *WHEELS]
        self._uv = None if uv is None else [str(uv), "pip", "install", "--python", str(python), *WHEELS]
        self._as_pip, self._variables = uv_settings(pip_settings(python))

    def install(self, *what: str) -> None:
        """Installs `what`; where neither can, says what pip had to say, and raises `CalledProcessError`."""
        if self.uv_tries(*what):
            return
        code, said = run([*self._pip, *what])
        if code:
            print("\n".join(said), file=sys.stderr)
            raise subprocess.CalledProcessError(code, [*self._pip, *what])

    def tries(self, *what: str) -> bool:
        """Installs `what`. False where neither can, about which nothing is said."""
        return self.uv_tries(*what) or run([*self._pip, *what])[0] == 0

    def uv_tries(self, *what: str) -> bool:
        """Installs `what` by uv. False where it cannot, or is not here."""
        return self._uv is not None and run([*self._uv, *self._as_pip, *what], self._variables)[0] == 0


def fetch_uv(python: Path, folder: Path) -> Path | None:
    """uv at its pinned version, fetched by an environment's pip into a folder; None where it cannot be had."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *WHEELS]
    fetched = subprocess.run([*command, "--target", str(folder), f"uv=={pinned('uv')}"], capture_output=True)
    return folder / "bin" / "uv" if fetched.returncode == 0 else None


def pip_settings(python: Path) -> dict[str, str]:
    """What pip's files and variables tell it, by option: of one that both name, the variable's."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
    found = re.findall(r"^(:env:|global|install)\.([\w-]+)=(.*)$", listed.stdout, re.MULTILINE)
    return {name: ast.literal_eval(value) for _, name, value in sorted(found, key=lambda one: one[0] == ":env:")}


def uv_settings(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The same for uv, which does not read pip's settings: options and variables."""
    options = ["--system-certs"]
    for name, option in (
        ("index-url", "--default-index"),
        ("extra-index-url", "--index"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        options += [part for value in settings.get(name, "").split() for part in (option, value)]
    if "extra-index-url" in settings:
        options += ["--index-strategy", "unsafe-best-match"]  # as pip: the best version, whichever index has it
    for name, option in (("no-index", "--no-index"), ("no-cache-dir", "--no-cache")):
        options += [option] if settings.get(name, "").lower() in YES else []
    variables = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    variables |= {"ALL_PROXY": settings["proxy"]} if "proxy" in settings else {}
    return options, variables


#: How pip's settings say so.
YES = ("1", "true", "yes", "on")


def run(command: list[str], variables: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Runs an installer, telling how far it is; its exit code, and what it said but for what was there before."""
    running = subprocess.Popen(
        command,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(running, lines), daemon=True).start()
    progress, said = Progress(), []
    while True:
        try:
            line = lines.get(timeout=1)
        except queue.Empty:
            progress.show()
            continue
        if line is None:
            break
        said.append(line)
        progress.take(line)
    progress.end()
    return running.wait(), [line for line in said if not line.startswith("Requirement already satisfied")]


def _read(running: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert running.stdout is not None
    try:
        for line in running.stdout:
            lines.put(line.rstrip())
    finally:
        lines.put(None)


class Progress:
    """What an installer is at: one line that is written again and again on a terminal, elsewhere one for what takes
    long."""

    #: "Downloading x-1.0-py3-none-any.whl (12.3 MB)", or "Using cached …", as pip says it, but for metadata; or
    #: "Downloading x (12.3MiB)", as uv does of what is large.
    FETCHED = re.compile(
        r"\s*(?:Downloading|Using cached) (?!\S+\.metadata )"
        r"([^\s/]+?)(?:-([^\s/-]+)-\S+\.whl)? \(([\d.]+) ?([kKMG]?)i?B\)$"
    )
    #: What uv says when it knows the packages, and when all are fetched.
    COUNTED = re.compile(r"(Resolved|Prepared) (\d+) packages?")

    def __init__(self) -> None:
        self.told = time.monotonic()
        self.packages = 0
        self.mb = 0.0
        self.doing = "resolving"

    def take(self, line: str) -> None:
        fetched, counted = self.FETCHED.match(line), self.COUNTED.match(line)
        if fetched:
            name, version, size, unit = fetched.groups()
            mb = float(size) * MB_BY_UNIT[unit.lower()]
            self.packages += 1
            self.mb += mb
            what = f"{name} {version}" if version else name
            self.doing = f"{what} ({mb:.0f} MB)" if mb >= 1 else what
            self.show(now=mb >= LARGE_MB)
        elif counted:
            if counted[1] == "Prepared":
                self.packages = int(counted[2])
            self.doing = f"{'fetching' if counted[1] == 'Resolved' else 'unpacking'} {counted[2]} packages"
            self.show(now=True)
        elif line.startswith("Collecting "):
            self.doing = f"resolving {line.split()[1]}"
        elif line.startswith("Processing "):
            self.doing = Path(line.split()[1]).name
        elif line.startswith("Installing collected packages"):
            self.doing = f"unpacking {line.count(',') + 1} packages"
            self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Writes where it is: on a terminal always, elsewhere where `now` or after long silence."""
        clock = time.monotonic()
        fetched = f"{self.packages:3} fetched, {self.mb:6.0f} MB  " if self.packages else ""
        line = f"  {clock - BEGAN:4.0f} s  {fetched}{self.doing}"
        if sys.stdout.isatty():
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif now or clock - self.told > PATIENCE_S:
            print(line, flush=True)
            self.told = clock

    def end(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="", flush=True)


if __name__ == "__main__":
    main()
