"""The page in a browser: every view is opened and held against what the pool itself says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from tests.dashboard.conftest import Serving
from tests.dashboard.test_follow import submit

from headrace import DataPool, Step
from headrace.dashboard.about import About, AboutCall, AboutSection, AboutTable, AboutToken
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.single_file import collect, single_file
from headrace.dashboard.source import RunningPool
from headrace.pool.config import DEFAULT_CHANNEL

#: What agents may write, and name their trajectories.
HOSTILE = (
    "<img src=x onerror=\"document.body.dataset.owned='1'\">",
    "<script>document.body.dataset.owned='1'</script>",
    "</td></table><h1>owned</h1>",
    "\u202egnorw eb ot\u2066\u200b",
    "javascript:alert(1)",
    "a" * 500,
)


#: What a run might say of itself.
ABOUT = About(
    "A run of tests",
    "It learned what it was to learn.",
    [
        AboutSection("Time", tables=[AboutTable(["seconds", ""], [["engine", 12.5], ["gateway", 5]], bars=True)]),
        AboutSection("Tokens", calls=[AboutCall([AboutToken(7, "higher"), AboutToken(8, "6", -0.5)], "it hit")]),
    ],
)


def wait(page: Any, words: str) -> None:
    page.get_by_text(words).first.wait_for()


def settled(page: Any, trajectories: int) -> None:
    """Waits until the index has all of them."""
    page.locator("#status", has_text=re.compile(f"^{trajectories:,} trajectories$")).wait_for()


def test_the_overview_shows_the_pools_ledger_and_follows_it(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        for group in range(3):
            submit(pool, group)
        page.goto(address)
        page.wait_for_selector("[data-view=flow]")
        settled(page, 6)
        assert page.locator("#logout").is_hidden()  # there is no key

        def flow() -> dict[str, str]:
            boxes = page.locator("[data-view=flow] > div:not(.arrow)")
            return {box.locator("small").first.inner_text(): box.locator("b").inner_text() for box in boxes.all()}

        ledger = pool.stats()["ledger"]
        assert flow()["submitted"] == str(ledger["submitted"]) == "12"
        pool.fetch_batch(1)
        page.locator("[data-view=flow] > div", has_text=re.compile("^consumed4")).wait_for()
        assert flow()["queued"] == "8"


def test_trajectories_are_found_sorted_and_paged_as_the_pool_has_them(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        for group in range(60):
            submit(pool, group)
        page.goto(f"{address}/#/trajectories")
        settled(page, 120)
        page.get_by_role("button", name="Refresh").click()
        wait(page, "1 to 50 of 120")
        page.get_by_role("button", name="Next").click()
        wait(page, "51 to 100 of 120")
        page.get_by_role("button", name="reward").click()
        wait(page, "1 to 50 of 120")
        assert set(page.locator("tbody td:nth-child(5)").all_inner_texts()) == {"1"}
        page.get_by_label("tag").select_option("odd")
        page.get_by_role("searchbox").fill("g1")
        page.keyboard.press("Enter")
        rows = pool.list_trajectories(DEFAULT_CHANNEL, limit=1000)["items"]
        odd = {row["trajectory_uid"] for row in rows if int(row["prompt_uid"][1:]) % 2 and "g1" in row["prompt_uid"]}
        wait(page, f"1 to {len(odd)} of {len(odd)}")
        assert set(page.locator("tbody td:first-child").all_inner_texts()) == odd


def test_a_step_is_shown_token_by_token(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=g0-1")
        wait(page, "Tokens of step 1")  # the last one's, which are shown at first
        page.locator("[data-step='0']").click()
        wait(page, "Tokens of step 0")
        assert page.locator(".tokens .token").all_inner_texts() == ["1", "2", "7", "8"]
        page.get_by_role("button", name="loss mask").click()
        assert page.locator(".tokens .trained").all_inner_texts() == ["7", "8"]
        assert "log-prob -1.0000" in (page.locator(".tokens .token").nth(3).get_attribute("title") or "")


def test_metadata_is_told_apart_from_the_facts_whose_names_it_has(page: Any, serving: Serving) -> None:
    metadata = {"prompt": "another", "reward": 9, "state": "consumed", "agent": "solver"}
    with DataPool() as pool, serving(pool) as address:
        pool.open("t", "p", metadata=metadata)
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid="p", reward=0.5)])
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=t")
        facts = fields(page, "facts")
        assert (facts["prompt"], facts["reward"], facts["state"]) == ("p", "0.5", "queued, open")
        assert "agent" not in facts
        assert fields(page, "metadata") == {"prompt": "another", "reward": "9", "state": "consumed", "agent": "solver"}


def test_numbers_keep_their_whole_part_and_great_ones_every_digit(page: Any, serving: Serving) -> None:
    given = [0, 0.12345, -12.345, 843.75, 1234.5, -1843.7, 999_999.5, 123_456]
    with DataPool() as pool, serving(pool) as address:
        pool.open("t", "p", metadata={"seed": 2**53 + 1, "rows": [2**53, {"id": -(2**60) - 1}]})
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid="p", reward=1843.7)])
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=t")
        assert fields(page, "facts")["reward"] == "1843.7"
        assert fields(page, "metadata") == {
            "seed": "9007199254740993",
            "rows": '[9007199254740992,{"id":"-1152921504606846977"}]',
        }
        shown = page.evaluate("given => import('./dom.js').then((dom) => given.map(dom.number))", given)
        assert shown == ["0", "0.123", "-12.3", "843.8", "1234.5", "-1843.7", "999999.5", "123,456"]


def fields(page: Any, view: str) -> dict[str, str]:
    """A list of names and values that the page shows."""
    shown = page.locator(f"dl[data-view={view}]")
    shown.wait_for()
    return dict(zip(shown.locator("dt").all_inner_texts(), shown.locator("dd").all_inner_texts(), strict=True))


def test_batches_lead_to_what_became_of_their_calls_and_back(page: Any, serving: Serving, tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        for group in range(3):
            submit(pool, group)
        pool.fetch_batch(2, timeout=0)
        page.goto(f"{address}/#/consumption")
        page.get_by_role("link", name="batch 1", exact=True).click()
        wait(page, "Batch 1 of 2 groups was consumed on hand-out.")
        page.locator("[data-view=why] tr", has_text="step 1 of g1-1").get_by_role("link", name="look").click()
        page.get_by_role("link", name="What became of it").click()
        wait(page, "It was trained on: batch 1 was handed out for good.")
        page.get_by_role("searchbox").fill("nobody")
        page.keyboard.press("Enter")
        wait(page, "the journal tells of no trajectory, call, prompt, lease or batch 'nobody'")


def test_what_is_curated_is_in_the_pool_and_can_be_undone(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool, editable=True) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=g0-1")
        page.get_by_text("Curate by hand").click()
        page.locator("select[name=step]").select_option("1")
        page.get_by_label("trained on").select_option("no")
        page.get_by_label("note").fill("it guessed")
        page.get_by_label("your name").fill("anna")
        page.get_by_role("button", name="Change", exact=True).click()
        page.locator("td", has_text="not trainable; it guessed").wait_for()
        step = pool.trajectory("g0-1").steps[1]
        assert (step.trainable, step.note, step.metadata["curation"]["by"]) == (False, "it guessed", "anna")
        page.get_by_text("Curate by hand").click()
        page.get_by_role("button", name="Undo the last change").click()
        wait(page, "1 steps of 1 trajectories changed.")
        assert pool.trajectory("g0-1").steps[1].trainable


def test_where_nothing_may_be_changed_the_page_offers_no_change(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool, editable=False) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=g0-1")
        wait(page, "Tokens of step 1")
        assert page.get_by_text("Curate by hand").count() == 0
        page.goto(f"{address}/#/trajectories")
        settled(page, 2)
        page.get_by_role("button", name="Find").click()
        wait(page, "1 to 2 of 2")
        assert page.get_by_text("Curate by hand").count() == 0
        assert page.get_by_text("Download all 2").count() == 1


def test_a_group_shows_what_its_trajectories_share(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/groups")
        settled(page, 2)
        page.get_by_role("button", name="Find").click()
        page.get_by_text("What they share, and where they part").click()
        wait(page, "4 sequences of 24 tokens; 10 are different ones, so 58 % need not be computed twice.")
        assert page.locator("svg.prefix rect.shared").count() >= 1


def test_what_a_filter_shows_is_downloaded(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        for group in range(3):
            submit(pool, group)
        page.goto(f"{address}/#/trajectories?tag=odd")
        settled(page, 6)
        page.get_by_role("button", name="Find").click()
        wait(page, "1 to 2 of 2")
        with page.expect_download() as begun:
            page.get_by_role("link", name="steps (JSONL)").click()
        rows = [orjson.loads(line) for line in Path(begun.value.path()).read_bytes().splitlines()]
        assert {row["trajectory_uid"] for row in rows} == {"g1-0", "g1-1"}


def test_files_of_steps_are_offered_once_they_are_of_one_channel(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t")], channel="eval")
        page.goto(f"{address}/#/trajectories")
        settled(page, 3)
        page.get_by_role("button", name="Find").click()
        wait(page, "steps and sequences once a channel is chosen")
        assert page.locator(".exports a").all_inner_texts() == [
            "conversations (SFT)",
            "best against worst (preferences)",
        ]
        page.get_by_label("channel").select_option("eval")
        page.get_by_role("button", name="Find").click()
        with page.expect_download() as begun:
            page.get_by_role("link", name="steps (JSONL)").click()
        assert orjson.loads(Path(begun.value.path()).read_bytes())["trajectory_uid"] == "t"


def test_one_file_shows_the_same_without_a_server(page: Any, tmp_path: Path) -> None:
    async def written(pool: DataPool) -> bytes:
        async with Dashboard(RunningPool(pool, "a file of tests"), about=lambda: ABOUT) as dashboard:
            return single_file(await collect(dashboard))

    with DataPool(defaults={"n_rollouts": 2}) as pool:
        for group in range(30):
            submit(pool, group)
        (tmp_path / "run.html").write_bytes(in_a_loop_of_its_own(written(pool)))
    page.goto(f"file://{tmp_path}/run.html")
    page.wait_for_selector("[data-view=flow]")
    assert page.locator("[data-view=flow] > div b").first.inner_text() == "120"
    page.keyboard.press("t")
    wait(page, "1 to 50 of 60")
    page.get_by_role("searchbox").fill("g29")
    page.keyboard.press("Enter")
    wait(page, "1 to 2 of 2")
    page.locator("tbody a").first.click()
    wait(page, "Tokens of step 1")
    page.locator("[data-step='0']").click()
    wait(page, "Tokens of step 0")
    assert page.locator(".tokens .token").all_inner_texts() == ["1", "2", "7", "8"]
    page.keyboard.press("t")
    page.get_by_label("text or metadata").fill("ODD")
    page.keyboard.press("Enter")
    wait(page, "30 found in 60 read")
    page.keyboard.press("g")
    page.get_by_text("What they share, and where they part").first.click()
    wait(page, "4 sequences of 24 tokens")
    page.get_by_role("link", name="This run").click()
    wait(page, "It learned what it was to learn.")
    assert page.locator("[data-view=about] td").all_inner_texts() == ["engine", "12.5", "", "gateway", "5", ""]
    assert page.locator("[data-view=about] .token").all_inner_texts() == ["higher ", "6 "]
    assert page.locator("[data-view=about] .shade1").all_inner_texts() == ["6 "]
    page.keyboard.press("o")
    page.locator("[data-view=outcome]", has_text="It learned what it was to learn.").wait_for()
    assert page.title() == "A run of tests"


def in_a_loop_of_its_own(work: Coroutine[Any, Any, bytes]) -> bytes:
    """What a coroutine returns; in a thread, since playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def test_hostile_names_and_texts_are_text(page: Any, serving: Serving) -> None:
    with DataPool() as pool, serving(pool) as address:
        pool.submit_steps(
            [
                Step(
                    prompt_ids=[1],
                    response_ids=[2],
                    trajectory_uid=f"t{number}",
                    prompt_uid=text,
                    step_index=0,
                    tags=(text[:50],),
                    note=text,
                    metadata={text: text, "long": "x" * 1_000_000},
                )
                for number, text in enumerate(HOSTILE)
            ]
        )
        page.goto(address)
        settled(page, len(HOSTILE))
        for view in ("overview", "trajectories", "groups"):
            page.goto(f"{address}/#/{view}")
            page.wait_for_selector({"overview": "tbody", "trajectories": "tbody", "groups": ".group"}[view])
            assert page.locator("main h1").count() == 1
        for number, text in enumerate(HOSTILE):
            page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=t{number}")
            page.locator("main h1", has_text=re.compile(f"^t{number}$")).wait_for()
            page.wait_for_selector("[data-view=tokens] .token")
            shown = page.locator("dl.facts dd").first.inner_text()
            assert shown == text.replace("\u202e", "U+202E").replace("\u2066", "U+2066").replace("\u200b", "U+200B")
        assert page.evaluate("document.body.dataset.owned") is None
        assert page.locator("img").count() == 0


