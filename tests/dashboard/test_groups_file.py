"""A file of scored groups as a pool: what becomes of each line, and what is said of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.dashboard import groups_file
from headrace.dashboard.groups_file import GroupsFile
from headrace.data.errors import InvalidInput


def group(*scores: float, text: str = "hello") -> dict[str, Any]:
    said = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": text}] for _ in scores]
    tokens = [[1, 2, 3] for _ in scores]
    return {"tokens": tokens, "masks": [[-100, 2, 3]] * len(scores), "scores": list(scores), "messages": said}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "groups.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_each_rollout_is_a_trajectory_with_its_score_and_what_was_said(tmp_path: Path) -> None:
    found = GroupsFile(written(tmp_path, group(0.0, 1.0), group(0.5), group(0.25, 0.75, text="bye")))
    with found.pool as pool:
        channels = pool.stats()["channels"]
        assert {name: row["groups"]["ready"] for name, row in channels.items() if row["trajectories"]} == {
            "groups of 1": 1,
            "groups of 2": 2,
        }
        best = pool.trajectory("group 1-1", "groups of 2")
        assert (best.reward, best.prompt_uid) == (1.0, "group 1")
        (step,) = best.steps
        assert (step.prompt_ids.tolist(), step.response_ids.tolist()) == ([1], [2, 3])
        assert step.metadata["messages"][1]["content"] == "hello"
        assert pool.trajectory("group 3-0", "groups of 2").steps[0].metadata["messages"][1]["content"] == "bye"
    about = found.about()
    assert about.outcome == "3 groups of 5 rollouts: the mean score is 0.5, from 0 to 1."
    assert about.sections[0].text[0].startswith("15 tokens, of which 10 are trained on.")
    assert [row[1] for row in about.sections[0].tables[0].rows] == [1, 0, 1, 0, 0, 1, 0, 1, 0, 1]


def test_lines_that_are_no_groups_and_groups_beyond_the_bound_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = GroupsFile(written(tmp_path, group(1.0), '{"torn', "[]", "", group(1.0)))
    found.pool.close()
    about = found.about()
    assert about.outcome.startswith("2 groups of 2 rollouts")
    assert about.sections[0].text[-1] == "2 lines of the file are no groups."
    assert about.sections[0].tables[0].rows == [["1", 2]]
    monkeypatch.setattr(groups_file, "MAX_BYTES", 800)
    found = GroupsFile(written(tmp_path, *[group(1.0, text="x" * 300)] * 5))
    found.pool.close()
    assert found.about().outcome.startswith("1 groups of 1 rollouts")
    assert found.about().sections[0].text[-1] == "4 more groups are in the file, and not on this page."


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.jsonl cannot be read: No such file"):
        GroupsFile(tmp_path / "nowhere.jsonl")
