"""What an environment runs with: flags, then the file, then config_init; what cannot be is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.envs.cli.word_env import WordConfig, WordEnv

from headrace.data.errors import InvalidInput
from headrace.envs import BaseEnvConfig, EvalHandlingEnum
from headrace.envs.cli import parse_command
from headrace.envs.server import APIServerConfig, ServerBaseline
from headrace.envs.settings import EnvSettings, Servers

Ask = Callable[..., EnvSettings]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """The settings that a command line of an environment comes to, with a file of this text."""

    def asked(*args: str, file: str | None = None, env: type[WordEnv] = WordEnv, name: str = "serve") -> EnvSettings:
        given = [name, *args]
        if file is not None:
            (tmp_path / "run.yaml").write_text(file)
            given += ["--config", str(tmp_path / "run.yaml")]
        return parse_command(env, given, "python word_env.py", {}).settings

    return asked


def server(found: EnvSettings) -> APIServerConfig:
    assert isinstance(found.servers, Sequence)
    (only,) = found.servers
    return only


def test_without_flags_config_init_holds(ask: Ask) -> None:
    found = ask()
    assert (found.env.group_size, found.env.total_steps, found.slurm, found.testing) == (2, 1000, False, False)
    assert server(found).model_name == "small"


def test_the_file_goes_before_config_init_and_flags_before_the_file(ask: Ask) -> None:
    file = "env: {group_size: 3, total_steps: 7}\nopenai: {model_name: filed, timeout: 5}\nslurm: true\n"
    found = ask("--env.group_size", "4", "--openai.timeout=6", "--slurm", "false", file=file)
    assert (found.env.group_size, found.env.total_steps, found.env.max_num_workers) == (4, 7, 4)
    only = server(found)
    assert (only.model_name, only.timeout, only.base_url) == ("filed", 6, "http://127.0.0.1:9/v1")
    assert found.slurm is False


def test_flags_are_read_as_the_fields_types(ask: Ask) -> None:
    found = ask(
        *("--env.words", "[a, b]", "--env.prompt", "[not a list]", "--env.most", "None", "--env.use-wandb"),
        *("--env.eval_handling", "LIMIT_TRAIN", "--env.batch_size", "-1", "--env.min_batch_allocation", "0.5"),
    )
    assert isinstance(found.env, WordConfig)
    assert (found.env.words, found.env.prompt, found.env.most) == (["a", "b"], "[not a list]", None)
    assert found.env.use_wandb is True
    assert found.env.eval_handling is EvalHandlingEnum.LIMIT_TRAIN
    assert found.env.min_batch_allocation == 0.5


@pytest.mark.parametrize(
    ("given", "slurm"), [(["--slurm"], True), (["--slurm", "false"], False), (["--slurm=no"], False)]
)
def test_a_flag_of_a_boolean_takes_a_value_or_none(ask: Ask, given: list[str], slurm: bool) -> None:
    found = ask(*given, "--env.use_wandb", "--testing", "true")
    assert (found.slurm, found.env.use_wandb, found.testing) == (slurm, True, True)


def test_keys_of_a_file_that_are_like_none_are_warned_of_and_change_nothing(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    file = "env: {group_size: 3, zzz_qqq: 1}\nopenai: {model_name: filed, xyzzy: 2}\nplugh: {}\n"
    found = ask(file=file)
    assert (found.env.group_size, server(found).model_name) == (3, "filed")
    warned = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[2] for line in warned] == [
        f"{name} is not known, and changes nothing" for name in ("plugh", "env.zzz_qqq", "openai.xyzzy")
    ]


def test_a_port_is_short_for_the_apis_address(ask: Ask) -> None:
    assert ask("--port", "8123").env.rollout_server_url == "http://localhost:8123"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    depth: int = 1
    weights: dict[str, float] = {}


class NestedConfig(WordConfig):
    inner: Inner = Inner(depth=2, weights={"a": 1.0})
    mode: Literal["slow", "fast"] | None = None
    named: int = Field(1, alias="called")


class NestedEnv(WordEnv):
    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return NestedConfig(called=5), ServerBaseline(timeout=3)


def test_a_model_inside_the_configuration_has_flags_of_its_own(ask: Ask) -> None:
    flags = ("--env.inner.weights", "{b: 2}", "--env.mode", "fast")
    found = ask(*flags, file="env: {inner: {depth: 9}}\n", env=NestedEnv).env
    assert isinstance(found, NestedConfig)
    assert found.inner == Inner(depth=9, weights={"a": 1.0, "b": 2.0})
    assert (found.mode, found.named) == ("fast", 5)


def test_what_is_wrong_inside_it_is_named_where_it_was_said(ask: Ask) -> None:
    with pytest.raises(InvalidInput, match=r"run\.yaml: env\.inner\.depth: .*, not 'deep'"):
        ask("--env.inner.weights", "{b: 2}", file="env: {inner: {depth: deep}}\n", env=NestedEnv)
    with pytest.raises(InvalidInput, match=r"--env\.inner\.depth: .*, not 'deep'"):
        ask("--env.inner.depth", "deep", file="env: {inner: {weights: {b: 2}}}\n", env=NestedEnv)


def test_a_baseline_becomes_a_server_once_something_is_said_of_it(ask: Ask) -> None:
    assert ask(env=NestedEnv).servers == ServerBaseline(timeout=3)
    only = server(ask("--openai.base_url", "http://a/v1", env=NestedEnv))
    assert (only.base_url, only.timeout) == ("http://a/v1", 3)


class TwoServers(WordEnv):
    @classmethod
    def config_init(cls) -> tuple[WordConfig, Any]:
        return WordConfig(), [APIServerConfig(base_url="http://a/v1"), APIServerConfig(base_url="http://b/v1")]


def addresses(servers: Servers) -> list[str | None]:
    assert isinstance(servers, Sequence)
    return [one.base_url for one in servers]


def test_servers_of_the_file_stand_in_place_of_those_of_config_init(ask: Ask) -> None:
    assert addresses(ask(env=TwoServers).servers) == ["http://a/v1", "http://b/v1"]
    assert addresses(ask(file="openai: {base_url: http://c/v1}\n", env=TwoServers).servers) == ["http://c/v1"]
    several = "openai:\n- {base_url: http://c/v1}\n- {base_url: http://d/v1}\n"
    assert addresses(ask(file=several).servers) == ["http://c/v1", "http://d/v1"]


@pytest.mark.parametrize(
    ("args", "file", "said"),
    [
        (["--env.group_size", "many"], None, r"^--env\.group_size: .*integer.*, not 'many'$"),
        (["--env.group_size", "0"], None, r"^--env\.group_size: .*greater than or equal to 1, not '0'$"),
        (["--env.words", "{"], None, r"--env\.words '\{' is no list or mapping"),
        (["--openai.server_type", "vlm"], None, r"--openai\.server_type: .*'vllm'.*, not 'vlm'"),
        ([], "env: {grup_size: 1}\n", r"run\.yaml: env\.grup_size is not known; did you mean group_size\?"),
        ([], "openai: {base_ulr: x}\n", r"run\.yaml: openai\.base_ulr is not known; did you mean base_url\?"),
        ([], "openai: [{timeout: 1}, {tmeout: 2}]\n", r"run\.yaml: openai\.1\.tmeout is not known; .* timeout\?"),
        ([], "opnai: {}\n", r"run\.yaml: opnai is not known; did you mean openai\?"),
        ([], "env: {group_size: many}\n", r"run\.yaml: env\.group_size: .*, not 'many'"),
        (["--env.words", "[a]"], "env: {most: few}\n", r"run\.yaml: env\.most: .*, not 'few'"),
        ([], "slurm: perhaps\n", r"run\.yaml: slurm: .*boolean.*, not 'perhaps'"),
        ([], "env: [1]\n", r"run\.yaml: env must be a mapping"),
        ([], "env: {words: [a]}\nenv: {}\n", r"'env' stands twice"),
        (["--openai.timeout", "1"], "openai: [{}, {}]\n", r"--openai\.timeout is for one server"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_it_was_given(
    ask: Ask, args: list[str], file: str | None, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        ask(*args, file=file)


class Lenient(BaseEnvConfig):
    model_config = ConfigDict(extra="ignore")


class LenientEnv(WordEnv):
    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return Lenient(), []


def test_a_key_is_refused_even_where_the_authors_model_would_ignore_it(ask: Ask) -> None:
    with pytest.raises(InvalidInput, match=r"env\.grup_size is not known; did you mean group_size\?"):
        ask(file="env: {grup_size: 1}\n", env=LenientEnv)


def test_process_and_evaluate_have_defaults_of_their_own_that_flags_go_before(ask: Ask) -> None:
    found = ask("--env.include_messages", "false", name="process").env
    assert (found.data_path_to_save_groups, found.ensure_scores_are_not_same) == ("data/words.jsonl", False)
    assert (found.include_messages, found.wandb_name) == (False, "words")
    assert ask(name="evaluate").env.data_dir_to_save_evals == "data/words-evaluation"
    assert ask("--env.data_dir_to_save_evals", "there", name="evaluate").env.data_dir_to_save_evals == "there"
