"""Files written for atroposlib 0.4.0, run as they are."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.atropos.clients import Trainer
from tests.atropos.ours import ours as serving_api
from tests.compat.kit import FILES, Group, flags, groups_in, ordered, original
from tests.envs.api import Api

from headrace.cli import main

pytestmark = pytest.mark.system

HEADRACE = [sys.executable, "-m", "headrace", "env", str(FILES / "backlog.py")]
Models = Callable[[], AbstractContextManager[str]]
PROCESSED = {
    "group_at_once": [],
    "single": [],
    "stepwise": [],
    "images": [],
    "managed": ["--openai.server_type", "vllm"],
    "rewards": [],
}
#: Each way that a file has of making groups; what more there is to a rollout is of the long tier.
KINDS = [
    pytest.param(name, marks=[] if name in ("group_at_once", "managed", "rewards") else [pytest.mark.long])
    for name in PROCESSED
]
#: What rollouts carried and atroposlib does not put into their group.
LOST = ("inference_logprobs", "generation_params", "distill_token_ids", "distill_logprobs")


def processed(name: str, models: Models, tokenizer: Path, folder: Path) -> list[Group]:
    """The groups of a file under `headrace env FILE process`."""
    with models() as address, pytest.raises(SystemExit) as ended:
        main(["env", str(FILES / f"{name}.py"), "process", *flags(address, tokenizer), *PROCESSED[name]])
    assert ended.value.code == 0
    return groups_in(folder / "data" / f"{name if name != 'group_at_once' else 'sums'}.jsonl")


def test_a_file_whose_tokenizer_or_server_is_not_there_ends_with_the_reason(
    models: Models, folder: Path, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = ["env", str(FILES / "single.py"), "process"]
    with models() as address, pytest.raises(SystemExit, match="1"):
        main([*process, *flags(address, apart / "nowhere")])
    assert f"--env.tokenizer_name '{apart / 'nowhere'}': there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="1"):
        main([*process, *flags("http://127.0.0.1:9", folder), "--env.server_wait_s", "0.1"])
    assert "no rollout server answered within 0.1 s: http://127.0.0.1:9/health" in capsys.readouterr().err


# The tier with atroposlib makes them too, and compares.
@pytest.mark.parametrize(
    "name", ["rewards", *(pytest.param(name, marks=pytest.mark.long) for name in PROCESSED if name != "rewards")]
)
def test_a_file_makes_its_groups(name: str, models: Models, folder: Path, apart: Path) -> None:
    groups = processed(name, models, folder, apart)
    assert len(groups) == (6 if name == "stepwise" else 3)
    for group in groups:
        assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"]) == 4
        assert len(set(group["scores"])) > 1


def test_a_group_has_every_field_that_its_rollouts_had(models: Models, folder: Path, apart: Path) -> None:
    for group in processed("single", models, folder, apart):
        assert group["generation_params"] == {"max_tokens": 16}
        assert {len(group[key]) for key in LOST if key != "generation_params"} == {4}
        for tokens, *numbers in zip(
            *(group[key] for key in ("tokens", "inference_logprobs", "distill_token_ids", "distill_logprobs")),
            strict=True,
        ):
            assert {len(values) for values in numbers} == {len(tokens)}
        assert sorted(override["set_advantage_to_zero"] for override in group["overrides"]) == [False, True, True, True]
        assert group["group_overrides"]["item"] in (1, 2, 3)


def test_a_managed_conversations_tokens_are_those_sampled(models: Models, folder: Path, apart: Path) -> None:
    for group in processed("managed", models, folder, apart):
        for masks, log_probs in zip(group["masks"], group["inference_logprobs"], strict=True):
            assert [value == -0.25 for value in log_probs] == [label != -100 for label in masks]


@pytest.mark.parametrize("name", KINDS)
def test_its_groups_are_those_that_atroposlib_makes(
    name: str, models: Models, atropos: Path, folder: Path, apart: Path
) -> None:
    ours = processed(name, models, folder, apart)
    (apart / "original").mkdir()
    with models() as address:
        args = ["process", *flags(address, folder), *PROCESSED[name], "--env.data_path_to_save_groups", "groups.jsonl"]
        original(atropos, "run_file.py", str(FILES / f"{name}.py"), *args, cwd=apart / "original")
    theirs = groups_in(apart / "original" / "groups.jsonl")
    assert len(ours) == len(theirs)
    if name == "managed":
        theirs = ordered([ended_once(group) for group in theirs])
    for mine, group in zip(ours, theirs, strict=True):
        for key in (key for key, value in group.items() if value):
            assert mine[key] == group[key], key
    if name == "single":
        assert not set(LOST) & {key for group in theirs for key in group if group[key]}


def ended_once(group: Group) -> Group:
    """A group of atroposlib's managed server, which renders the end of a turn once more behind the sampled one."""
    found: Group = {**group, "tokens": [], "masks": []}
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        twice = [at for at in range(1, len(tokens)) if tokens[at] == tokens[at - 1] == masks[at - 1]]
        assert len(twice) == 1
        found["tokens"].append([token for at, token in enumerate(tokens) if at not in twice])
        found["masks"].append([label for at, label in enumerate(masks) if at not in twice])
    return found


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    found = Api()
    await found.start()
    yield found
    await found.stop()


async def test_serve_rolls_out_what_items_leave_behind(models: Models, folder: Path, tmp_path: Path, api: Api) -> None:
    with models() as address, (tmp_path / "said").open("wb") as said:
        command = [*HEADRACE, "serve", *flags(address, folder, groups=100), "--env.rollout_server_url", api.address]
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=said, stderr=said)
        ended = asyncio.create_task(process.wait())
        came = asyncio.create_task(api.until(lambda: len(api.received) >= 6))
        try:
            await asyncio.wait([ended, came], return_when=asyncio.FIRST_COMPLETED)
            assert came.done(), (tmp_path / "said").read_text()[-4000:]
            process.send_signal(signal.SIGINT)
            assert await ended == 0
        finally:
            came.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert len(api.received) == 6
    assert api.left == [0]


def sent(command: list[str], models: Models, tokenizer: Path, folder: Path) -> list[Any]:
    """The six groups that a trainer gets of a command, as far as every environment sends them."""
    folder.mkdir()
    with models() as address, serving_api() as (_, api), (folder / "said").open("wb") as said:
        trainer = Trainer(api, 8, folder)
        given = [*flags(address, tokenizer, groups=100), "--env.rollout_server_url", api, "--env.wandb_name", "backlog"]
        process = subprocess.Popen([*command, "serve", *given], cwd=folder, stdout=said, stderr=said)
        try:
            groups = ordered([group for _ in range(3) for group in trainer.batch()])
        finally:
            process.kill()
            process.wait()
            trainer.close()
    return [(group["tokens"], group["masks"], group["scores"]) for group in groups]


def test_serve_sends_what_atroposlib_sends(models: Models, atropos: Path, folder: Path, tmp_path: Path) -> None:
    theirs = [str(atropos), str(Path(__file__).parent / "inside" / "run_file.py"), str(FILES / "backlog.py")]
    assert sent(HEADRACE, models, folder, tmp_path / "ours") == sent(theirs, models, folder, tmp_path / "theirs")
