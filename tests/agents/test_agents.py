"""Command-line agents as they are, started as their examples start them; what they did is one line of exact steps."""

from __future__ import annotations

from tests.agents.kit import Place, called, thought


def test_claude_code_edits_a_file(place: Place) -> None:
    """It fills an argument's default into the call that it sends back, which is the same call all the same."""
    path = place.work / "a.txt"
    path.write_text("one\n")
    said = [
        thought("I should look first.", "I will look." + called("Read", file_path=str(path))),
        called("Edit", file_path=str(path), old_string="one", new_string="two"),
        thought("Is it so?", called("Bash", command="cat a.txt", description="Show it")),
        "It says two.",
    ]
    place.rollout.script += said
    assert place.run("gateway_claude_code.sh") == ["It says two.", '{"status":"ok","steps":4}']
    assert path.read_text() == "two\n"
    place.holds(said)


def test_codex_writes_a_file(place: Place) -> None:
    """Its tools for other agents are a namespace; that no agent has such a name is for it to say."""
    said = [
        thought("I should look first.", "I will look." + called("exec_command", cmd="ls")),
        called("exec_command", cmd="echo two > a.txt") + "\n" + called("exec_command", cmd="pwd"),
        called("multi_agent_v1.close_agent", target="nobody"),
        thought("Is it so?", called("exec_command", cmd="cat a.txt")),
        "It says two.",
    ]
    place.rollout.script += said
    assert place.run("gateway_codex.sh") == ["It says two.", '{"status":"ok","steps":5}']
    assert (place.work / "a.txt").read_text() == "two\n"
    place.holds(said)


def test_the_vercel_ai_sdk_goes_on_by_references(place: Place) -> None:
    """Its default OpenAI provider; the second sum is one that JavaScript rounds on its way back."""
    said = [
        thought("I should add.", "Let me add." + called("add", a=2, b=3)),
        "It is 5.",
        thought("Both ways.", called("add", a=5, b=5) + "\n" + called("add", a=5, b=1234567890123456789)),
        thought("Done.", "It is 10."),
    ]
    place.rollout.script += said
    assert place.run("gateway_vercel.mjs") == ["It is 5.", "It is 10.", '{"status":"ok","steps":4}']
    place.holds(said)
