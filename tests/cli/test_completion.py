"""`headrace --install-completion`: what the shells are told, and what bash makes of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cli.command import Command

#: Calls the function that the script registered for `headrace`, as bash does when TAB is pressed after these words.
PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
registered=$(complete -p headrace)
function=${registered#*-F }
"${function%% *}" headrace "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a shell's own files are: nothing else may be written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_every_command_and_flag(headrace: Command, home: Path, shell: str) -> None:
    script = home / f"completions.{shell}"
    done = headrace("--install-completion", "--shell", shell, "--output", script)
    assert done.code == 0, done.err
    assert str(script) in done.out
    told = script.read_text()
    assert all(
        word in told for word in ("check-gateway", "check-model", "verify", "durability", "fsync", "vllm-addresses")
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("p",), {"pool"}),
        (("pool", "st"), {"start", "stop", "stats"}),
        (("pool", "serve", "--du"), {"--durability"}),
        (("pool", "serve", "--durability", ""), {"os", "fsync"}),
        (("pool", "ls", "x", ""), {"groups", "trajectories", "steps"}),
        (("env", "my_en"), {"my_env.py"}),
        (("env", "my_env.py", ""), {"serve", "process", "evaluate", "probe", "check"}),
        (("env", "my_env.py", "process", "--config", "my_r"), {"my_run.yaml"}),
    ],
)
def test_bash_completes_words(headrace: Command, home: Path, words: tuple[str, ...], completed: set[str]) -> None:
    script = home / "headrace"
    assert headrace("--install-completion", "--shell", "bash", "--output", script).code == 0
    for name in ("my_env.py", "my_run.yaml"):
        (home / name).touch()
    asked = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(script), "headrace", *words]
    done = subprocess.run(asked, cwd=home, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == completed


def test_without_an_output_it_is_installed_for_the_user(headrace: Command, home: Path) -> None:
    done = headrace("--install-completion", "--shell", "bash")
    assert done.code == 0, done.err
    script = home / ".local" / "share" / "bash-completion" / "completions" / "headrace"
    assert script.is_file()
    assert str(script) in (home / ".bashrc").read_text()
