"""A teacher's server: a real engine says what it thinks of sampled tokens; one that is away, refuses or has another
vocabulary is told of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.engine.kit import Client, Reference, gap
from tests.gateway.kit import serving
from tests.trainer.kit import pool_of, sequence

from headrace.data.errors import InvalidInput
from headrace.data.guidance import Guidance
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.config import TeacherConfig
from headrace.trainer.dry_run import plan
from headrace.trainer.stopping import Outage, Stopped, StopSignal
from headrace.trainer.teacher import LEAST_LOG_PROB, Teacher, TeacherFailed

#: Nothing listens there.
DEAD = "http://127.0.0.1:9"


def asked(address: str, policy: Path, stop: StopSignal | None = None, **config: Any) -> tuple[Teacher, list[str]]:
    """A teacher, and what is logged about its outages."""
    said: list[str] = []
    made = TeacherConfig(address=address, **config)
    return Teacher(made, policy, Outage(f"the teacher {address}", said.append), stop or StopSignal()), said


def of_engine(client: Client) -> str:
    return f"http://{client.host}"


def test_the_teachers_log_probs_are_those_of_its_model(engine: Client, folder: Path) -> None:
    sequences = [sequence([(2, 5 + at)], seed=at, vocabulary=300) for at in range(5)]
    teacher, said = asked(of_engine(engine), folder, concurrency=2)
    assert teacher.check() == ""
    reference = Reference(folder)
    for given, found in zip(sequences, teacher.labelled(sequences), strict=True):
        assert found.guidance is not None
        row = found.guidance.ref_log_probs
        assert row is not None
        assert len(row) == len(given)
        ids = given.tokens.tolist()
        assert gap(row[1:].tolist(), reference.logprobs(ids[:1], ids[1:])) < 1e-4
        assert found.tokens is given.tokens
    assert said == []


def test_log_probs_that_came_with_a_sequence_are_not_asked_for(folder: Path) -> None:
    given = sequence()
    row = np.arange(len(given), dtype=np.float32)
    with speaking(lambda ids: pytest.fail("asked")) as address:
        teacher, _ = asked(address, folder / "no tokenizer")
        (found,) = teacher.labelled([replace(given, guidance=Guidance(ref_log_probs=row))])
    assert found.guidance is not None
    assert found.guidance.ref_log_probs is row


def test_a_run_is_taught_by_a_server(engine: Client, folder: Path, tmp_path: Path) -> None:
    """Without rewards that differ: what is learned is what the teacher says."""
    config = TrainerConfig.model_validate(
        {
            "model": folder,
            "run": tmp_path / "run",
            "steps": 2,
            "pool": {"batch_size": 1},
            # Not PPO: what these answers were sampled with is far beyond its clip.
            "algorithm": {"advantage": "none", "loss": "tis", "teacher": {"address": of_engine(engine)}},
        }
    )
    trainer = Trainer(config, pool=pool_of([[1.0, 1.0], [1.0, 1.0]], vocabulary=300))
    done = trainer.run()
    assert done.version == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # The model is its own teacher, so its own log-probs are the teacher's before it has learned.
    assert rows[0]["teacher_reverse_kl"] == pytest.approx(0.0, abs=1e-3)
    assert rows[0]["grad_norm"] > 0
    assert [row["skipped_zero_variance"] for row in rows] == [0, 0]


def test_a_dry_run_says_whether_the_teacher_answers(engine: Client, folder: Path, tmp_path: Path) -> None:
    for address, wanted in ((of_engine(engine), "answers"), (DEAD, "does not answer: connection refused (the run")):
        config = TrainerConfig.model_validate(
            {"model": folder, "run": tmp_path, "algorithm": {"filters": ["overlong"], "teacher": {"address": address}}}
        )
        found = plan(config)
        assert found["filters"] == "overlong"
        assert found["teacher"].startswith(f"{address} {wanted}")


def test_a_teacher_with_another_vocabulary_is_refused(engine: Client, folder: Path, tmp_path: Path) -> None:
    other = shuffled(folder, tmp_path)
    teacher, _ = asked(of_engine(engine), other)
    with pytest.raises(InvalidInput, match=r"another vocabulary than .*: token \d+ is '.*' there and '.*' here"):
        teacher.check()


def test_ids_that_a_teacher_does_not_know_are_another_vocabulary(engine: Client, tmp_path: Path) -> None:
    teacher, _ = asked(of_engine(engine), tmp_path)
    with pytest.raises(InvalidInput, match="out of vocabulary; a teacher must have the vocabulary of the model"):
        teacher.labelled([sequence(vocabulary=10**6)])


def test_a_model_that_a_teacher_does_not_serve_is_named(engine: Client, tmp_path: Path) -> None:
    teacher, _ = asked(of_engine(engine), tmp_path, model="nobody")
    with pytest.raises(TeacherFailed, match=r"404.*nobody.*algorithm\.teacher\.model"):
        teacher.labelled([sequence(vocabulary=300)])


def test_a_teacher_that_is_not_there_yet_is_no_error_at_the_start_and_one_after_its_time(tmp_path: Path) -> None:
    teacher, said = asked(DEAD, tmp_path, patience_s=1e-9)
    assert "refused" in teacher.check()
    with pytest.raises(TeacherFailed, match=r"did not answer for .*patience_s.*refused"):
        teacher.labelled([sequence()])
    assert len(said) == 1


def test_a_teacher_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    busy = [503, 429]

    def answer(ids: list[int]) -> JSONResponse:
        if busy:
            return JSONResponse({"error": {"message": "busy"}}, busy.pop())
        return told(ids, -9999.0)

    with speaking(answer) as address:
        teacher, said = asked(address, tmp_path)
        (found,) = teacher.labelled([sequence()])
    assert found.guidance is not None
    assert found.guidance.ref_log_probs is not None
    assert found.guidance.ref_log_probs.tolist() == [0.0, *[LEAST_LOG_PROB] * 3]
    assert said[0].endswith("busy")
    assert "answers again" in said[-1]


def recorded(name: str) -> Any:
    """A request to a real vLLM, with its answer."""
    return json.loads((Path(__file__).parents[1] / "engine" / "vllm" / name).read_text())


def test_an_answer_of_vllms_is_read_as_it_stands(tmp_path: Path) -> None:
    sample = recorded("completions_prompt_logprobs_n2.json")
    ids = sample["request"]["body"]["prompt"]
    given = replace(sequence([(2, len(ids))]), tokens=np.array(ids, np.int32))
    with speaking(lambda asked: JSONResponse(sample["response"])) as address:
        (found,) = asked(address, tmp_path)[0].labelled([given])
    assert found.guidance is not None
    assert found.guidance.ref_log_probs is not None
    assert found.guidance.ref_log_probs[[1, 2, -1]].tolist() == pytest.approx([-7.79682, -7.61762, -7.24157], abs=1e-5)


def test_a_refusal_of_vllms_is_another_vocabulary(tmp_path: Path) -> None:
    sample = recorded("completions_vocab_oob.json")
    with speaking(lambda asked: JSONResponse(sample["response"], sample["status"])) as address:
        teacher, _ = asked(address, tmp_path)
        with pytest.raises(InvalidInput, match="Token id 999999 is out of vocabulary; a teacher must have"):
            teacher.labelled([sequence()])


@pytest.mark.parametrize("found", [{"choices": []}, {"choices": [{"prompt_logprobs": None}]}, []])
def test_a_server_without_prompt_log_probs_is_no_teacher(tmp_path: Path, found: Any) -> None:
    with speaking(lambda ids: JSONResponse(found)) as address:
        teacher, _ = asked(address, tmp_path)
        with pytest.raises(TeacherFailed, match="gave no prompt_logprobs"):
            teacher.labelled([sequence()])


def test_a_sequence_that_is_too_long_for_a_teacher_is_told_of_with_the_fix(tmp_path: Path) -> None:
    with speaking(lambda ids: JSONResponse({"error": {"message": "maximum context length is 2"}}, 400)) as address:
        teacher, _ = asked(address, tmp_path)
        with pytest.raises(TeacherFailed, match=r"maximum context length is 2; .* set max_length"):
            teacher.labelled([sequence()])


def test_a_stop_ends_the_wait_for_a_teacher(tmp_path: Path) -> None:
    stop = StopSignal()

    def stopping(ids: list[int]) -> JSONResponse:
        stop.set("a test")
        return JSONResponse({"error": {"message": "busy"}}, 503)

    with speaking(stopping) as address:
        teacher, _ = asked(address, tmp_path, stop)
        with pytest.raises(Stopped):
            teacher.labelled([sequence()])


# -- servers and models ------------------------------------------------------------------------------------------------


def told(ids: list[int], log_prob: float) -> JSONResponse:
    rows = [None, *({str(token): {"logprob": log_prob}} for token in ids[1:])]
    return JSONResponse({"choices": [{"prompt_logprobs": rows}]})


@contextmanager
def speaking(answer: Callable[[list[int]], JSONResponse]) -> Iterator[str]:
    """A server that answers completions with this."""

    async def completions(request: Request) -> JSONResponse:
        return answer((await request.json())["prompt"])

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "teacher"}]})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    with serving(Starlette(routes=routes)) as address:
        yield address


def shuffled(folder: Path, to: Path) -> Path:
    """A copy of a model's tokenizer in which ordinary tokens have changed places."""
    made = to / "shuffled"
    made.mkdir()
    for name in ("tokenizer_config.json", "config.json"):
        (made / name).write_bytes((folder / name).read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {one["content"] for one in tokenizer["added_tokens"]}
    words = [word for word in tokenizer["model"]["vocab"] if word not in special]
    ids = [tokenizer["model"]["vocab"][word] for word in words]
    tokenizer["model"]["vocab"].update(zip(words, reversed(ids), strict=True))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made
