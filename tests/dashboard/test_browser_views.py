"""The page in a browser: colours by advantage, parts of rewards, images, and what made a branch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.conftest import Serving
from tests.dashboard.pictures import SVG, data_url, in_every_dialect, picture, submit_messages, submit_placed
from tests.dashboard.test_branches import branched
from tests.dashboard.test_browser import HOSTILE, settled, wait
from tests.dashboard.test_earned import two_steps
from tests.dashboard.test_follow import submit

from headrace import DataPool
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.tokens import Message, Renderer, load_renderer

#: Where screenshots are written, at three sizes, light and dark; none where it is not set.
SHOTS = os.environ.get("HEADRACE_SHOTS")


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


def shoot(page: Any, name: str) -> None:
    """Writes what the page shows, for people to look at."""
    for scheme in ("light", "dark") if SHOTS else ():
        page.emulate_media(color_scheme=scheme)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            page.screenshot(path=f"{SHOTS}/{name}-{scheme}-{width}.png", full_page=True)
    page.set_viewport_size({"width": 1280, "height": 900})


def fits(page: Any) -> bool:
    """Whether nothing is wider than a phone's screen."""
    page.set_viewport_size({"width": 390, "height": 800})
    found: bool = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1280, "height": 900})
    return found


def at(address: str, uid: str) -> str:
    return f"{address}/#/trajectory?channel={DEFAULT_CHANNEL}&uid={uid}"


def test_tokens_are_coloured_by_advantage_and_the_legend_says_whose(page: Any, serving: Serving) -> None:
    said = {"scored_group": True, "advantages": [0.0, 0.0, 0.5, -2.0, 0.0, 0.0]}
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0)
        two_steps(pool, "said", (None, 1.0), metadata=said)
        page.goto(address)
        settled(page, 3)
        page.goto(at(address, "g0-0"))
        page.locator("[data-step='0']").click()
        wait(page, "Tokens of step 0")
        page.get_by_role("button", name="advantage").click()
        wait(page, "Advantages: computed here from the group's rewards, as GRPO does")
        assert page.locator(".tokens .down2").all_inner_texts() == ["7", "8"]
        title = page.locator(".tokens .down2").first.get_attribute("title") or ""
        assert "id 7" in title
        assert "advantage -0.7071" in title
        page.goto(at(address, "said"))
        page.locator("[data-step='0']").click()
        wait(page, "Tokens of step 0")
        page.get_by_role("button", name="advantage").click()
        wait(page, "Advantages: sent by the environment, token by token.")
        assert page.locator(".tokens .up1").all_inner_texts() == ["3"]
        assert page.locator(".tokens .down2").all_inner_texts() == ["4"]
        shoot(page, "advantage")


def test_a_group_shows_rewards_with_their_parts_and_advantages(page: Any, serving: Serving) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, serving(pool) as address:
        submit(pool, 0, ended=False)
        for rollout, (reward, accuracy, form) in enumerate(((0.2, 0.0, 0.2), (1.1, 1.0, 0.1))):
            info = {"accuracy": accuracy, HOSTILE[0]: form, "comment": "not a part"}
            pool.reward(f"g0-{rollout}", reward, 1, info=info)
        page.goto(address)
        settled(page, 2)
        page.goto(f"{address}/#/groups")
        page.wait_for_selector(".group tbody tr")
        heads = page.locator(".group thead th").all_inner_texts()
        assert heads == ["trajectory", "", "reward", "advantage", "accuracy", HOSTILE[0], "state"]
        rows = {
            row.locator("td").first.inner_text(): [cell.inner_text() for cell in row.locator("td").all()[2:6]]
            for row in page.locator(".group tbody tr").all()
        }
        assert rows == {"g0-0": ["0.2", "-0.707", "0", "0.2"], "g0-1": ["1.1", "+0.707", "1", "0.1"]}
        assert page.evaluate("document.body.dataset.owned") is None
        assert fits(page)
        shoot(page, "group")


