"""The engine: a small rollout server that answers as vLLM does, for the laptop and the tests.

    tiny        a model and its tokenizer, built on the spot
    device      where it is computed, by the name that is given
    weights     named tensors: from a checkpoint, again from one, or out of shared memory
    model       one forward pass of a Llama-like transformer over rows of the cache
    cache       keys and values: of running sequences, and of beginnings that sequences share
    sequence    one answer in the making: what was asked of the sampler, its tokens, its text
    sampler     from logits to tokens and their log-probs
    scheduler   which sequences run; one step of all of them
    worker      the thread that steps, and the way in and out of it
    tokenizer   text of tokens, messages to ids, tool calls out of text
    engine      the parts put together
    requests    what is asked, as vLLM's fields
    answers     what is answered, in vLLM's shapes
    http        bodies in, JSON or refusals in vLLM's words out
    routes      the application: the routes that sample, and those that say what is served
    control     the routes of the trainer
    serve       the engine as a process

Everything here may need torch and transformers (the extra `train`); nothing outside imports it unasked.
"""
