"""The engine: a small rollout server that answers as vLLM does, for the laptop and the tests.

    tiny        a model and its tokenizer, built on the spot
    weights     named tensors: from a checkpoint, again from one, or out of shared memory
    model       one forward pass of a Llama-like transformer over rows of the cache
    cache       keys and values, one row a running sequence
    prefix      what was computed for beginnings that sequences share
    sampling    what a request may ask of the sampler
    sampler     from logits to tokens and their log-probs
    sequence    one answer in the making
    scheduler   which sequences run; one step of all of them
    worker      the thread that steps, and the way in and out of it
    vocabulary  the tokenizer, and the text of single tokens
    text        ids to text, piece by piece, and stop strings
    chat        messages to ids, and tool calls out of text
    requests    what is asked, as vLLM's fields
    answers     what is answered, in vLLM's shapes
    failures    what is refused, in vLLM's words
    engine      the parts put together
    service     the routes that sample; `chunks` a chat's stream
    info        the routes that say what is served
    control     the routes of the trainer
    app         all of them; `routing` what they share

Everything here may need torch and transformers (the extra `train`); nothing outside imports it unasked.
"""
