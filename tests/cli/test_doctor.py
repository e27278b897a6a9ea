"""`headrace doctor`, and how a command says what it lacks."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from tests.cli.command import Command

from headrace.cli.doctor import examine, find_gpus, ray_token
from headrace.extras import install_command

ROOT = Path(__file__).parents[2]


def test_it_tells_what_the_machine_has(headrace: Command) -> None:
    done = headrace("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert found["executable"] == sys.executable
    assert {port["port"]: port["used_by"] for port in found["ports"]} == {
        8000: "api",
        8001: "engine",
        8100: "gateway, serve and replay",
        8200: "pool serve",
        8300: "dashboard",
    }
    assert all(command["missing"] == [] for command in found["commands"])
    assert found["broken"] == []
    assert found["disks"][0]["free_gb"] > 0


def test_people_get_tables(headrace: Command) -> None:
    done = headrace("doctor")
    assert done.code == 0
    assert "commands have all that they need" in done.out
    assert "headrace bench trainer" in done.out


def test_it_names_what_commands_lack_and_the_command_that_installs_it(
    headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = headrace("doctor", "--json")
    assert done.code == 0  # others work
    found = {command["name"]: command for command in json.loads(done.out)["commands"]}
    assert found["pool start"] == {"name": "pool start", "missing": ["ray"], "install": install_command("ray")}
    assert found["engine"]["missing"] == []


def test_what_every_command_needs_and_is_not_there_is_broken(
    headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.cli.doctor.requires", lambda name: ["no-such-library>=1", 'torch; extra == "train"'])
    done = headrace("doctor")
    assert done.code == 1
    assert "broken: no-such-library is not installed" in done.out


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        report = examine({taken: "api"}, ["api"])
    assert [port.free for port in report.ports] == [False]
    assert f"port {taken} is taken: headrace api needs another there (--port)" in report.warnings


def test_gpus_are_those_that_the_driver_tells_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 570.1'\necho 'NVIDIA GB10, [N/A], 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (gpu, shared) = find_gpus()
    assert (gpu.name, round(gpu.memory_gb or 0), gpu.driver) == ("NVIDIA H200", 151, "570.1")
    assert shared.memory_gb is None  # its memory is the machine's
    program.write_text("#!/bin/sh\nexit 9\n")
    assert find_gpus() == []


def test_rays_token_is_looked_for_where_ray_does(tmp_path: Path) -> None:
    assert ray_token({}, tmp_path).startswith("none")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert ray_token({}, tmp_path) == f"in {tmp_path / '.ray' / 'auth_token'}"
    assert ray_token({"RAY_AUTH_TOKEN": "secret"}, tmp_path) == "in RAY_AUTH_TOKEN"
    assert ray_token({"RAY_AUTH_MODE": "disabled"}, tmp_path).startswith("off")


@pytest.mark.parametrize("lacking", ["torch", "renderers"])
def test_the_demo_says_what_it_lacks_before_it_starts_anything(
    headrace: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, lacking, None)
    done = headrace("demo")
    assert done.code == 1
    assert done.err == f"headrace: this needs {lacking}: {install_command('demo')}\n"
    assert [*tmp_path.iterdir()] == []


def test_in_a_clone_an_extra_is_installed_from_the_clone() -> None:
    assert f"install --editable '{ROOT}[ray]'" in install_command("ray")
    assert f"'{ROOT}[ray,tokens]'" in install_command("ray", "tokens")
