"""Claude Code as it is, with only ANTHROPIC_BASE_URL changed."""

from __future__ import annotations

from tests.agents.kit import Place, called, thought
from tests.agents.npm import program

ENVIRONMENT = {"ANTHROPIC_API_KEY": "not-needed", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


def test_it_edits_a_file_in_one_line_of_exact_steps(place: Place) -> None:
    path = place.work / "a.txt"
    path.write_text("one\n")
    said = [
        thought("I should look first.", "I will look." + called("Read", file_path=str(path))),
        called("Edit", file_path=str(path), old_string="one", new_string="two"),
        thought("Is it so?", called("Bash", command="cat a.txt", description="Show it")),
        "It says two.",
    ]
    place.rollout.script += said
    told = place.run(
        program("claude"),
        *("-p", "Replace one by two in a.txt.", "--allowedTools", "Read,Edit,Bash"),
        **ENVIRONMENT,
        ANTHROPIC_BASE_URL=place.base_url,
    )
    assert told.strip() == "It says two."
    assert path.read_text() == "two\n"
    place.holds(said)
