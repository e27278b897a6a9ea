"""The contract's table, route by route."""

from __future__ import annotations

from tests.api.kit import Api
from tests.atropos.groups import KEYS, full, group
from tests.atropos.words import NO_EXAMPLE, NOT_REGISTERED, WAIT, environment, joined, registration


def test_the_root_has_a_message(api: Api) -> None:
    assert set(api.get("/")) == {"message"}


def test_register_answers_with_a_number_of_128_bits(api: Api) -> None:
    uuids = [api.register()["uuid"] for _ in range(4)]
    assert len(set(uuids)) == 4
    assert 64 < max(uuids).bit_length() <= 128


def test_register_needs_every_field(api: Api) -> None:
    for name in registration():
        answer = api.client.post("/register", json={k: v for k, v in registration().items() if k != name})
        assert answer.status_code == 422
        assert name in answer.json()["detail"]


def test_environments_wait_for_the_trainers_first_batch(api: Api) -> None:
    assert api.post("/register-env", environment(4)) == WAIT
    api.register(starting_step=7)
    assert api.post("/register-env", environment(4)) == WAIT
    api.get("/batch")
    assert api.post("/register-env", environment(4)) == joined(0, "env_0", step=7)
    assert api.post("/register-env", environment(4)) == joined(1, "env_1", step=7)
    assert api.post("/register-env", environment(4, desired_name="other")) == joined(2, "other_0", step=7)


def test_an_environment_that_comes_later_begins_at_the_current_step(api: Api) -> None:
    (env,) = api.opened(4, 4)
    api.send(group(1, 4, env))
    api.batch()
    assert api.post("/register-env", environment(4))["starting_step"] == 1


def test_disconnect_env(api: Api) -> None:
    (env,) = api.opened(8, 4)
    assert api.post("/disconnect-env", {"env_id": env}) == {"status": "success"}
    failed = api.post("/disconnect-env", {"env_id": env + 1})
    assert failed["status"] == "failure"
    assert str(env + 1) in failed["error"]


def test_wandb_info_and_info(api: Api) -> None:
    assert api.get("/wandb_info") == {"group": None, "project": None}
    assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    api.register()
    assert api.get("/wandb_info") == {"group": "a group", "project": "a project"}
    assert api.get("/info") == {"batch_size": 8, "max_token_len": 512}


def test_batch(api: Api) -> None:
    assert api.get("/batch") == NOT_REGISTERED
    (env,) = api.opened(8, 4)
    api.send(group(1, 4, env))
    assert api.get("/batch") == {"batch": None}
    api.send(group(2, 4, env))
    assert api.get("/batch") == {"batch": [full(group(1, 4, env)), full(group(2, 4, env))]}
    assert api.get("/batch") == {"batch": None}


def test_a_served_group_has_fourteen_keys_and_no_unknown_one(api: Api) -> None:
    api.opened(4)
    api.send(group(1, 4, unknown=1))
    (served,) = api.get("/batch")["batch"]
    assert set(served) == set(KEYS)
    assert len(KEYS) == 14


def test_latest_example(api: Api) -> None:
    assert api.get("/latest_example") == NO_EXAMPLE
    api.send(group(1, 4), group(2, 4))
    assert api.get("/latest_example") == full(group(2, 4))


def test_scored_data_is_received_or_buffered(api: Api) -> None:
    (env,) = api.opened(8, 4)
    assert api.post("/scored_data", group(1, 4, env)) == {"status": "received"}
    assert api.post("/scored_data", group(2, 3, env)) == {"status": "buffered", "buffer_size": 3}
    assert api.post("/scored_data", group(3, 1, env)) == {"status": "buffered", "buffer_size": 0}
    assert api.get("/status") == {"current_step": 0, "queue_size": 3}


def test_scored_data_list_is_taken_whole_or_not_at_all(api: Api) -> None:
    (env,) = api.opened(8, 4)
    wrong = [group(1, 4, env), group(2, 4, env, scores=["x"] * 4)]
    answer = api.client.post("/scored_data_list", json=wrong)
    assert (answer.status_code, api.queued()) == (422, 0)
    assert "group 1: scores[0]" in answer.json()["detail"]
    taken = api.post("/scored_data_list", [group(1, 4, env), group(2, 2, env), group(3, 1, env)])
    assert taken == {"status": "received", "groups_processed": 3, "buffered": 2, "last_buffer_size": 3}
    assert api.post("/scored_data_list", []) == {"status": "received", "groups_processed": 0}


def test_status_counts_batches_and_groups(api: Api) -> None:
    (env,) = api.opened(4, 4)
    api.send(*(group(n, 4, env) for n in range(3)))
    api.batch()
    assert api.get("/status") == {"current_step": 1, "queue_size": 2}


def test_status_env_by_body_and_by_query(api: Api) -> None:
    first, _ = api.opened(8, 4, 4)
    api.send(group(1, 4, first))
    said = {"current_step": 0, "queue_size": 1, "env_weight": 0.5, "unallocated_fraction": 1.0}
    said |= {"self_queue_size": 1, "max_group_size": 4}
    assert api.get("/status-env", {"env_id": first}) == said
    assert api.get(f"/status-env?env_id={first}") == said
    assert api.client.get("/status-env").status_code == 422


def test_what_is_not_there_is_answered_as_json(api: Api) -> None:
    answer = api.client.get("/batches")
    assert (answer.status_code, answer.json()) == (404, {"detail": "there is no /batches here"})


def test_reset_by_get_and_by_post(api: Api) -> None:
    for method in ("GET", "POST"):
        api.opened(8, 4)
        api.send(group(1, 4, 0))
        answer = api.client.request(method, "/reset_data")
        assert (answer.status_code, answer.text) == (200, "Reset successful")
        assert answer.headers["content-type"].startswith("text/plain")
        assert api.get("/status") == {"current_step": 0, "queue_size": 0}
        assert api.get("/info")["batch_size"] == -1
