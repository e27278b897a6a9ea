"""The page of a run's groups: what is in it, and that nothing of what was said can act in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headrace.envs import files
from headrace.envs.files import write_page


def group(*scores: float, text: str = "hello") -> dict[str, Any]:
    said = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": text}] for _ in scores]
    tokens = [[1, 2, 3] for _ in scores]
    return {"tokens": tokens, "masks": [[-100, 2, 3]] * len(scores), "scores": list(scores), "messages": said}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "groups.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def data(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_a_page_holds_each_rollouts_score_messages_and_counts(tmp_path: Path) -> None:
    path = write_page(written(tmp_path, group(0.0, 1.0), group(0.5)), title="words")
    assert path == tmp_path / "groups.html"
    found = data(path)
    assert found["about"] == {"title": "words", "source": "groups.jsonl", "unread": 0, "left": 0}
    assert [[rollout["score"] for rollout in one["rollouts"]] for one in found["groups"]] == [[0.0, 1.0], [0.5]]
    first = found["groups"][0]["rollouts"][0]
    assert (first["tokens"], first["trained"], first["messages"][1]["content"]) == (3, 2, "hello")


def test_what_was_said_cannot_end_the_data_or_load_anything(tmp_path: Path) -> None:
    text = "</script><script>alert(1)</script><img src=http://a/b><!--"
    path = write_page(written(tmp_path, group(1.0, text=text)))
    assert data(path)["groups"][0]["rollouts"][0]["messages"][1]["content"] == text
    assert text not in path.read_text()
    assert "default-src 'none'" in path.read_text()


def test_groups_of_tokens_alone_and_lines_that_are_none_are_told(tmp_path: Path) -> None:
    alone = group(1.0) | {"messages": None}
    found = data(write_page(written(tmp_path, alone, '{"torn', "[]", group(0.0))))
    assert found["about"]["unread"] == 2
    assert [one["rollouts"][0]["messages"] is None for one in found["groups"]] == [True, False]


def test_groups_beyond_what_a_browser_takes_stay_in_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "MAX_PAGE_BYTES", 1000)
    found = data(write_page(written(tmp_path, *[group(1.0, text="x" * 300)] * 5)))
    assert (len(found["groups"]), found["about"]["left"]) == (2, 3)
