"""One evaluation: what is written, however the environment tells what it found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.kit import SERVER, CountingEnv

from headrace.data.errors import HeadraceError
from headrace.envs import BaseEnvConfig, ConversationConfig, ConversationEnv
from headrace.envs.process import evaluate


def made(folder: Path | None, kind: type[CountingEnv] = CountingEnv) -> CountingEnv:
    return kind(BaseEnvConfig(data_dir_to_save_evals=str(folder) if folder else None, use_wandb=False))


def results(folder: Path) -> Any:
    return json.loads((folder / "metrics.json").read_text())["results"]


async def test_metrics_and_samples_are_written_under_the_tasks_name(tmp_path: Path) -> None:
    env = made(tmp_path / "found")
    metrics = {"eval/mean": np.float64(0.5), "eval/by": {"easy": 1}}
    await env.evaluate_log(metrics, task_name="sums", samples=[{"a": 1}, {"b": np.int64(2)}], start_time=1, end_time=3)
    assert results(tmp_path / "found")["atropos|sums|0"] == {"eval/mean": 0.5, "eval/by": {"easy": 1}}
    general = json.loads((tmp_path / "found/metrics.json").read_text())["config_general"]
    assert general["total_evaluation_time_seconds"] == "2"
    assert (tmp_path / "found/samples.jsonl").read_text() == '{"a":1}\n{"b":2}\n'
    await env.close()


async def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    env = made(None)
    await env.evaluate_log({"eval/mean": 0.5})
    assert env.last_evaluation is not None
    assert not list(tmp_path.iterdir())
    await env.close()


class Returning(CountingEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return {"eval/mean": 0.25}


class Telling(CountingEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.found = 0.75

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await super().wandb_log({**(wandb_metrics or {}), "eval/mean": self.found})


class Wanting(Returning):
    """As many files of Atropos' have it: the metrics must be given."""

    async def wandb_log(self, wandb_metrics: dict[str, Any]) -> None:  # type: ignore[override]
        await super().wandb_log({**wandb_metrics, "eval/other": 1.0})


class Failing(Returning):
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        raise RuntimeError("in the author's code")


@pytest.mark.parametrize("kind", [Wanting, Failing])
async def test_an_evaluation_is_written_whatever_its_author_does_when_it_is_told(
    tmp_path: Path, kind: type[CountingEnv]
) -> None:
    await evaluate(made(tmp_path, kind))
    assert results(tmp_path)["all"] == {"eval/mean": 0.25}


async def test_metrics_that_are_returned_are_written(tmp_path: Path) -> None:
    await evaluate(made(tmp_path, Returning))
    assert results(tmp_path)["all"] == {"eval/mean": 0.25}


async def test_metrics_that_are_told_to_the_log_are_written(tmp_path: Path) -> None:
    await evaluate(made(tmp_path, Telling))
    assert results(tmp_path)["all"] == {"eval/mean": 0.75}


# -- environments of conversations -------------------------------------------------------------------------------------


class Conversing(ConversationEnv):
    """A held-out item is its conversation's score, or the error that ends it."""

    name = "conversing"

    def __init__(self, folder: Path, *items: float | Exception) -> None:
        super().__init__(ConversationConfig(data_dir_to_save_evals=str(folder), use_wandb=False), [SERVER])
        self.items = items

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> None:
        return None

    def held_out(self) -> Any:
        return self.items

    async def play(self, server: Any, item: Any, **sampling: Any) -> Any:
        if isinstance(item, Exception):
            raise item
        return [{"role": "user", "content": "?"}], item


async def test_a_conversation_that_fails_has_no_score_and_costs_no_other_its_own(tmp_path: Path) -> None:
    env = Conversing(tmp_path, 1.0, HeadraceError("the judge gave no verdict"), 0.5, ValueError())
    assert await env.evaluate() == {"eval/score": 0.75}
    await env.close()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["score"] for sample in samples] == [1.0, None, 0.5, None]
    assert [sample.get("error") for sample in samples] == [None, "the judge gave no verdict", None, "ValueError"]
    assert env.counts.failed == {"play": 2}


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([ValueError("one"), ValueError("two")], "none of 2 held-out items has a score: the last one failed with: two"),
        ([], "none of 0 held-out items has a score: held_out() gave none"),
    ],
)
async def test_an_evaluation_without_a_score_is_an_error(tmp_path: Path, items: list[Exception], said: str) -> None:
    env = Conversing(tmp_path, *items)
    with pytest.raises(HeadraceError, match=f"^{re.escape(said)}$"):
        await env.evaluate()
    await env.close()
    assert not list(tmp_path.iterdir())
