"""Where Headrace is better than the original on purpose, line by line of the contract."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from tests.api.kit import Api, api_on
from tests.atropos.groups import group
from tests.atropos.words import NOT_REGISTERED, environment, joined, registration

from headrace import DataPool
from headrace.storm.soak import tasks_of


def test_batches_leave_oldest_first_and_the_step_counts_those_handed_out(api: Api) -> None:
    (env,) = api.opened(8, 4)
    api.send(*(group(n, 4, env) for n in range(6)))
    for step in range(3):
        assert api.batch() == [2 * step, 2 * step + 1]
        assert api.get("/status")["current_step"] == step + 1


def test_data_may_come_before_the_trainer(api: Api) -> None:
    api.send(group(1, 4), group(2, 4))
    api.register(batch_size=8)
    assert api.batch() == [1, 2]


def test_equal_groups_sent_on_purpose_are_two(api: Api) -> None:
    (env,) = api.opened(16, 4)
    api.send(*[group(1, 4, env)] * 3)
    api.post("/scored_data_list", [group(1, 4, env)])
    assert api.batch() == [1, 1, 1, 1]


def test_an_unknown_environment_is_not_found(api: Api) -> None:
    api.opened(8, 4)
    for env_id in (1, -1):
        answer = api.client.request("GET", "/status-env", json={"env_id": env_id})
        assert answer.status_code == 404
        assert str(env_id) in answer.json()["detail"]
        assert api.post("/disconnect-env", {"env_id": env_id})["status"] == "failure"


def test_nobody_connected_or_no_weight_at_all_is_answered(api: Api) -> None:
    (env,) = api.opened(8, 4, weight=0.0)
    assert api.get("/status-env", {"env_id": env})["queue_size"] == 0
    api.post("/disconnect-env", {"env_id": env})
    assert api.get("/status-env", {"env_id": env})["queue_size"] == 0


def test_a_batch_after_a_reset_says_that_nobody_is_registered(api: Api) -> None:
    api.opened(8)
    api.client.get("/reset_data")
    assert api.get("/batch") == NOT_REGISTERED


def test_a_second_trainer_with_other_settings_is_warned(api: Api) -> None:
    assert "warning" not in api.register()
    assert "warning" not in api.register()
    assert "batch_size stays 8" in api.register(batch_size=4)["warning"]
    assert api.get("/info")["batch_size"] == 8


def test_a_trainer_that_resumes_keeps_the_queue(api: Api) -> None:
    api.opened(8, 4)
    api.send(group(1, 4, 0))
    assert "warning" not in api.post("/register", {**registration(batch_size=4), "resume": True})
    assert api.get("/info")["batch_size"] == 4
    assert api.batch() == [1]


def test_groups_that_can_never_be_served_are_counted_not_left_to_rot(api: Api, pool: DataPool) -> None:
    api.opened(4, 8, 2)
    assert "exceed batch_size 4" in api.post("/scored_data", group(1, 8, 0))["warning"]
    api.send(group(2, 2, 1), group(3, 2, 1))
    assert api.batch() == [2, 3]
    assert sum(pool.stats()["desk"]["dead_letters"].values()) == 1


def test_sizes_that_never_fit_are_said_in_every_answer_in_the_log_and_in_the_metrics(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    [env] = api.opened(12, 8)
    assert api.post("/scored_data", group(1, 8, env)) == {"status": "received"}, "a second size may come"
    assert api.get("/status") == {"current_step": 0, "queue_size": 1}
    for name in (2, 3):
        said = api.post("/scored_data", group(name, 8, env))
        assert said["status"] == "received"
        assert "no groups make up its 8 sequences to batch_size 12" in said["warning"]
    said = api.post("/scored_data_list", [group(4, 8, env), group(5, 8, env)])
    assert (said["groups_processed"], "batch_size 12" in said["warning"]) == (2, True)
    status = api.get("/status")
    assert (status["queue_size"], status["dead_letters"]) == (0, {"unmatched": 5})
    assert "another group_size" in status["warning"]
    assert api.get("/batch") == {"batch": None}
    assert len([record for record in caplog.records if record.message.startswith("groups are dropped")]) == 1
    metrics = api.client.get("/metrics").text
    assert 'headrace_api_dead_letters_total{why="unmatched"} 5' in metrics
    assert tasks_of("api", metrics)["api tasks"] >= 1  # the one that tells it


def test_an_environment_whose_groups_no_batch_can_hold_is_told_when_it_registers(api: Api) -> None:
    api.opened(12)
    found = api.post("/register-env", environment(8))
    assert "no groups make up its 8 sequences to batch_size 12" in found["warning"]
    assert "warning" not in api.post("/register-env", environment(4))
    assert "warning" not in api.post("/register-env", environment(8)), "of 8 and 4 there is a batch"


def test_an_environment_whose_sizes_never_fit_is_held_until_they_may(api: Api) -> None:
    misfit, other = api.opened(12, 8, 12)
    for name in range(6):
        api.post("/scored_data", group(name, 8, misfit))
    held = api.get("/status-env", {"env_id": misfit})
    assert (held["queue_size"], held["self_queue_size"]) == (6, 6)
    assert "batch_size 12" in held["warning"]
    free = api.get("/status-env", {"env_id": other})
    assert (free["queue_size"], "warning" in free) == (0, False), "what no batch takes is in nobody else's way"
    api.post("/register", {**registration(batch_size=16), "resume": True})
    assert api.get("/status-env", {"env_id": misfit})["queue_size"] == 0
    assert "warning" not in api.get("/status")
    api.send(group(7, 8, misfit), group(8, 8, misfit))
    assert api.batch() == [7, 8]


def test_an_environment_whose_groups_the_trainer_cannot_fetch_is_told_why(pool: DataPool) -> None:
    with api_on(pool, serve_channel="train") as api:
        [env, other] = api.opened(8, 2, 2)
        api.send({"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0], "env_id": env})
        assert "warning" not in api.get("/status-env", {"env_id": env})
        assert pool.fetch_batch(1, timeout=0) is None
        for found in (api.get("/status"), api.get("/status-env", {"env_id": env})):
            assert found["queue_size"] == 1
            assert "only GET /batch: tokens[0] has 1 entries" in found["warning"]
        assert "warning" not in api.get("/status-env", {"env_id": other})


def test_an_environment_of_which_some_groups_fit_is_not_held(api: Api) -> None:
    [env] = api.opened(8, 4)
    for name in range(3):
        assert "group_size 4" in api.post("/scored_data", group(name, 6, env))["warning"]
    assert api.get("/status-env", {"env_id": env})["queue_size"] == 4
    api.send(group(9, 4, env))
    assert api.get("/status-env", {"env_id": env})["queue_size"] == 1


def test_optional_fields_of_another_length_are_served_as_they_came(api: Api) -> None:
    [env] = api.opened(2, 2)
    odd = {"inference_logprobs": [[-0.5]], "advantages": [[1.0, 2.0, 3.0, 4.0]], "ref_logprobs": [[], [], []]}
    api.send(group(1, 2, env, **odd))
    [served] = api.get("/batch")["batch"]
    assert {name: served[name] for name in odd} == odd


def test_a_trainer_is_told_what_waits_and_fits_none_of_its_batches(api: Api) -> None:
    api.send(group(1, 8))
    assert "its 8 sequences exceed batch_size 4" in api.register(batch_size=4)["warning"]


def test_the_routes_are_described_without_a_network(api: Api) -> None:
    told = api.get("/openapi.json")
    assert told["openapi"].startswith("3.")
    group_schema = told["paths"]["/scored_data"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert group_schema["required"] == ["tokens", "masks", "scores"]
    served = {(path, method) for path, methods in told["paths"].items() for method in methods}
    for path, method in served:
        assert api.client.request(method, path).status_code not in (404, 405), path
    page = api.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(path in page.text for path, _ in served)
    assert "src=" not in page.text, "nothing is loaded from elsewhere"


def test_an_environment_with_a_share_and_no_data_does_not_stall_the_others(api: Api) -> None:
    api.opened(8, 4)
    api.post("/register-env", environment(4, min_batch_allocation=0.5))
    api.send(*(group(n, 4, 0) for n in range(2)))
    api.post("/disconnect-env", {"env_id": 1})
    assert api.batch() == [0, 1]


def test_a_silent_environment_has_no_weight_until_it_calls_again() -> None:
    now = [1000.0]
    with DataPool(clock=lambda: now[0]) as pool, api_on(pool, heartbeat_s=60) as api:
        first, second = api.opened(8, 4, 4)
        assert api.get("/status-env", {"env_id": first})["env_weight"] == 0.5
        now[0] += 61
        assert api.get("/status-env", {"env_id": first})["env_weight"] == 1.0
        api.send(group(1, 4, second))
        assert api.get("/status-env", {"env_id": first})["env_weight"] == 0.5


def test_a_key_protects_every_route(pool: DataPool) -> None:
    with api_on(pool, api_key="secret") as api:
        for method, path in (("GET", "/"), ("GET", "/batch"), ("POST", "/scored_data"), ("POST", "/reset_data")):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
                answer = api.client.request(method, path, headers=headers)
                assert answer.status_code == 401, path
                assert "Bearer" in answer.json()["detail"]
        keyed = Api(api.address, {"authorization": "Bearer secret"})
        keyed.opened(4, 4)
        keyed.send(group(1, 4, 0))
        assert keyed.batch() == [1]
        keyed.close()


def test_pages_of_named_origins_may_call_and_none_with_credentials(pool: DataPool) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with api_on(pool) as api:
        answer = api.client.get("/status", headers={"origin": "http://page.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert api.client.options("/scored_data", headers={"origin": "http://page.example", **asks}).status_code == 405
    with api_on(pool, allow_origin=["http://page.example"]) as api:
        for origin, named in (("http://page.example", True), ("http://other.example", False)):
            for method, path in (("GET", "/status"), ("OPTIONS", "/scored_data")):
                answer = api.client.request(method, path, headers={"origin": origin, **asks})
                assert answer.headers.get("access-control-allow-origin") == (origin if named else None)
                assert "access-control-allow-credentials" not in answer.headers


def test_a_restart_keeps_registrations_queue_buffers_and_step(tmp_path: Path) -> None:
    with DataPool(tmp_path) as pool, api_on(pool) as api:
        api.opened(4, 4)
        api.send(group(1, 4, 0), group(2, 4, 0))
        assert api.batch() == [1]
        assert api.post("/scored_data", group(3, 3, 0))["buffer_size"] == 3
    with DataPool(tmp_path) as pool, api_on(pool) as api:
        assert api.get("/info") == {"batch_size": 4, "max_token_len": 512}
        assert api.get("/status") == {"current_step": 1, "queue_size": 1}
        assert api.post("/register-env", environment(4)) == joined(1, "env_1", step=1)
        assert api.post("/scored_data", group(4, 1, 0)) == {"status": "buffered", "buffer_size": 0}
        api.send(group(2, 4, 0))
        assert [api.batch() for _ in range(3)] == [[2], [3, 4], [2]]


def test_a_full_disk_is_a_503_and_takes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Nobody drops a group for a 503; what was taken is served all the same, and makes room."""
    with DataPool(tmp_path, quota_mb=0.1) as pool, api_on(pool) as api:
        (env,) = api.opened(4, 4)
        codes = []
        for number in range(100):
            large = group(number, 4, env, images=random.Random(number).randbytes(4000).hex())
            answer = api.client.post("/scored_data", json=large)
            codes.append(answer.status_code)
            if answer.status_code != 200:
                break
        assert codes == [200] * (len(codes) - 1) + [503]
        assert "quota" in answer.json()["detail"]
        assert [api.batch() for _ in codes[1:]] == [[number] for number in range(len(codes) - 1)]


@pytest.mark.parametrize("compressed", [False, True])
def test_answers_are_gzip_from_a_thousand_bytes_where_that_is_wanted(api: Api, compressed: bool) -> None:
    api.opened(4)
    large = group(1, 4, images="x" * 1000)
    api.send(large, group(2, 4))
    wanted = {"accept-encoding": "gzip" if compressed else "gzip;q=0, identity"}
    for path in ("/batch", "/batch", "/status"):
        with api.client.stream("GET", path, headers=wanted) as answer:
            raw = b"".join(answer.iter_raw())
        packed = answer.headers.get("content-encoding") == "gzip"
        assert packed == (compressed and len(gzip.decompress(raw) if packed else raw) >= 1000)
