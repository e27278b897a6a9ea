"""The same routes beside a gateway's, on its pool, and on a pool that runs elsewhere; any producer, any consumer."""

from __future__ import annotations

from pathlib import Path

from tests.api.kit import Api, api_on, until
from tests.atropos.groups import full, group
from tests.cli.command import steps
from tests.gateway.kit import running_gateway, serving

from headrace import DataPool, connect
from headrace.pool.http import create_app as pool_app
from headrace.storm.soak import tasks_of

NOWHERE = "http://127.0.0.1:1"


def test_a_gateway_serves_the_routes_on_its_own_pool(pool: DataPool, folder: Path) -> None:
    with running_gateway(pool, NOWHERE, folder, until_ready=False) as gateway:
        api = Api(gateway.address)
        (env,) = api.opened(4, 4)
        api.send(group(1, 4, env), group(2, 4, env))
        assert api.get("/batch") == {"batch": [full(group(1, 4, env))]}
        until(lambda: pool.stats()["desk"]["served"] == 1)  # recorded once it was written
        assert gateway.get("/health").status_code == 200
        metrics = gateway.get("/metrics").text
        assert 'headrace_api_groups_total{end="served"} 1' in metrics
        assert tasks_of("gateway", metrics)["gateway tasks"] >= 1  # the one that tells it
        api.close()


def test_a_gateways_keys_open_them(pool: DataPool, folder: Path) -> None:
    keys = {"api_key": "agent", "reward_key": "pays", "admin_key": "admin"}
    with running_gateway(pool, NOWHERE, folder, until_ready=False, **keys) as gateway:
        answers = {}
        for key in ("wrong", *keys.values()):
            api = Api(gateway.address, {"authorization": f"Bearer {key}"})
            answers[key] = api.client.get("/batch").status_code
            api.close()
    assert answers == {"wrong": 401, "agent": 401, "pays": 401, "admin": 200}


def test_a_pool_that_runs_elsewhere_does_as_well() -> None:
    with DataPool() as pool, serving(pool_app(pool), lifespan=False) as address, connect(address) as remote:
        with api_on(remote) as api:
            (env,) = api.opened(8, 4)
            api.send(group(1, 4, env))
            api.send(group(1, 4, env))
            assert api.get("/batch") == {"batch": [full(group(1, 4, env))] * 2}
        assert pool.stats()["desk"]["served"] == 2


def test_a_trainer_is_served_what_a_channel_holds(pool: DataPool) -> None:
    pool.configure("train", n_rollouts=2)
    with api_on(pool, serve_channel="train") as api:
        api.opened(2)
        pool.submit_steps([*steps("a", 0), *steps("a", 1)])
        (served,) = api.get("/batch")["batch"]
    assert served["scores"] == [0.0, 1.0]
    for tokens, masks, probs in zip(served["tokens"], served["masks"], served["inference_logprobs"], strict=True):
        assert tokens[:3] == [1, 2, 3]
        assert [mask for mask in masks if mask != -100] == [tokens[at] for at in (3, 4, 6, 7)]
        assert [prob == 1.0 for prob in probs] == [mask == -100 for mask in masks]
    assert pool.stats("train")["ledger"]["consumed"] == 4


def test_fetch_batch_is_served_what_an_environment_posted(pool: DataPool) -> None:
    with api_on(pool, serve_channel="train") as api:
        (env,) = api.opened(8, 4)
        api.send(group(1, 4, env))
        batch = pool.fetch_batch(1, timeout=0)
    assert batch is not None
    (found,) = batch.groups
    assert found.rewards == [0.0, 0.25, 0.5, 0.75]
    assert [sequence.tokens.tolist() for sequence in found.sequences()] == group(1, 4, env)["tokens"]


def test_without_the_flag_the_two_do_not_meet(pool: DataPool, api: Api) -> None:
    (env,) = api.opened(8, 4)
    api.send(group(1, 4, env))
    assert pool.fetch_batch(1, timeout=0) is None