def test_two_runs_show_the_parts_of_their_rewards(page: Any, serving: Serving) -> None:
    from headrace.dashboard.dashboard import Dashboard
    from headrace.dashboard.source import RunningPool

    with DataPool(defaults={"n_rollouts": 2}) as pool, DataPool(defaults={"n_rollouts": 2}) as other:
        for one, accuracy in ((pool, 1.0), (other, 0.25)):
            submit(one, 0, ended=False)
            one.reward("g0-0", 1.0, 1, info={"accuracy": accuracy})
        with serving(pool, beside=Dashboard(RunningPool(other, "another run"))) as address:
            page.goto(f"{address}/#/compare")
            wait(page, "What rewards are made of")
            row = page.locator("tr", has_text="accuracy")
            assert row.locator("td").all_inner_texts() == ["accuracy", "1", "0.25"]
            shoot(page, "compare")


def test_images_are_shown_and_nothing_else_that_says_it_is_one(page: Any, serving: Serving, renderer: Renderer) -> None:
    hostile = [
        {"type": "image_url", "image_url": {"url": url}}
        for url in (
            data_url(SVG, "image/svg+xml"),
            data_url(SVG),
            "javascript:document.body.dataset.owned=1",
            "https://example.org/tracking.png",
            "data:text/html,<script>document.body.dataset.owned=1</script>",
        )
    ]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with DataPool() as pool, serving(pool, renderer=lambda: renderer) as address:
        submit_messages(pool, "dialects", in_every_dialect(picture()))
        submit_messages(pool, "hostile", [{"role": "user", "content": [{"type": "text", "text": "look"}, *hostile]}])
        submit_placed(pool, renderer, "placed", [picture(color="red"), picture("JPEG", (300, 200), "navy")])
        page.goto(at(address, "dialects"))
        page.wait_for_selector("figure img")
        assert page.locator("figure img").count() == 3
        page.wait_for_function("[...document.querySelectorAll('figure img')].every((one) => one.naturalWidth === 48)")
        shoot(page, "images")
        page.goto(at(address, "placed"))
        wait(page, "What are these?")
        page.wait_for_function("document.querySelectorAll('figure img')[1]?.naturalWidth === 300")
        assert fits(page)
        shoot(page, "placed")
        page.goto(at(address, "hostile"))
        wait(page, "elsewhere, and not fetched: https://example.org/tracking.png")
        assert page.locator("main img").count() == 0
        assert page.locator(".pictures p").count() == len(hostile)
        assert page.evaluate("document.body.dataset.owned") is None
        shoot(page, "hostile")
        assert all(url.startswith((address, "data:image/")) for url in asked)


def test_what_made_a_branch_is_shown_as_a_diff(page: Any, serving: Serving, renderer: Renderer) -> None:
    sent = [Message("user", "2 + 2?"), Message("assistant", HOSTILE[0]), Message("user", "well?")]
    with DataPool() as pool, serving(pool, renderer=lambda: renderer) as address:
        branched(pool, renderer, sent)
        page.goto(at(address, "t"))
        wait(page, "What made this branch")
        wait(page, "message 2 (assistant) is the first that differs.")
        box = page.locator(".diff")
        assert "let me see" in "".join(box.locator("del").all_inner_texts())
        assert "onerror" in "".join(box.locator("ins").all_inner_texts())
        assert page.evaluate("document.body.dataset.owned") is None
        assert fits(page)
        shoot(page, "branch")
        page.get_by_role("button", name="to step 1").click()
        wait(page, "five")
        assert page.locator("[data-view=difference]").count() == 0


def test_a_conversation_in_a_few_words_has_roles(page: Any, serving: Serving, tmp_path: Path) -> None:
    from tests.rewards.recorded import steps_of

    from headrace.demo.model import WORDS
    from headrace.engine import words

    small = load_renderer(words.build(tmp_path / "model", WORDS))
    with DataPool() as pool, serving(pool, renderer=lambda: small) as address:
        pool.submit_steps(steps_of(small, [("guess", "3"), ("higher", "5")], trajectory_uid="t"))
        page.goto(at(address, "t"))
        page.wait_for_selector(".message.assistant")
        messages = page.locator(".message").all()
        said = [(one.locator(".role").inner_text().lower(), one.locator(".text").inner_text()) for one in messages]
        assert said == [
            ("user", "guess"),
            ("assistant", "3"),
            ("user", "higher"),
            ("assistant", "5"),
        ]
