"""How a set-up decides, and what it says. `tools/setup.py` runs before anything is installed, so it is no module."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.install.kit import CONSTRAINTS, ROOT, setup_script

from headrace.extras import EXTRAS

SCRIPT = ROOT / "tools" / "setup.py"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Packages that are imported by another name than their own.
MODULES = {"pillow": "PIL", "math-verify": "math_verify", "reasoning-gym": "reasoning_gym"}


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    return setup_script()


class Installer:
    """An installer that finds what it is told to, and remembers what it was asked for."""

    def __init__(self, *found: str) -> None:
        self.found = found
        self.asked: list[str] = []

    def tries(self, *what: str) -> bool:
        self.asked.append(" ".join(what))
        return self.asked[-1] in self.found

    uv_tries = tries


def test_an_older_python_is_told_so_in_one_sentence_before_anything_happens(tmp_path: Path) -> None:
    old = f"import runpy, sys; sys.version_info = (3, 8, 18); runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", old, "all"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Headrace needs Python 3.11 or newer, and {sys.executable} is 3.8.18. "
        "Name another: make setup PYTHON=python3.12\n"
    )
    assert [*tmp_path.iterdir()] == []


def test_an_older_python_can_read_that_far() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize(
    ("system", "gpu", "asked", "cpu"),
    [
        ("Linux", False, "auto", True),
        ("Linux", True, "auto", False),
        ("Linux", True, "cpu", True),
        ("Linux", False, "cuda", False),
        ("Darwin", False, "auto", False),  # what PyPI has there is a CPU build
    ],
)
def test_torch_is_its_cpu_build_where_no_gpu_is_found(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, gpu: bool, asked: str, cpu: bool
) -> None:
    monkeypatch.setattr(setup, "has_gpu", lambda: gpu)
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    assert setup.takes_cpu_build(asked) is cpu


def test_a_driver_without_a_gpu_is_none(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "Path", lambda path: tmp_path / Path(path).name)  # no /dev/nvidia0
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.has_gpu() is False
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'No devices found.'\n")
    driver.chmod(0o755)
    assert setup.has_gpu() is False
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    assert setup.has_gpu() is True


@pytest.mark.parametrize(
    ("path", "left"),
    [
        ("torch/nn/modules/linear.py", False),
        ("transformers/models/llama/modeling_llama.py", False),
        ("transformers/models/auto/tokenization_auto.py", False),
        ("transformers/models/bert/modeling_bert.py", True),
        ("ray/_private/worker.py", False),
        ("ray/rllib/algorithms/ppo.py", True),
        ("numpy/linalg/tests/test_linalg.py", True),
    ],
)
def test_what_our_commands_import_is_compiled_wherever_the_clone_lies(setup: ModuleType, path: str, left: bool) -> None:
    assert bool(re.search(setup.SELDOM, f"/home/me/tests/headrace/.venv/lib/python3.11/site-packages/{path}")) is left


def test_a_cpu_build_is_taken_from_where_pip_looks_or_from_pytorchs_own_index(setup: ModuleType) -> None:
    version = setup.pinned("torch")
    own, theirs = f"torch=={version}+cpu", f"--torch-backend cpu torch=={version}"
    for found, asked in ((own, [own]), (theirs, [own, theirs])):
        installer = Installer(found)
        setup.install_cpu_torch(installer)
        assert installer.asked == asked


def test_where_no_cpu_build_can_be_had_it_says_what_comes_instead_and_how_to_avoid_it(
    setup: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.install_cpu_torch(Installer())
    said = capsys.readouterr().out
    assert "3.9 GB" in said
    assert "PIP_FIND_LINKS=FOLDER make setup" in said


def test_pips_lines_become_few(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress()
    for line in (
        "Collecting fastapi>=0.160",
        "  Downloading fastapi-0.162.4-py3-none-any.whl.metadata (20 kB)",
        "Requirement already satisfied: torch==2.13.0 in ./lib",
        "Downloading fastapi-0.162.4-py3-none-any.whl (120 kB)",
        "Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl (72.5 MB)",
        "Installing collected packages: fastapi, ray",
        "Successfully installed fastapi-0.162.4 ray-2.60.0",
    ):
        progress.take(line)
    said = [re.sub(r"^ +\d+ s +", "", line) for line in capsys.readouterr().out.splitlines()]
    assert said == ["2 fetched,     73 MB  ray 2.60.0 (72 MB)", "2 fetched,     73 MB  unpacking 2 packages"]


def test_uvs_lines_become_few(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress()
    for line in (
        "Using Python 3.11.7 environment at: .venv",
        "Resolved 16 packages in 801ms",
        "Downloading pyarrow (52.5MiB)",
        "Downloading rich (900.0KiB)",
        " Downloaded pyarrow",
        "Prepared 16 packages in 11.25s",
        "Uninstalled 1 package in 55ms",
        "Installed 16 packages in 958ms",
        " - setuptools==65.5.0",
        " + torch==2.13.0+cpu",
    ):
        progress.take(line)
    said = [re.sub(r"^ +\d+ s +", "", line) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "fetching 16 packages",
        "1 fetched,     52 MB  pyarrow (52 MB)",
        "16 fetched,     53 MB  unpacking 16 packages",
    ]


def test_uv_looks_where_pip_is_told_to(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://files.test/all\nextra-index-url =\n  http://a.test/x\n  http://b.test/y\n"
        "trusted-host = files.test\n[install]\nfind-links = /wheels\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/others")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CERT", "/certs.pem")
    options, variables = setup.uv_settings(setup.pip_settings(sys.executable))
    assert options == [
        *("--system-certs", "--default-index", "http://files.test/all"),
        *("--index", "http://a.test/x", "--index", "http://b.test/y"),
        *("--find-links", "/others", "--allow-insecure-host", "files.test"),
        *("--index-strategy", "unsafe-best-match", "--no-cache"),
    ]
    assert variables == {"SSL_CERT_FILE": "/certs.pem"}
    assert setup.uv_settings({}) == (["--system-certs"], {})
    assert setup.uv_settings({"no-index": "True", "no-cache-dir": "off"}) == (["--system-certs", "--no-index"], {})


@pytest.mark.parametrize("held", [(), ("pyvenv.cfg", "left")], ids=["new", "in place of half a one"])
def test_an_environment_whose_making_is_interrupted_leaves_nothing(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[str, ...]
) -> None:
    venv = tmp_path / ".venv"
    for name in held:
        venv.mkdir(exist_ok=True)
        (venv / name).touch()

    def interrupted(command: list[str], **options: Any) -> None:
        assert command[-1] == str(venv)
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(sys.executable)
        raise KeyboardInterrupt

    monkeypatch.setattr(setup.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.make_venv(venv)
    assert not venv.exists()


def test_a_folder_that_was_no_environment_is_never_removed(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").touch()

    def failing(command: list[str], **options: Any) -> None:
        assert "--clear" not in command
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(setup.subprocess, "run", failing)
    with pytest.raises(subprocess.CalledProcessError):
        setup.make_venv(tmp_path)
    assert (tmp_path / "mine").exists()


def test_half_an_environment_is_made_again(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = Path(setup.asked(venv / "bin" / "python", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    made: list[Path] = []

    class Made(Exception):
        """As far as it should go."""

    def make(folder: Path) -> None:
        made.append(folder)
        raise Made

    def install() -> None:
        with pytest.raises(Made):
            setup.install("demo", venv, cpu=True)

    monkeypatch.setattr(setup, "make_venv", make)
    install()  # no pip
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").touch()
    install()  # the first of its files
    (packages / "pip-1.dist-info").mkdir()
    (packages / "pip-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pip\nVersion: 1\n")
    install()  # all but the list of them
    (packages / "pip-1.dist-info" / "RECORD").write_text("pip/__init__.py,,\n")
    assert setup.has_pip(venv / "bin" / "python")
    (venv / "bin" / "python").unlink()
    install()
    assert made == [venv] * 4


def test_an_installer_may_say_what_is_no_text(setup: ModuleType) -> None:
    says = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\nlast\\n'); sys.exit(3)"
    assert setup.run([sys.executable, "-c", says]) == (3, ["caf\N{REPLACEMENT CHARACTER}", "last"])


@pytest.mark.install
def test_what_uv_cannot_install_pip_does_and_says_why_if_it_cannot_either(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "uv"
    broken.write_text("#!/bin/sh\nexit 2\n")
    broken.chmod(0o755)
    installer = setup.Installer(Path(sys.executable), broken)
    assert not installer.uv_tries("pytest")
    installer.install("--no-index", "pytest")  # it is there
    assert installer.tries("--no-index", "pytest")
    with pytest.raises(subprocess.CalledProcessError):
        installer.install("--no-index", "no-such-package")
    assert "no-such-package" in capsys.readouterr().err


# -- what is declared --------------------------------------------------------------------------------------------------


def required(extra: str) -> set[str]:
    """The modules of an extra in pyproject.toml, with those of extras that it names; less what the core has."""
    core = {_package(line) for line in PYPROJECT["dependencies"]}
    found: set[str] = set()
    for line in PYPROJECT["optional-dependencies"][extra]:
        if line.startswith("headrace["):
            found |= {module for other in line[len("headrace[") : -1].split(",") for module in required(other)}
        elif _package(line) not in core:
            found.add(MODULES.get(_package(line), _package(line)))
    return found


def _package(line: str) -> str:
    return re.split(r"[^\w-]", line, maxsplit=1)[0].lower()


@pytest.mark.parametrize("extra", [extra for extra in PYPROJECT["optional-dependencies"] if extra != "dev"])
def test_headrace_knows_what_each_extra_brings(extra: str) -> None:
    assert required(extra) == set(EXTRAS[extra])


def test_a_set_up_installs_extras_that_are_there_and_none_that_is_built_from_source(setup: ModuleType) -> None:
    declared: dict[str, Any] = PYPROJECT["optional-dependencies"]
    for extras, _ in setup.SETS.values():
        assert {*extras.split(",")} <= {*declared} - {"gym"}


def test_every_constraint_is_an_exact_version() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert lines == sorted(lines, key=str.lower)
