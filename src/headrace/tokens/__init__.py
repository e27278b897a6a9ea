"""Messages to token ids and back: render, bridge, parse, check.

renderer = load_renderer("/path/to/model")
conversation = Conversation(read_messages(body["messages"]), body.get("tools"), body.get("chat_template_kwargs"))
plan = plan_prompt(renderer, history, conversation)       # which ids, continuing what, and why
answer = renderer.parse(plan.ids, sampled, tools=True)    # or renderer.stream(...) as they arrive
trouble = check_step(renderer.vocabulary, prompt=plan.ids, response=sampled, ...)
record = history.record(conversation, answer.message, plan.parent)
history.add(record, plan.ids, sampled, plan.parent, step=index)
"""

from headrace.tokens.check import (
    SAMPLE,
    Quarantine,
    check_step,
    log_prob_mode,
    same_text,
    tokenization_trouble,
    vocabulary_trouble,
)
from headrace.tokens.conversation import Conversation
from headrace.tokens.families import load_renderer
from headrace.tokens.forms import CallForm, Grammar, Reasoning
from headrace.tokens.history import (
    RECORD,
    RECORD_ONLY,
    Cause,
    History,
    HistoryMode,
    Match,
    Node,
    NodeRecord,
    PromptPlan,
    plan_prompt,
)
from headrace.tokens.images import Image, PlacedImage
from headrace.tokens.messages import Message, ToolCall, Unrenderable, read_message, read_messages
from headrace.tokens.parse import AnswerDelta, CallDelta, Parsed
from headrace.tokens.renderer import AnswerStream, Renderer, marker_ids
from headrace.tokens.vocabulary import (
    Detokenizer,
    Vocabulary,
    do_without_torch,
    import_without_models,
    load_vocabulary,
    text_of,
)

__all__ = [
    "load_renderer",
    "do_without_torch",
    "import_without_models",
    "Renderer",
    "Unrenderable",
    "Vocabulary",
    "load_vocabulary",
    "Message",
    "ToolCall",
    "Image",
    "PlacedImage",
    "read_message",
    "read_messages",
    "Conversation",
    "History",
    "Node",
    "NodeRecord",
    "RECORD",
    "RECORD_ONLY",
    "Match",
    "Cause",
    "plan_prompt",
    "PromptPlan",
    "HistoryMode",
    "Parsed",
    "AnswerDelta",
    "CallDelta",
    "CallForm",
    "Reasoning",
    "marker_ids",
    "Grammar",
    "AnswerStream",
    "Detokenizer",
    "text_of",
    "check_step",
    "same_text",
    "Quarantine",
    "SAMPLE",
    "tokenization_trouble",
    "vocabulary_trouble",
    "log_prob_mode",
]
