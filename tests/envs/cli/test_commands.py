"""An environment's file as a command: what it prints, writes and exits with."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import Field
from tests.envs.api import Api
from tests.envs.cli import word_env
from tests.envs.cli.word_env import WordEnv

from headrace.envs import BaseEnvConfig
from headrace.envs.cli import EnvSubcommand, main
from headrace.envs.subcommands import CommandOptions

FILE = Path(word_env.__file__)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FILE, *args], cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Processes of a test, which do not outlive it."""
    begun: list[asyncio.subprocess.Process] = []
    yield begun
    for process in begun:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_help_shows_the_commands_and_each_flag_with_this_environments_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(WordEnv, ["--help"], prog="words")
    top = capsys.readouterr().out
    assert "Say a word." in top
    assert all(f"\n  {name} " in top for name in ("serve", "process", "evaluate"))
    with pytest.raises(SystemExit, match="0"):
        main(WordEnv, ["process", "--help"], prog="words")
    said = " ".join(capsys.readouterr().out.split())
    assert "--env.group_size N rollouts of one item, scored together (default: 2)" in said
    assert "--env.words YAML what may be said (default: ['yes', 'no'])" in said
    assert "(default: data/words.jsonl)" in said
    assert "secret" not in said
    assert said.index("--env.words") < said.index("--env.group_size")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["process", "--env.grup_size", "3"], "unknown flag --env.grup_size; did you mean --env.group_size?"),
        (["process", "--group_size", "3"], "unknown flag --group_size; did you mean --env.group_size?"),
        (["process", "--env.group_size", "x"], "--env.group_size: Input should be a valid integer"),
        (["proces"], "no command 'proces'; did you mean process?"),
        (["serve", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["serve", "--port", "1", "--env.rollout_server_url", "http://a"], "--port is short for --env.rollout_server"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(WordEnv, args, prog="words")
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


class LoudOptions(CommandOptions):
    suffix: str = Field("", description="what is said at the end")


class Louder(WordEnv):
    @classmethod
    def get_cli_process_config_cls(cls) -> type[EnvSubcommand]:
        class Loud(super().get_cli_process_config_cls()):  # type: ignore[misc]
            options_cls = LoudOptions

            @classmethod
            def changes(cls, config: BaseEnvConfig) -> dict[str, object]:
                return {**super().changes(config), "total_steps": 3}

            def run(self) -> None:
                print(f"{self.settings.env.total_steps} GROUPS{self.options.suffix}")

        return Loud


def test_an_environment_can_change_a_commands_defaults_its_flags_and_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(Louder, ["process", "--suffix", "!"], prog="words")
    assert capsys.readouterr().out == "3 GROUPS!\n"


def test_importing_an_environment_does_not_load_the_library_of_command_lines() -> None:
    code = "import sys, headrace.envs; sys.exit('cyclopts' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_process_writes_groups_a_page_and_metrics(tmp_path: Path) -> None:
    done = run(tmp_path, "process", "--env.total_steps", "6", "--env.words", "[right, wrong]")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 groups in data/words.jsonl, to be read in data/words.html\n"
    assert "words: 6 of 6 groups, score 0.500" in done.stderr
    groups = [json.loads(line) for line in (tmp_path / "data/words.jsonl").read_text().splitlines()]
    assert sorted(group["tokens"][0][-1] for group in groups) == [1, 2, 3, 4, 5, 6]
    assert "right" in (tmp_path / "data/words.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "data/words.metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[-1]["train/groups"] == 6
    assert rows[0]["train/rollouts"]["columns"] == ["text", "score"]


def test_evaluate_writes_metrics_and_samples(tmp_path: Path) -> None:
    done = run(tmp_path, "evaluate", "--env.data_dir_to_save_evals", "found")
    assert done.returncode == 0, done.stderr
    assert "words_eval" in done.stdout
    assert "eval/right 0.75" in done.stdout
    found = json.loads((tmp_path / "found/metrics.json").read_text())
    assert found["results"]["all"] == {"eval/right": 0.75}
    general = found["config_general"]
    assert general["model_name"] == "small"
    assert general["generation_parameters"] == {"max_new_tokens": 2048, "temperature": 0.5}
    samples = [json.loads(line) for line in (tmp_path / "found/samples.jsonl").read_text().splitlines()]
    assert samples == [{"word": "yes", "score": 1.0}, {"word": "no", "score": 1.0}]


async def test_serve_works_for_a_trainer_and_ctrl_c_ends_it_with_everything_sent(
    tmp_path: Path, api: Api, served: list[asyncio.subprocess.Process]
) -> None:
    args = ["serve", "--env.rollout_server_url", api.address, "--env.most", "5"]
    with (tmp_path / "said").open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            sys.executable, FILE, *args, cwd=tmp_path, stdout=said, stderr=said
        )
    served.append(process)
    await api.until(lambda: len(api.received) == 5)
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0, (tmp_path / "said").read_text()
    assert api.environments[0]["desired_name"] == "words"
    assert api.left == [0]
    assert "words: 0 of 1000 steps, score 0.500, groups 5" in (tmp_path / "said").read_text()
