"""Pause, resume, abort, and new weights while answers are on their way."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from tests.engine.kit import Client, Reference, gap, hold_until_resumed, serving
from tests.engine.test_forward import family

from headrace.engine.cache import BLOCK_TOKENS
from headrace.engine.engine import Engine, EngineSettings
from headrace.engine.routes import create_app
from headrace.engine.weights import share

PROMPT = [1, 50, 60, 70]
LONG = {"prompt": PROMPT, "max_tokens": 400, "seed": 1, "ignore_eos": True, "return_token_ids": True}
#: Longer than what anybody waits for: it is ended.
LONGER = {**LONG, "max_tokens": 1500}


def generate(tokens: int, **asked: Any) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "seed": 1, "ignore_eos": True, "logprobs": 0}
    return {"token_ids": PROMPT, "sampling_params": sampling, **asked}


def test_a_client_that_hangs_up_frees_its_place(folder: Path) -> None:
    with serving(model=str(folder), max_num_seqs=1) as own:
        hold_until_resumed(own)
        with own.stream("/v1/completions", {**LONGER, "request_id": "gone"}) as chunks:
            next(chunks)
            waiting = own.later("/v1/completions", {**LONG, "max_tokens": 3})
            own.post("/pause?mode=keep")
        # Nothing is stepped: only the hang-up can end it.
        assert own.recorded("cmpl-gone")["finish_reason"] == "abort"
        own.post("/resume")
        assert len(waiting.result(240)["choices"][0]["token_ids"]) == 3
        assert own.get("/load") == {"server_load": 0}


def test_a_client_that_hangs_up_on_a_whole_answer_frees_its_place_too(own: Client) -> None:
    import http.client
    import json

    own.post("/pause?mode=keep")
    connection = http.client.HTTPConnection(own.host, timeout=240)
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "request_id": "gone"}))
    while own.get("/load")["server_load"] == 0:
        pass
    connection.close()
    assert own.recorded("cmpl-gone")["finish_reason"] == "abort"
    while own.get("/load")["server_load"]:
        pass


def test_pause_keep_freezes_what_runs_and_resume_goes_on(own: Client) -> None:
    alone = own.post("/v1/completions", LONG)["choices"][0]["token_ids"]
    hold_until_resumed(own)
    with own.stream("/v1/completions", LONG) as chunks:
        ids = next(chunks)["choices"][0]["token_ids"]
        own.post("/pause?mode=keep")
        assert own.get("/is_paused") == {"is_paused": True}
        held = own.later("/v1/completions", {**LONG, "max_tokens": 2})
        own.post("/resume")
        assert own.get("/is_paused") == {"is_paused": False}
        for chunk in chunks:
            ids += chunk["choices"][0]["token_ids"]
    assert ids == alone
    assert held.result(240)["choices"][0]["token_ids"] == alone[:2]


def test_pause_abort_ends_what_runs_with_what_it_has(own: Client) -> None:
    hold_until_resumed(own)
    with own.stream("/v1/completions", LONGER) as chunks:
        first = next(chunks)["choices"][0]
        own.post("/pause")
        rest = [chunk["choices"][0] for chunk in chunks]
    parts = [first, *rest]
    assert parts[-1]["finish_reason"] == "abort"
    assert sum(len(part["token_ids"]) for part in parts) < 1500
    own.post("/resume")


def test_a_stream_that_is_aborted_before_its_first_token_says_nothing(own: Client) -> None:
    own.post("/pause?mode=keep")
    waiting = own.pool.submit(own.chunks, "/v1/completions", LONG)
    while not own.get("/load")["server_load"]:
        pass
    own.post("/abort_requests", {})
    assert waiting.result(240) == []


def test_pause_wait_lets_what_runs_end_and_holds_what_comes(own: Client) -> None:
    with own.stream("/v1/completions", LONG) as chunks:
        next(chunks)
        paused = own.later("/pause?mode=wait", None)
        while not own.get("/is_paused")["is_paused"]:
            pass
        held = own.later("/v1/completions", {**LONG, "max_tokens": 2})
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "length"
    assert paused.result(240) == {"status": "paused"}
    assert not held.done()
    own.post("/resume")
    assert held.result(240)["choices"][0]["finish_reason"] == "length"


def test_one_of_many_is_aborted_after_the_cache_has_grown(own: Client) -> None:
    body = {"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 1000, "ignore_eos": True}
    own.post("/pause?mode=keep")
    calls = [own.pool.submit(own.post, "/v1/completions", {**body, "request_id": f"r{at}"}) for at in range(12)]
    while own.get("/load")["server_load"] < len(calls):
        pass
    hold_until_resumed(own, steps=101, times=2)
    own.post("/resume")  # all begin together, and none goes beyond its steps
    while sum(len(s.output) > 100 for c in list(own.engine.open) for s in c.sequences) < len(calls):
        time.sleep(0.001)  # the engine is in this process, and must get to compute
    own.post("/abort_requests", {"request_ids": ["r5"]})
    own.post("/resume")
    ends = [call.result(240)["choices"][0]["finish_reason"] for call in calls]
    assert [at for at, end in enumerate(ends) if end == "abort"] == [5]
    assert ends.count("length") == 11


def test_a_request_is_aborted_by_its_name_and_others_go_on(own: Client) -> None:
    own.post("/pause?mode=keep")
    gone = own.later("/v1/completions", {**LONG, "request_id": "a"})
    stays = own.later("/v1/completions", {**LONG, "max_tokens": 3, "request_id": "b"})
    while own.get("/load")["server_load"] < 2:
        pass
    assert own.post("/abort_requests", {"request_ids": ["a"]}) == {"status": "aborted", "aborted": 1}
    assert gone.result(240)["choices"][0]["finish_reason"] == "abort"
    own.post("/resume")
    assert stays.result(240)["choices"][0]["finish_reason"] == "length"


def test_weights_from_a_folder_change_the_answers_and_the_version_what_is_told(
    own: Client, other: Path, reference: Reference, other_reference: Reference
) -> None:
    before = own.post("/inference/v1/generate", generate(6))["choices"][0]
    assert before["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    own.post("/pause?mode=keep")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
    assert own.post("/collective_rpc", rpc) == {"results": [None]}
    own.post("/reset_prefix_cache")
    own.post("/update_weight_version", {"new_version": "7"})
    own.post("/resume")
    assert own.get("/weight_info") == {"weight_version": "7"}
    after = own.post("/inference/v1/generate", generate(6))["choices"][0]
    assert after["weight_versions"] == [{"version": "7", "start": 0, "end": 6}]
    for choice, right, wrong in ((before, reference, other_reference), (after, other_reference, reference)):
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert gap(found, right.logprobs(PROMPT, choice["token_ids"])) < 1e-4
        assert gap(found, wrong.logprobs(PROMPT, choice["token_ids"])) > 1e-3


def test_an_answer_that_straddles_new_weights_tells_its_spans(
    own: Client, other: Path, reference: Reference, other_reference: Reference
) -> None:
    tensors = load_file(other / "model.safetensors")
    hold_until_resumed(own)
    with own.stream("/inference/v1/generate", generate(1000)) as chunks:
        choices = [next(chunks)["choices"][0]]
        own.post("/pause?mode=keep")
        block, manifest = share(tensors)
        try:
            said = own.post("/load_weights_shm", {"name": block.name, "manifest": manifest, "version": "8"})
        finally:
            block.close()
            block.unlink()
        assert said == {"success": True, "loaded": len(tensors), "weight_version": "8"}
        own.post("/resume")
        choices += [chunk["choices"][0] for chunk in chunks]
    ids = [token for choice in choices for token in choice["token_ids"]]
    found = [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]
    old, new = choices[-1]["weight_versions"]
    cut = old["end"]
    assert (old, new) == (
        {"version": "default", "start": 0, "end": cut},
        {"version": "8", "start": cut, "end": 1000},
    )
    expected = reference.logprobs(PROMPT, ids)[:cut] + other_reference.logprobs(PROMPT, ids)[cut:]
    assert gap(found, expected) < 1e-4


@pytest.mark.parametrize("way", ["folder", "shared memory"])
def test_tied_embeddings_are_new_at_both_ends(folder: Path, tmp_path: Path, way: str) -> None:
    made = family(folder, tmp_path / "model", model_type="llama", tie_word_embeddings=True)
    changed = tmp_path / "changed"
    shutil.copytree(made, changed)
    tensors = {name: tensor * 1.3 for name, tensor in load_file(made / "model.safetensors").items()}
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    with serving(model=str(made)) as client:
        if way == "folder":
            client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(changed)}})
        else:
            # A trainer's state holds the head as well; it is the same tensor.
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
            block, manifest = share(tensors)
            try:
                client.post("/load_weights_shm", {"name": block.name, "manifest": manifest})
            finally:
                block.close()
                block.unlink()
        found = client.complete(PROMPT, max_tokens=6, seed=1, ignore_eos=True)
    expected = Reference(changed).logprobs(PROMPT, found["token_ids"])
    assert gap(found["logprobs"]["token_logprobs"], expected) < 1e-4


def broken(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "missing":
        return {key: tensor for key, tensor in tensors.items() if key != name}
    if how == "unknown":
        return {**tensors, "model.layers.9.mlp.down_proj.weight": tensors[name].clone()}
    return {**tensors, name: tensors[name][:, :-1].contiguous()}


@pytest.mark.parametrize("how", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_whole(own: Client, other: Path, tmp_path: Path, how: str) -> None:
    before = own.complete(PROMPT, max_tokens=5, temperature=0)
    tensors = broken(load_file(other / "model.safetensors"), how)
    save_file(tensors, tmp_path / "model.safetensors")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    status, error = own.refused("/collective_rpc", rpc)
    assert status == 500
    assert "model.layers." in error["message"]
    block, manifest = share(tensors)
    try:
        status, error = own.refused("/load_weights_shm", {"name": block.name, "manifest": manifest, "version": "9"})
    finally:
        block.close()
        block.unlink()
    assert status == 400
    assert own.complete(PROMPT, max_tokens=5, temperature=0) == before
    assert own.get("/weight_info") == {"weight_version": "default"}


def test_a_manifest_that_lies_about_its_block_is_refused(own: Client, other: Path) -> None:
    block, manifest = share(load_file(other / "model.safetensors"))
    try:
        manifest[-1]["offset"] = block.size - 4
        status, error = own.refused("/load_weights_shm", {"name": block.name, "manifest": manifest})
        assert status == 400
        assert "outside" in error["message"]
        manifest[-1]["shape"] = [-1, 96]
        assert own.refused("/load_weights_shm", {"name": block.name, "manifest": manifest})[0] == 400
    finally:
        block.close()
        block.unlink()
    assert own.refused("/load_weights_shm", {"name": "no-such-block", "manifest": manifest})[0] == 400


def test_the_engine_tells_what_it_consumed_and_sampled(engine: Client) -> None:
    found = engine.post("/v1/completions", {**LONG, "max_tokens": 4, "n": 2, "request_id": "told", "logprobs": 0})
    told = {call["index"]: call for call in engine.get("/debug/calls")["calls"] if call["request_id"] == "cmpl-told"}
    for choice in found["choices"]:
        call = told[choice["index"]]
        assert call["prompt_token_ids"] == choice["prompt_token_ids"] == PROMPT
        assert call["token_ids"] == choice["token_ids"]
        assert call["logprobs"] == choice["logprobs"]["token_logprobs"]
        assert call["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]


def test_an_engine_that_keeps_no_calls_says_so(folder: Path) -> None:
    with serving(model=str(folder), record=0) as client:
        status, found = client.send("GET", "/debug/calls")
    assert status == 404
    assert "--record" in found["error"]["message"]


def test_a_step_that_fails_is_answered_with_an_error_and_the_next_one_works(own: Client) -> None:
    def break_(scheduler: Any) -> None:
        def fail(*_: Any) -> None:
            scheduler.sampler = sampler
            raise RuntimeError("out of luck")

        sampler, scheduler.sampler = scheduler.sampler, fail

    asyncio.run(own.engine.worker.ask(break_))
    status, error = own.refused("/v1/completions", LONG)
    assert status == 500
    assert "out of luck" in error["message"]
    assert len(own.complete(PROMPT, max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_a_command_that_fails_is_answered_with_an_error_and_the_next_one_works(own: Client) -> None:
    def fail(_: Any) -> bool:
        raise RuntimeError("out of luck")

    hold_until_resumed(own)
    with own.stream("/v1/completions", LONGER) as chunks:
        next(chunks)
        own.post("/pause?mode=keep")
        own.engine.worker.abort(fail)
        *_, last = chunks
    assert "out of luck" in last["error"]["message"]
    own.post("/resume")
    assert len(own.complete(PROMPT, max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_a_hang_up_without_memory_to_keep_its_prefix_ends_its_own_call_only(own: Client) -> None:
    alone = own.post("/v1/completions", LONG)["choices"][0]["token_ids"]
    long_prompt = [2, *range(50, 50 + BLOCK_TOKENS)]  # so that there is something to keep of it
    tried = threading.Event()

    def fill(scheduler: Any) -> None:
        def take(*_: Any) -> None:
            del scheduler._cache.take
            tried.set()
            raise torch.OutOfMemoryError("out of memory")

        scheduler._cache.take = take

    hold_until_resumed(own)
    with own.stream("/v1/completions", LONG) as chunks:
        with own.stream("/v1/completions", {**LONGER, "prompt": long_prompt, "request_id": "gone"}) as others:
            next(others)
            own.post("/pause?mode=keep")
            asyncio.run(own.engine.worker.ask(fill))
        assert tried.wait(60)
        assert own.recorded("cmpl-gone")["finish_reason"] == "abort"
        own.post("/resume")
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert ids == alone


def test_it_is_not_healthy_once_nothing_can_be_sampled(folder: Path) -> None:
    engine = Engine(EngineSettings(model=str(folder), device="cpu"))
    client = TestClient(create_app(engine))
    assert client.get("/health").status_code == 200
    engine.close()
    assert client.get("/health").status_code == 503


def test_tokens_are_scored_while_the_engine_is_paused_and_what_is_frozen_goes_on(
    own: Client, reference: Reference
) -> None:
    alone = own.post("/v1/completions", LONG)["choices"][0]["token_ids"]
    hold_until_resumed(own)
    with own.stream("/v1/completions", LONG) as chunks:
        ids = next(chunks)["choices"][0]["token_ids"]
        own.post("/pause?mode=keep")
        scored = own.post("/score_tokens", {"prompt_token_ids": PROMPT + alone})
        own.post("/resume")
        for chunk in chunks:
            ids += chunk["choices"][0]["token_ids"]
    assert ids == alone
    assert (scored["weight_version"], scored["dtype"]) == ("default", "float32")
    whole = PROMPT + alone
    assert gap(scored["logprobs"], reference.logprobs(whole[:1], whole[1:])) < 1e-4


def test_a_long_prompt_is_scored_in_parts(own: Client, reference: Reference) -> None:
    ids = [(7 * at + at // 11) % 300 for at in range(own.engine.context - 1)]
    scored = own.post("/score_tokens", {"prompt_token_ids": ids})
    assert gap(scored["logprobs"], reference.logprobs(ids[:1], ids[1:])) < 1e-4


@pytest.mark.parametrize("ids", [[], [1, 10**6], [1] * 2048, "no"], ids=["none", "unknown", "too many", "no ids"])
def test_tokens_that_the_model_cannot_read_are_not_scored(own: Client, ids: Any) -> None:
    assert own.refused("/score_tokens", {"prompt_token_ids": ids})[0] == 400
