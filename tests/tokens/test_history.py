"""The tree that calls make: who continues whom, and why a branch begins."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from tests.tokens.kit import LOOK_UP, STOPS, Talk
from tests.tokens.models import NAMES, renderer

from headrace.data import Step
from headrace.tokens import RECORD, Cause, History, Node

NAME = "qwen2.5"
END = STOPS[NAME]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def talk() -> Talk:
    return Talk(renderer(NAME))


def shape(history: History) -> dict[Any, Any]:
    return {node.step: None if node.parent is None else node.parent.step for node in history.nodes}


def last_cause(talk: Talk, before: dict[Cause, int]) -> Cause:
    (cause,) = (cause for cause in Cause if talk.causes[cause] > before.get(cause, 0))
    return cause


def test_a_conversation_that_grows_is_one_branch(talk: Talk) -> None:
    messages = [SYSTEM, user("one")]
    for text in ("a", "b", "c"):
        answer, _ = talk.say(messages, text, END)
        messages = [*messages, answer, user("more")]
    assert shape(talk.history) == {0: None, 1: 0, 2: 1}
    assert talk.causes == {Cause.FIRST: 1, Cause.EXTENDED: 2}


def test_two_sub_agents_and_a_compaction_give_the_right_tree(talk: Talk) -> None:
    main = [SYSTEM, user("plan a trip")]
    answer, _ = talk.say(main, "I will ask two helpers.", END)  # 0
    main = [*main, answer]
    for topic in ("trains", "hotels"):  # 1, 2 and 3, 4
        sub = [{"role": "system", "content": f"You know {topic}."}, user(f"find {topic}")]
        said, _ = talk.say(sub, f"{topic}!", END)
        talk.say([*sub, said, user("sure?")], "yes", END)
    main = [*main, user("they found trains and hotels")]
    said, _ = talk.say(main, "Good.", END)  # 5, continues 0
    compacted = [SYSTEM, user("Summary: a trip with trains and hotels. Go on.")]
    said, _ = talk.say(compacted, "Booked.", END)  # 6
    talk.say([*compacted, said, user("thanks")], "Bye.", END)  # 7
    assert shape(talk.history) == {0: None, 1: None, 2: 1, 3: None, 4: 3, 5: 0, 6: None, 7: 6}
    assert talk.causes == {Cause.FIRST: 1, Cause.NEW_CONVERSATION: 3, Cause.EXTENDED: 4}


def test_calls_in_parallel_from_one_node_are_its_children(talk: Talk) -> None:
    first = [user("one")]
    answer, root = talk.say(first, "a", END)
    asked = [talk.ask([*first, answer, user(text)]) for text in ("x", "y", "x")]
    nodes = [
        talk.answer(request, plan, renderer(NAME).vocabulary.encode(text))[1]
        for text, (request, plan) in zip("pqr", asked, strict=True)
    ]
    assert [node.parent for node in nodes] == [root] * 3
    assert np.array_equal(asked[0][1].ids, asked[2][1].ids)


def test_the_same_question_again_begins_beside_the_first(talk: Talk) -> None:
    _, one = talk.say([user("one")], "a", END)
    _, two = talk.say([user("one")], "b", END)
    assert (one.parent, two.parent) == (None, None)
    assert talk.causes == {Cause.FIRST: 1, Cause.REPEATED: 1}


def test_of_choices_that_look_alike_the_one_that_was_taken_is_continued(talk: Talk) -> None:
    """Two choices with the same text but other ids of their calls, and one with the same text and nothing else."""
    talk.tools = [LOOK_UP]
    text = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
    first, one = talk.say([user("one")], text, END)
    second, two = talk.say([user("one")], text, END)
    for answer, node in ((first, one), (second, two)):
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "1"}
        assert talk.ask([user("one"), answer, result])[1].parent is node


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"q": "x"}}\n</tool_call>'


def result(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "1"}


def test_text_dropped_beside_calls_is_known_by_their_ids_turn_after_turn(talk: Talk) -> None:
    """A client that sends only the calls back, every time: each prompt holds what was sampled, its text included."""
    talk.tools = [LOOK_UP]
    messages = [SYSTEM, user("one")]
    for turn in range(4):
        answer, _ = talk.say(messages, f"Let me see, {turn}.\n{CALL}", END)
        assert answer["content"] == f"Let me see, {turn}."
        messages = [*messages, {**answer, "content": None}, result(answer)]
    assert shape(talk.history) == {0: None, 1: 0, 2: 1, 3: 2}
    assert "Let me see, 2." in talk.renderer.vocabulary.decode(talk.ask(messages)[1].ids)
    steps = [
        Step(
            prompt_ids=node.whole()[: node.n_prompt].tolist(),
            response_ids=node.response.tolist(),
            trajectory_uid="t",
            step_index=index,
            metadata={RECORD: node.record.to_metadata()},
        )
        for index, node in enumerate(talk.history.nodes)
    ]
    elsewhere = Talk(talk.renderer, [LOOK_UP], history=History.from_steps(steps))
    assert np.array_equal(elsewhere.ask(messages)[1].ids, talk.ask(messages)[1].ids)


def test_of_choices_whose_text_was_dropped_the_one_whose_ids_are_sent_is_continued(talk: Talk) -> None:
    """One had text, one other text, one none: without it they look alike."""
    talk.tools = [LOOK_UP]
    said = [talk.say([user("one")], text + CALL, END) for text in ("Let me see.\n", "Hm.\n", "")]
    for answer, node in said:
        assert talk.ask([user("one"), {**answer, "content": None}, result(answer)])[1].parent is node


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content="I looked."),
        lambda m: (m.update(content=None), m["tool_calls"][0].update(id="mine")),
        lambda m: (m.update(content=None), m["tool_calls"][0]["function"].update(arguments='{"q": "y"}')),
        lambda m: (m.update(content=None), m["tool_calls"][0]["function"].update(name="other")),
        lambda m: (m.update(content=None), m["tool_calls"].append({**m["tool_calls"][0], "id": "mine"})),
        lambda m: m.update(content=None, tool_calls=None),
    ],
    ids=["other text", "other id", "other arguments", "another tool", "another call", "no calls"],
)
def test_an_answer_of_which_more_than_its_text_was_changed_is_none_that_was_sampled(talk: Talk, change: Any) -> None:
    talk.tools = [LOOK_UP]
    answer, _ = talk.say([user("one")], f"Let me see.\n{CALL}", END)
    sent = copy.deepcopy(answer)
    change(sent)
    follow = result(sent) if sent["tool_calls"] else user("so?")
    assert talk.ask([user("one"), sent, follow])[1].cause is Cause.HISTORY_REWRITTEN


def test_ids_name_an_answer_only_after_what_it_was_sampled_after(talk: Talk) -> None:
    talk.tools = [LOOK_UP]
    answer, _ = talk.say([user("one")], f"Let me see.\n{CALL}", END)
    follow = [user("another"), {**answer, "content": None}, result(answer)]
    assert talk.ask(follow)[1].cause is Cause.HISTORY_REWRITTEN


def test_a_turn_that_was_edited_leaves_the_node_before_it(talk: Talk) -> None:
    first = [user("one")]
    answer, root = talk.say(first, "a", END)
    talk.say([*first, answer, user("two")], "b", END)
    _, plan = talk.ask([*first, answer, user("two, but better")])
    assert plan.parent is root


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: [{"role": "system", "content": "Be long."}, *m[1:]], Cause.SYSTEM_CHANGED),
        (lambda m: m[1:], Cause.SYSTEM_CHANGED),
        (lambda m: [m[0], m[1], {**m[2], "content": "never said"}, *m[3:]], Cause.HISTORY_REWRITTEN),
        (lambda m: [m[0], user("another"), *m[2:]], Cause.HISTORY_REWRITTEN),
        (lambda m: [*m, {"role": "assistant", "content": "put in"}, user("so?")], Cause.HISTORY_REWRITTEN),
        (lambda m: [m[0], m[3]], Cause.NEW_CONVERSATION),
        (lambda m: m, Cause.EXTENDED),
    ],
)
def test_a_branch_has_its_cause(talk: Talk, change: Any, cause: Cause) -> None:
    first = [SYSTEM, user("one")]
    answer, _ = talk.say(first, "a", END)
    before = dict(talk.causes)
    talk.ask(change([*first, answer, user("two")]))
    assert last_cause(talk, before) is cause


def test_other_tools_or_other_options_begin_a_branch() -> None:
    talk = Talk(renderer("qwen3"), [LOOK_UP])
    answer, _ = talk.say([user("one")], "a", "<|im_end|>")
    follow = [user("one"), answer, user("two")]
    assert talk.ask(follow, tools=None)[1].cause is Cause.TOOLS_CHANGED
    assert talk.ask(follow, options={"enable_thinking": False})[1].cause is Cause.OPTIONS_CHANGED
    assert talk.ask(follow)[1].cause is Cause.EXTENDED


def test_ids_that_a_client_renamed_are_written_as_the_model_sampled_them() -> None:
    talk = Talk(renderer("mistral-nemo"), [LOOK_UP])
    text = '[TOOL_CALLS][{"name": "look_up", "arguments": {"q": "x"}, "id": "abc123DEF"}]'
    answer, _ = talk.say([user("one")], text, "</s>")
    answer["tool_calls"][0]["id"] = "toolu_01"
    _, plan = talk.ask([user("one"), answer, {"role": "tool", "tool_call_id": "toolu_01", "content": "7"}])
    new = talk.renderer.vocabulary.decode(plan.ids[plan.kept :])
    assert new == '[TOOL_RESULTS]{"content": 7, "call_id": "abc123DEF"}[/TOOL_RESULTS]'


@pytest.mark.parametrize("name", NAMES)
def test_another_process_continues_with_the_same_ids(name: str) -> None:
    talk = Talk(renderer(name), [LOOK_UP])
    messages = [user("one")]
    steps, nodes = [], []
    for n in range(5):
        request, plan = talk.ask(messages)
        ids = [*talk.renderer.vocabulary.encode(f"answer {n}"), talk.renderer.vocabulary.id_of(STOPS[name])]
        parsed, node = talk.answer(request, plan, ids)  # type: ignore[arg-type]
        nodes.append(node)
        steps.append(
            Step(
                prompt_ids=plan.ids.tolist(),
                response_ids=ids,
                trajectory_uid="t",
                step_index=n,
                metadata={RECORD: node.record.to_metadata()},
            )
        )
        messages = [*messages, {"role": "assistant", "content": parsed.content}, user("more")]
    elsewhere = Talk(renderer(name), [LOOK_UP], history=History.from_steps(steps))
    assert shape(elsewhere.history) == shape(talk.history)
    assert np.array_equal(elsewhere.ask(messages)[1].ids, talk.ask(messages)[1].ids)
    assert elsewhere.causes == {Cause.EXTENDED: 1}


def test_quarantined_steps_and_steps_without_a_record_are_not_continued() -> None:
    record = Talk(renderer(NAME)).say([user("one")], "a", END)[1].record.to_metadata()
    bare = Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t")
    bad = Step(
        prompt_ids=[1],
        response_ids=[2],
        trajectory_uid="t",
        metadata={RECORD: record},
        quarantined="text_differs",
    )
    assert History.from_steps([bare, bad]).nodes == []


def test_a_node_holds_only_what_its_parent_does_not(talk: Talk) -> None:
    messages = [SYSTEM, user("word " * 500)]
    nodes: list[Node] = []
    for text in ("a", "b"):
        answer, node = talk.say(messages, text, END)
        nodes.append(node)
        messages = [*messages, answer, user("more")]
    assert len(nodes[1].own) < 20 < 500 < nodes[1].total
    assert nodes[1].n_prompt + nodes[1].n_response == len(nodes[1].whole())
    whole = nodes[1].whole()[: nodes[1].n_prompt]
    for most in (1, 5, 64, 10_000):
        assert np.array_equal(nodes[1].prompt_tail(most), whole[-most:])


def test_the_template_mode_branches_where_the_template_strips_reasoning() -> None:
    for mode, cause in (("template", Cause.TEMPLATE_DIFFERS), ("bridge", Cause.EXTENDED)):
        talk = Talk(renderer("qwen3"), mode=mode)  # type: ignore[arg-type]
        answer, _ = talk.say([user("one")], "<think>\nwhy\n</think>\n\nso", "<|im_end|>")
        _, plan = talk.ask([user("one"), answer, user("two")])
        assert plan.cause is cause
        assert ("why" in talk.renderer.vocabulary.decode(plan.ids)) == (mode == "bridge")


def test_the_template_mode_extends_where_the_template_does() -> None:
    talk = Talk(renderer(NAME), mode="template")
    answer, node = talk.say([user("one")], "so", END)
    _, plan = talk.ask([user("one"), answer, user("two")])
    assert plan.parent is node
    assert not plan.bridged


def test_the_bridge_leaves_tools_where_they_were_sent_and_the_template_moves_them() -> None:
    for mode, cause in (("template", Cause.TEMPLATE_DIFFERS), ("bridge", Cause.EXTENDED)):
        talk = Talk(renderer("mistral-nemo"), [LOOK_UP], mode=mode)  # type: ignore[arg-type]
        answer, _ = talk.say([user("one")], "so", "</s>")
        _, plan = talk.ask([user("one"), answer, user("two")])
        text = talk.renderer.vocabulary.decode(plan.ids)
        assert plan.cause is cause
        assert (text.index("[AVAILABLE_TOOLS]") < text.index("one")) == (mode == "bridge")


def test_an_answer_with_nothing_after_it_is_rendered_and_not_bridged(talk: Talk) -> None:
    answer, node = talk.say([user("one")], "a", END)
    _, plan = talk.ask([user("one"), answer])
    assert (plan.parent, plan.bridged) == (node, False)


@pytest.mark.parametrize("of_its_own", ["text", 3, [], {}, {"key": "no digest"}, None], ids=str)
def test_metadata_of_a_flow_that_has_the_records_name_is_passed_over(of_its_own: Any) -> None:
    step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", metadata={"history": of_its_own})
    assert History.from_steps([step]).nodes == []