def test_a_key_is_asked_for_and_stays_out_of_the_address(page: Any, serving: Serving) -> None:
    with DataPool() as pool, serving(pool, key="s3cret") as address:
        page.goto(address)
        page.get_by_label("key of this server").fill("wrong")
        page.keyboard.press("Enter")
        wait(page, "this is not the key")
        page.get_by_label("key of this server").fill("s3cret")
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-view=flow]")
        assert "s3cret" not in page.url
        page.reload()
        page.wait_for_selector("[data-view=flow]")
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("key of this server").wait_for()
        page.reload()
        page.get_by_label("key of this server").wait_for()


def test_a_server_that_goes_away_is_said_and_comes_back(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        with serving(pool) as address:
            page.goto(address)
            page.wait_for_selector("[data-view=flow]")
        page.wait_for_selector("#trouble:not([hidden])")
        page.get_by_role("link", name="Consumption").click()
        with serving(pool, port=urlsplit(address).port):
            page.wait_for_selector("#trouble", state="hidden")
            wait(page, "What happened")  # in the view that was opened meanwhile


def test_what_was_refused_stands_in_the_view_below_the_form_that_asked(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/trajectories")
        settled(page, 2)
        page.get_by_label("text or metadata").fill(" ")
        page.get_by_role("button", name="Find").click()
        failure = page.locator("main > .failure")
        failure.wait_for()
        assert failure.inner_text() == "text is blank; give what is looked for"
        submit(pool, 1)
        settled(page, 4)  # by a live message
        assert failure.count() == 1
        assert page.locator("#trouble").is_hidden()
        page.get_by_label("text or metadata").fill("")
        page.get_by_role("button", name="Find").click()
        wait(page, "1 to 4 of 4")
        assert failure.count() == 0
        page.goto(f"{address}/#/trajectories?min_reward=abc")
        failure.wait_for()
        assert "min_reward" in failure.inner_text()
        assert page.get_by_role("button", name="Find").count() == 1


def test_what_is_pressed_and_refused_is_said(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.goto(f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid=g0-1")
        wait(page, "Tokens of step 1")
        pool.fetch_batch(1)
        page.locator("[data-step='0']").click()
        page.locator("main > .failure", has_text="'g0-1'").wait_for()


def test_it_can_be_used_by_keys_alone(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.goto(address)
        settled(page, 2)
        page.keyboard.press("t")
        page.wait_for_selector("input[type=search]")
        page.keyboard.press("/")
        page.keyboard.type("g0-1")
        page.keyboard.press("Enter")
        wait(page, "1 to 1 of 1")
        page.locator("tbody a").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-view=tokens] .token")


@pytest.mark.parametrize("width", [1440, 820, 390])
def test_nothing_is_wider_than_the_screen(page: Any, serving: Serving, width: int) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(address)
        settled(page, 2)
        for view in (
            "overview",
            "trajectories",
            "groups",
            "consumption",
            f"trajectory?channel={DEFAULT_CHANNEL}&uid=g0-1",
        ):
            page.goto(f"{address}/#/{view}")
            page.wait_for_selector("main h1")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_a_hundred_thousand_steps_and_ten_thousand_in_one_trajectory(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 8}) as pool, serving(pool) as address:
        for group in range(1_400):
            submit(pool, group, rollouts=8, steps=8)
        for first in range(0, 10_400, 400):
            pool.submit_steps(
                [
                    Step(prompt_ids=[1], response_ids=[index % 9], trajectory_uid="long", step_index=index)
                    for index in range(first, first + 400)
                ]
            )
        assert pool.stats()["ledger"]["submitted"] == 100_000
        page.goto(f"{address}/#/trajectories?find=g77")
        settled(page, 11_201)
        page.get_by_role("button", name="Find").click()
        wait(page, "1 to 50 of 88")
        page.goto(f"{address}/#/trajectories?sort=steps")
        wait(page, "1 to 50 of 11,201")
        assert page.locator("tbody td:first-child").first.inner_text() == "long"
        page.locator("tbody a").first.click()
        wait(page, "More steps")
        assert page.locator("[data-step]").count() == 200
