"""Codex as it is, told of a provider with our base_url and left without the tools that are not functions."""

from __future__ import annotations

from tests.agents.kit import Place, called, thought
from tests.agents.npm import program


def test_it_writes_a_file_in_one_line_of_exact_steps(place: Place) -> None:
    said = [
        thought("I should look first.", "I will look." + called("exec_command", cmd="ls")),
        called("exec_command", cmd="echo two > a.txt") + "\n" + called("exec_command", cmd="pwd"),
        thought("Is it so?", called("exec_command", cmd="cat a.txt")),
        "It says two.",
    ]
    place.rollout.script += said
    provider = f'{{name = "headrace", base_url = "{place.base_url}/v1", wire_api = "responses"}}'
    told = place.run(
        program("codex"),
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        *("-c", f"model_providers.headrace={provider}", "-c", 'model_provider="headrace"', "-c", 'model="any"'),
        *("-c", 'web_search="disabled"', "--disable", "multi_agent"),
        "Write two into a.txt.",
        CODEX_HOME=str(place.home),
    )
    assert told.strip() == "It says two."
    assert (place.work / "a.txt").read_text() == "two\n"
    place.holds(said)
