"""The command line itself: help, wrong flags, wrong values, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from tests.cli.command import Command, spawn

from headrace.cli.pool.run import channel_spec, read_config
from headrace.commands import CommandModel, Usage, command, run
from headrace.version import __version__

POOL = ("serve", "start", "stop", "stats", "ls", "show", "export", "verify", "repair", "compact", "backup")


@pytest.mark.parametrize("command", [(), ("pool",), ("bench",), ("demo",), *(("pool", name) for name in POOL)])
def test_every_command_has_help(headrace: Command, command: tuple[str, ...]) -> None:
    done = headrace(*command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: {' '.join(('headrace', *command))} ")
    assert done.err == ""


def test_help_says_what_flags_mean_in_words(headrace: Command) -> None:
    said = headrace("pool", "serve", "--help").out
    assert "--journal PATH" in said
    assert "--durability {os,fsync}" in said
    assert "HEADRACE_POOL_KEY" in said
    assert "(default: 8200)" in said
    assert "None" not in said
    assert "list[str]" not in said


def test_the_version_is_the_package_s() -> None:
    done = spawn("--version")
    assert (done.code, done.out) == (0, f"headrace {__version__}\n")


def test_a_command_s_modules_are_imported_only_when_it_is_asked_for() -> None:
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from headrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "pool", "--help"], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "headrace.cli.pool" in loaded
    assert not [name for name in loaded if name.startswith(("headrace.pool", "headrace.gateway", "headrace.api"))]


@pytest.mark.parametrize("args", [(), ("pool",)])
def test_without_a_command_the_help_is_shown_as_an_error(headrace: Command, args: tuple[str, ...]) -> None:
    done = headrace(*args)
    assert done.code == 2
    assert done.out == ""
    assert "subcommands:" in done.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("pool", "stats", "x", "--jsn"), "unknown flag --jsn; did you mean --json?"),
        (("pool", "serve", "--prot", "1"), "unknown flag --prot; did you mean --port?"),
        (("pool", "serve", "--jurnal=x"), "unknown flag --jurnal; did you mean --journal?"),
        (("pool", "export", "x", "--too", "y.jsonl"), "unknown flag --too; did you mean --to?"),
        (("pool", "ls", "x", "--zzzzz"), "unknown flag --zzzzz (see headrace pool ls --help)"),
        (("pool", "stat", "x"), "no command 'stat'; did you mean stats?"),
        (("pol",), "no command 'pol'; did you mean pool?"),
        (("pool", "stats"), "the following arguments are required: TARGET"),
        (("pool", "export", "x"), "the following arguments are required: --to"),
        (("pool", "stats", "x", "y"), "unexpected argument 'y'"),
        (("pool", "serve", "--port", "many"), "--port: Input should be a valid integer"),
        (("pool", "serve", "--port", "70000"), "--port: Input should be less than or equal to 65535, not '70000'"),
        (("pool", "serve", "--durability", "hope"), "--durability: Input should be 'os' or 'fsync', not 'hope'"),
        (("pool", "serve", "--durability", "os"), "`os` and `fsync` need one"),
        (("pool", "ls", "x", "turtles"), "WHAT: Input should be 'groups', 'trajectories' or 'steps', not 'turtles'"),
        (("pool", "stats", "ftp://x"), "TARGET is 'ftp://x'; it is a journal's folder, http://HOST:PORT or ray-actor"),
        (("pool", "stats", ""), "TARGET is ''; it is a journal's folder, http://HOST:PORT or ray-actor"),
        (("pool", "verify", ""), "TARGET is ''; it is a journal's folder, http://HOST:PORT or ray-actor"),
        (("pool", "serve", "--journal", "", "--port", "-1"), "--journal is empty; name a path, or leave it out"),
        (("pool", "serve", "--config=", "--port", "-1"), "--config is empty; name a path, or leave it out"),
        (("pool", "serve", "--backups", "", "--port", "-1"), "--backups is empty; name a path, or leave it out"),
        (("pool", "backup", "x", "--to", ""), "--to is empty; name a path"),
        (("run", "run.yaml", "--run-dir", ""), "--run-dir is empty; name a path, or leave it out"),
        (("train", ""), "CONFIG is empty; name a path"),
        (("serve", "--backups", ""), "--backups: String should have at least 1 character"),
        (
            ("pool", "serve", "--max-body-mb", "inf", "--port", "-1"),
            "--max-body-mb: Input should be a finite number, not 'inf'",
        ),
        (
            ("pool", "serve", "--quota-mb", "1e400", "--port", "-1"),
            "--quota-mb: Input should be a finite number, not '1e400'",
        ),
        (("api", "--max-body-mb", "inf", "--port", "-1"), "--max-body-mb: Input should be a finite number, not 'inf'"),
        (("gateway", "--memory-mb", "inf"), "--memory-mb: Input should be a finite number, not 'inf'"),
        (
            ("simulate", "--set", "agents=[100,200]"),
            "--set agents: '[100' is no value; several are separated by commas",
        ),
        (("simulate", "--set", "agents=2026-13-45"), "--set agents: '2026-13-45' is no value"),
        (("simulate", "--set", "agents.x=3"), "with agents.x=3: agents is 256, which has no fields; set agents itself"),
        (
            ("simulate", "no.yaml", "--json", "missing/x.json"),
            "missing/x.json cannot be written: there is no folder missing",
        ),
        (("engine", "--model", "~nouser/m"), "'~nouser/m' names a home folder that is not known here; write it out"),
        (("pool", "stop", "http://127.0.0.1:1"), "A `headrace pool serve` ends with SIGTERM or Ctrl-C"),
        (("pool", "verify", "http://127.0.0.1:1"), "this command works on a journal's folder"),
        (("pool", "serve", "--channel", "train:n_rolouts=8"), "unknown channel option 'n_rolouts'; did you mean"),
        (("pool", "serve", "--channel", "train:n_rollouts=0"), "n_rollouts must be an integer of at least 1, not 0"),
        (("pool", "serve", "--channel", "train:fast"), "'fast' should be option=value"),
        (("pool", "serve", "--channel", ":n_rollouts=1"), "it begins with the channel's name"),
        (("bench", "nothing"), "no benchmark 'nothing'"),
        (("demo", "--steps", "0"), "--steps: Input should be greater than or equal to 1, not '0'"),
    ],
)
def test_bad_usage_is_one_line_that_says_what_would_be_right(
    headrace: Command, args: tuple[str, ...], said: str
) -> None:
    done = headrace(*args)
    assert done.code == 2
    assert done.out == ""
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("what", "flag", "value"),
    [("groups", "--tag", "x"), ("trajectories", "--trainable", None), ("steps", "--min-reward", "1")],
)
def test_a_filter_that_means_nothing_there_is_an_error(
    headrace: Command, journal: Path, what: str, flag: str, value: str | None
) -> None:
    done = headrace("pool", "ls", journal, what, flag, *([value] if value else []))
    assert done.code == 2
    assert f"{flag} does not filter {what}; these do: " in done.err


def test_underscores_in_flags_are_read_as_dashes(headrace: Command, journal: Path) -> None:
    done = headrace("pool", "ls", journal, "trajectories", "--min_reward=1", "--prompt_uid", "a")
    assert [row["trajectory_uid"] for row in done.rows] == ["a-1"]


class EnvSettings(BaseModel):
    group_size: int = 4


class ServeEnv(CommandModel):
    """Serves, with nested settings, as environments have them."""

    env: EnvSettings = EnvSettings()

    def execute(self) -> None:
        print(self.env.group_size)


serve_env_app = command("root", ServeEnv)


@pytest.mark.parametrize("flag", ["--env.group_size", "--env.group-size"])
def test_nested_settings_have_dotted_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(serve_env_app, [flag, "16"])
    assert capsys.readouterr().out == "16\n"
    with pytest.raises(Usage, match=r"^--env\.group-size: Input should be a valid integer"):
        run(serve_env_app, [flag, "many"])


def test_only_the_command_line_sets_flags(headrace: Command, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("pool", '{"stats": {"channel": "nowhere"}}')
    monkeypatch.setenv("channel", "nowhere")
    assert [row["channel"] for row in headrace("pool", "stats", journal).rows] == ["train", "eval"]


def test_a_failure_is_one_line_and_no_traceback() -> None:
    done = spawn("pool", "stats", "/nowhere/at/all")
    assert done.code == 1
    assert done.out == ""
    assert done.err == "headrace: no journal at /nowhere/at/all: there is no such folder\n"


def test_a_channel_s_options_may_hold_several_values_and_none() -> None:
    spec = "train:n_rollouts=8,overflow=reject,require-reward=true,group_timeout_s=none,replay_share=0.25"
    assert channel_spec(spec) == (
        "train",
        {
            "n_rollouts": 8,
            "overflow": "reject",
            "require_reward": True,
            "group_timeout_s": None,
            "replay_share": 0.25,
        },
    )
    assert channel_spec("eval") == ("eval", {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pool.yaml", "channels:\n  train:\n    n_rollouts: 8\ndefaults:\n  history_size: 4\n"),
        ("pool.json", '{"channels": {"train": {"n_rollouts": 8}}, "defaults": {"history_size": 4}}'),
    ],
)
def test_a_configuration_file_is_yaml_or_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_config(tmp_path / name) == {
        "channels": {"train": {"n_rollouts": 8}},
        "defaults": {"history_size": 4},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("channels: [", "pool.yaml cannot be read: "),
        ("- 1\n", "pool.yaml must hold a mapping"),
        ("channels: 1\n", "it may hold channels, defaults, limits, each an object"),
        ("chanels: {}\n", "unknown key 'chanels'; known: channels, defaults, limits"),
        ("channels:\n  train: 8\n", "channel 'train' must be an object of options"),
        ("channels:\n  train:\n    n_rolouts: 8\n", "unknown channel option 'n_rolouts'; did you mean 'n_rollouts'?"),
        ("defaults:\n  overflow: spill\n", "overflow is 'spill'; it must be one of drop_oldest, reject, block"),
        ("limits:\n  most: 1\n", "unknown limit 'most'"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_name(headrace: Command, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pool.yaml").write_text(text)
    done = headrace("pool", "serve", "--port", "0", "--config", tmp_path / "pool.yaml")
    assert done.code == 2
    assert said in done.err


def test_a_missing_configuration_file_is_named(headrace: Command, tmp_path: Path) -> None:
    done = headrace("pool", "serve", "--config", tmp_path / "none.yaml")
    assert done.code == 2
    assert done.err == f"headrace: {tmp_path / 'none.yaml'} cannot be read: No such file or directory\n"
