"""Messages to token ids and back: render, bridge, parse, check.

renderer = load_renderer("/path/to/model")
request = Request(read_messages(body["messages"]), body.get("tools"), body.get("chat_template_kwargs"))
plan = plan_prompt(renderer, history, request)            # which ids, continuing what, and why
answer = renderer.parse(plan.ids, sampled, tools=True)    # or renderer.stream(...) as they arrive
trouble = check_step(renderer.vocabulary, prompt=plan.ids, response=sampled, ...)
record = history.record(request, answer.message, plan.parent)
history.add(record, plan.ids, sampled, plan.parent, step=index)
"""

from headrace.tokens.check import Quarantine, check_step, same_text
from headrace.tokens.detokenize import Detokenizer, text_of
from headrace.tokens.history import RECORD, RECORD_ONLY, Cause, History, Match, Node, Record, Request
from headrace.tokens.images import Image, Placed
from headrace.tokens.load import do_without_torch, load_renderer
from headrace.tokens.messages import Message, ToolCall, read_message, read_messages
from headrace.tokens.parse import Delta, Grammar, Parsed
from headrace.tokens.plan import HistoryMode, PromptPlan, plan_prompt
from headrace.tokens.renderer import AnswerStream, Renderer, Unrenderable
from headrace.tokens.servers import SAMPLE, log_prob_mode, tokenization_trouble, vocabulary_trouble
from headrace.tokens.vocabulary import Vocabulary, load_vocabulary

__all__ = [
    "load_renderer",
    "do_without_torch",
    "Renderer",
    "Unrenderable",
    "Vocabulary",
    "load_vocabulary",
    "Message",
    "ToolCall",
    "Image",
    "Placed",
    "read_message",
    "read_messages",
    "Request",
    "History",
    "Node",
    "Record",
    "RECORD",
    "RECORD_ONLY",
    "Match",
    "Cause",
    "plan_prompt",
    "PromptPlan",
    "HistoryMode",
    "Parsed",
    "Delta",
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
