"""The page of a run's groups: the dashboard's, with every rollout in it, and nothing of what was said can act there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dashboard.test_groups_file import group, written
from tests.dashboard.test_single_file import answers_of

from headrace.data.errors import HeadraceError
from headrace.envs.files import write_page


def test_a_page_holds_every_rollout_whole_and_loads_nothing(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=http://a/b><!--"
    path = write_page(written(tmp_path, group(0.0, 1.0), group(0.5, text=hostile)), title="words")
    assert path == tmp_path / "groups.html"
    page = path.read_text()
    answers = answers_of(page)
    assert answers["overview"]["title"] == answers["about"]["title"] == "words"
    assert answers["about"]["outcome"] == "2 groups of 3 rollouts: the mean score is 0.5, from 0 to 1."
    assert {row["uid"]: row["reward"] for row in answers["trajectories"]} == {
        "group 1-0": 0.0,
        "group 1-1": 1.0,
        "group 2-0": 0.5,
    }
    assert len(answers["whole"]) == 3
    assert set(answers["group_details"]) == {"groups of 2\ngroup 1", "groups of 1\ngroup 2"}
    assert hostile not in page
    assert "default-src 'none'" in page


def test_a_page_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"groups\.html was not written: .*groups\.jsonl cannot be read"):
        write_page(tmp_path / "groups.jsonl")
