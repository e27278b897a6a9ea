"""Export: what a channel holds, as Parquet and JSONL, from any kind of pool; every field comes back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pool.servers import serving

from headrace import DataPool, Step, connect
from headrace.data.errors import InvalidInput
from headrace.data.step import same_value
from headrace.pool import export as module
from headrace.pool.errors import NotFound
from headrace.pool.export import ExportError, export, read_steps

SUFFIXES = ["parquet", "jsonl"]


def full_step(uid: str = "t0", **changes: Any) -> Step:
    """A step with every field set."""
    fields: dict[str, Any] = {
        "prompt_ids": [1, 2, 2**31 - 1],
        "response_ids": [4, 5],
        "trajectory_uid": uid,
        "prompt_uid": "p0",
        "step_index": 0,
        "reward": 0.1,
        "rollout_log_probs": [-0.1, -12.345678],
        "policy_version": 3,
        "is_last": True,
        "metadata": {"env": "café", "nested": {"list": [1, 2.5, None, True]}},
        "finish_reason": "length",
        "sampling": {"temperature": 0.7, "stop": ["\n"]},
        "multi_modal_data": {"image": [b"\x00\xff\x10"], "grid": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "routed_experts": np.arange(2 * 3 * 2).reshape(2, 3, 2),
        "created_at": 1794700000.25,
        "call_id": "call-1",
        "version_spans": ((0, 3), (1, 4)),
        "quality": 0.5,
        "trainable": False,
        "tags": ("odd", "long"),
        "note": "two\nlines",
    }
    return Step(**(fields | changes))


def bare_step(uid: str, index: int = 0, **changes: Any) -> Step:
    fields: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "trajectory_uid": uid, "step_index": index}
    return Step(**(fields | {"policy_version": 0, "created_at": 1.0} | changes))


@pytest.fixture(params=["embedded", "http", pytest.param("ray", marks=pytest.mark.ray)])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "ray":
        from headrace.pool.ray import start_pool, stop_pool

        cluster = request.getfixturevalue("ray_cluster")
        start_pool("export_pool", address=cluster)
        with connect("ray-actor://export_pool") as remote:
            yield remote
        stop_pool("export_pool", address=cluster)
        return
    with DataPool() as embedded:
        if request.param == "embedded":
            yield embedded
        else:
            with serving(embedded) as address, connect(address) as remote:
                yield remote


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_field_of_a_step_comes_back(pool: Any, tmp_path: Path, suffix: str) -> None:
    sent = [full_step(), bare_step("t1"), full_step("t2", quarantined="ids do not decode")]
    pool.submit_steps(sent)
    done = export(pool, tmp_path / f"steps.{suffix}")
    assert (done.rows, done.trajectories, done.gone) == (3, 3, 0)
    assert done.bytes == done.path.stat().st_size
    found = {step.trajectory_uid: step for step in read_steps(done.path)}
    assert found == {step.trajectory_uid: step for step in sent}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_metadata_whose_keys_are_no_text_comes_back(pool: Any, tmp_path: Path, suffix: str) -> None:
    """A pool takes such keys anywhere but at the top; they must not keep a channel from being exported."""
    metadata = {
        "rewards": {0: 0.25, 7: {1.5: [1], None: 2, True: 3}},
        "cells": {(1, 2): "a", ((3,), "b"): {b"raw": b"\x00"}},
        "quoted": [{"$bytes": "no base64!"}, {"$array": 1, "dtype": 2, "shape": 3}, {"$items": 4}],
    }
    pool.submit_steps([bare_step("plain"), bare_step("t", metadata=metadata)])
    assert export(pool, tmp_path / f"steps.{suffix}").rows == 2
    found = {step.trajectory_uid: step for step in read_steps(tmp_path / f"steps.{suffix}")}
    assert found["t"].metadata == metadata
    assert export(pool, tmp_path / f"sequences.{suffix}", what="sequences").rows == 2


def test_the_step_with_everything_has_everything() -> None:
    """Guards the tests below: a field that is new in Step is to be exported too."""
    full = full_step(quarantined="why")
    usual = bare_step("t")
    same = {name for name in module.STEP_FIELDS if same_value(getattr(full, name), getattr(usual, name))}
    assert same == {"step_index"}


def test_a_step_that_was_sent_as_a_difference_is_exported_whole(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([bare_step("t", 0, prompt_ids=[1, 2], response_ids=[3])])
        pool.submit_steps([bare_step("t", 1, prompt_ids=[4], response_ids=[5], builds_on=(0, 3))])
        export(pool, tmp_path / "steps.jsonl")
    assert [step.prompt_ids.tolist() for step in read_steps(tmp_path / "steps.jsonl")] == [[1, 2], [1, 2, 3, 4]]


def test_a_row_has_the_fields_of_step_and_nothing_else(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([full_step()])
        export(pool, tmp_path / "steps.parquet")
        export(pool, tmp_path / "steps.jsonl")
    fields = set(Step.__struct_fields__) - {"builds_on"}
    assert set(pq.read_schema(tmp_path / "steps.parquet").names) == fields
    assert set(json.loads((tmp_path / "steps.jsonl").read_text())) == fields


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_long_conversation_comes_back_with_whole_prompts(tmp_path: Path, suffix: str) -> None:
    prompt, sent = [1, 2, 3], []
    for turn in range(50):
        sent.append(bare_step("t", turn, prompt_ids=list(prompt), response_ids=[100 + turn], prompt_uid="p"))
        prompt += [100 + turn, 4]
    with DataPool() as pool:
        pool.submit_steps(sent)
        export(pool, tmp_path / f"steps.{suffix}")
    assert list(read_steps(tmp_path / f"steps.{suffix}")) == sent


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_sequences_are_what_a_trainer_gets(tmp_path: Path, suffix: str) -> None:
    with DataPool() as pool:
        pool.submit_steps(
            [
                bare_step(
                    "t", 0, prompt_ids=[1, 2], response_ids=[3, 4], rollout_log_probs=[-1.0, -2.0], prompt_uid="p"
                ),
                bare_step("t", 1, prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], prompt_uid="p", finish_reason="stop"),
                bare_step(
                    "t", 2, prompt_ids=[1, 2, 3, 4, 9], response_ids=[7], reward=1.0, is_last=True, prompt_uid="p"
                ),
            ]
        )
        pool.open("t", "p", metadata={"env": "maze"})
        done = export(pool, tmp_path / f"sequences.{suffix}", what="sequences")
        wanted = pool.trajectory("t").sequences()
    assert done.rows == len(wanted) == 2
    if suffix == "parquet":
        rows = pq.read_table(done.path).to_pylist()
    else:
        rows = [json.loads(line) for line in done.path.read_text().splitlines()]
    for row, sequence in zip(rows, wanted, strict=True):
        assert row["tokens"] == sequence.tokens.tolist()
        assert row["loss_mask"] == sequence.loss_mask.tolist()
        assert row["versions"] == sequence.versions.tolist()
        log_probs = np.array(row["log_probs"], dtype=np.float32)
        np.testing.assert_array_equal(log_probs, sequence.log_probs)
        assert row["reward"] == 1.0
        assert [(span["start"], span["end"], span["trained"]) for span in row["spans"]] == [
            (span.start, span.end, span.trained) for span in sequence.spans
        ]
        metadata = row["metadata"] if suffix == "jsonl" else json.loads(row["metadata"])
        assert metadata == sequence.metadata == {"env": "maze"}
        assert row["advantages"] is None


def test_only_the_channel_that_was_asked_for_is_exported(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([bare_step("train")])
        pool.submit_steps([bare_step("eval")], channel="eval")
        export(pool, tmp_path / "eval.jsonl", channel="eval")
    assert [step.trajectory_uid for step in read_steps(tmp_path / "eval.jsonl")] == ["eval"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_channel_gives_an_empty_file(tmp_path: Path, suffix: str) -> None:
    with DataPool() as pool:
        pool.configure("train")
        done = export(pool, tmp_path / f"none.{suffix}")
    assert done.rows == 0
    assert list(read_steps(done.path)) == []


def test_what_is_leased_is_exported_and_what_was_consumed_is_not(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([bare_step(f"t{n}", is_last=True) for n in range(3)])
        pool.fetch_batch(1)
        pool.fetch_batch(1, lease_s=60)
        export(pool, tmp_path / "steps.jsonl")
    assert {step.trajectory_uid for step in read_steps(tmp_path / "steps.jsonl")} == {"t1", "t2"}


def test_pages_and_row_groups_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRAJECTORIES_A_PAGE", 3)
    monkeypatch.setattr(module, "ROW_GROUP_ROWS", 4)
    with DataPool() as pool:
        pool.submit_steps([bare_step(f"t{n}") for n in range(10)])
        export(pool, tmp_path / "steps.parquet")
    assert pq.ParquetFile(tmp_path / "steps.parquet").num_row_groups == 3
    assert [step.trajectory_uid for step in read_steps(tmp_path / "steps.parquet")] == [f"t{n}" for n in range(10)]


def test_many_tokens_make_a_row_group_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROW_GROUP_TOKENS", 1_000)
    with DataPool() as pool:
        pool.submit_steps([bare_step(f"t{n}", prompt_ids=range(600)) for n in range(4)])
        export(pool, tmp_path / "steps.parquet")
    assert pq.ParquetFile(tmp_path / "steps.parquet").num_row_groups == 2


def test_a_trajectory_that_left_meanwhile_is_counted(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([bare_step(f"t{n}", is_last=True) for n in range(3)])
        reading = pool.trajectory

        def leaving(uid: str, channel: str | None = None) -> Any:
            if uid == "t1":
                raise NotFound("consumed meanwhile")
            return reading(uid, channel)

        pool.trajectory = leaving  # type: ignore[method-assign]
        done = export(pool, tmp_path / "steps.jsonl")
    assert (done.rows, done.trajectories, done.gone) == (2, 2, 1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_export_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"steps.{suffix}"
    path.write_text("the old one")
    with DataPool() as pool:
        pool.submit_steps([bare_step(f"t{n}") for n in range(3)])
        reading = pool.trajectory

        def breaking(uid: str, channel: str | None = None) -> Any:
            if uid == "t2":
                raise RuntimeError("the pool is gone")
            return reading(uid, channel)

        pool.trajectory = breaking  # type: ignore[method-assign]
        with pytest.raises(RuntimeError):
            export(pool, path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_without_a_format_is_refused(tmp_path: Path) -> None:
    with DataPool() as pool, pytest.raises(InvalidInput, match=r"end it with \.parquet or \.jsonl"):
        export(pool, tmp_path / "steps.csv")


def test_an_unknown_kind_of_row_is_refused(tmp_path: Path) -> None:
    with DataPool() as pool, pytest.raises(InvalidInput, match="what is 'groups'; it must be one of steps, sequences"):
        export(pool, tmp_path / "x.jsonl", what="groups")  # type: ignore[arg-type]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with DataPool() as pool:
        pool.submit_steps([bare_step("t")])
        with pytest.raises(ExportError, match=r"pip install .*\[export\]"):
            export(pool, tmp_path / "steps.parquet")
        assert export(pool, tmp_path / "steps.jsonl").rows == 1
    assert not (tmp_path / "steps.parquet").exists()


def test_a_file_of_sequences_is_not_read_as_steps(tmp_path: Path) -> None:
    with DataPool() as pool:
        pool.submit_steps([bare_step("t")])
        export(pool, tmp_path / "sequences.jsonl", what="sequences")
    with pytest.raises(ExportError, match="holds sequences, not steps"):
        list(read_steps(tmp_path / "sequences.jsonl"))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("{}\n{")
    with pytest.raises(ExportError, match=r"steps\.jsonl, line 2: "):
        next(iter([*module._read_jsonl(tmp_path / "steps.jsonl")]))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
texts = st.none() | st.text(max_size=8)


@st.composite
def any_step(draw: st.DrawFn) -> Step:
    response = draw(ids)
    probs = st.lists(st.floats(-1e6, 0, width=32), min_size=len(response), max_size=len(response))
    return full_step(
        prompt_ids=draw(ids),
        response_ids=response,
        rollout_log_probs=draw(st.none() | probs),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        metadata=draw(json_objects),
        sampling=draw(st.none() | json_objects.filter(bool)),
        multi_modal_data=draw(
            st.none()
            | st.dictionaries(st.text(max_size=5), st.binary(max_size=8) | json_values, min_size=1, max_size=3)
        ),
        routed_experts=draw(st.none() | st.lists(st.integers(0, 300), min_size=1, max_size=4)),
        version_spans=draw(st.sampled_from([None, ((0, 3),)])),
        finish_reason=draw(texts),
        note=draw(texts),
        call_id=None,
        quality=draw(st.none() | st.floats(0, 1)),
        tags=tuple(draw(st.lists(st.text(max_size=4), max_size=3))),
        trainable=draw(st.booleans()),
        is_last=draw(st.booleans()),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(step=any_step())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step_comes_back_as_it_was(tmp_path: Path, suffix: str, step: Step) -> None:
    with DataPool() as pool:
        pool.submit_step(step)
        kept = pool.trajectory(step.trajectory_uid).steps
        export(pool, tmp_path / f"any.{suffix}")
    assert list(read_steps(tmp_path / f"any.{suffix}")) == kept
