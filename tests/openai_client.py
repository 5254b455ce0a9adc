#!/usr/bin/env python3
# tests/openai_client.py - two unmodified clients from PyPI against a running server.
#
# Responsible for: the `openai` package and the independent client of `huggingface_hub`, streaming
# and not, over several turns of a chat; errors as the classes that openai makes of them.
# Not responsible for: exact texts of a model.
#
# Usage: openai_client.py BASE_URL KEY, or openai_client.py --start PROGRAM for a server that prints
# both and ends with its standard input (tests/stage_http, whose answers are what the prompt says).
# The last line is `N passed, N failed`.
import json
import subprocess
import sys
import urllib.request

import huggingface_hub
import openai

server = None
if sys.argv[1] == "--start":
    server = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    base, key = next(line for line in server.stdout if line.startswith("http")).split()
else:
    base, key = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0, timeout=120)
model = client.models.list().data[0].id
FIRST = [{"role": "user", "content": "say Paris is the capital of France."}]
GREEDY = {"model": model, "temperature": 0, "max_tokens": 24}


def chat_and_stream_agree():
    whole = client.chat.completions.create(messages=FIRST, **GREEDY)
    text = whole.choices[0].message.content
    assert whole.object == "chat.completion" and text, whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            messages=FIRST, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(parts) == text, (parts, text)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "session" in chunks[-1].model_extra["coldplane"], chunks[-1]


def turns_reuse_what_was_said():
    messages = [{"role": "system", "content": "You are brief."}] + FIRST
    for turn in range(3):
        answer = client.chat.completions.create(messages=messages, **GREEDY)
        cold = answer.model_extra["coldplane"]
        if turn > 0:
            assert cold["tokens_reused"] > 0 and cold["woken_from"] != "new", cold
            details = answer.usage.prompt_tokens_details
            assert details.cached_tokens == cold["tokens_reused"]
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "say It is on the Seine, turn %d." % turn})


def a_session_is_named():
    for how in ({"extra_body": {"session": "by name"}},
                {"extra_headers": {"X-Coldplane-Session": "by name"}}):
        answer = client.chat.completions.create(messages=FIRST, **GREEDY, **how)
        assert answer.model_extra["coldplane"]["session"] == "by name"


def log_probabilities():
    answer = client.chat.completions.create(
        messages=FIRST, logprobs=True, top_logprobs=2, **GREEDY
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) >= 1 and all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in tokens)
    answer = client.completions.create(
        model=model, prompt="say once upon a time", max_tokens=8, temperature=0, logprobs=3
    )
    given = answer.choices[0].logprobs
    assert len(given.tokens) == len(given.token_logprobs) == len(given.text_offset) >= 1


def completions_and_stop():
    whole = client.completions.create(
        model=model, prompt="say one two three four", max_tokens=12, temperature=0
    )
    assert whole.object == "text_completion" and whole.choices[0].text
    parts = client.completions.create(
        model=model, prompt="say one two three four", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    short = client.chat.completions.create(messages=FIRST, **{**GREEDY, "max_tokens": 2})
    assert short.choices[0].finish_reason in ("length", "stop")
    assert short.usage.completion_tokens <= 2


def refused(kind, call, **wanted):
    try:
        call()
    except kind as error:
        for name, value in wanted.items():
            assert getattr(error, name) == value, (name, getattr(error, name), value)
        return
    raise AssertionError("not refused")


def errors_have_their_classes():
    def ask(**more):
        return lambda: client.chat.completions.create(messages=FIRST, **{**GREEDY, **more})

    stranger = openai.OpenAI(base_url=base + "/v1", api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, stranger.models.list, code="invalid_api_key")
    refused(openai.BadRequestError, ask(n=2), param="n")
    refused(openai.BadRequestError, ask(temperature="hot"), param="temperature")
    refused(openai.BadRequestError, ask(tools=[{"type": "function", "function": {"name": "f"}}]),
            param="tools")
    refused(openai.NotFoundError, ask(model="gpt-none"), code="model_not_found")
    refused(openai.NotFoundError, lambda: client.embeddings.create(model=model, input="x"),
            code="unknown_url")


def leaving_a_stream_is_no_harm():
    stream = client.chat.completions.create(
        messages=FIRST, stream=True, **{**GREEDY, "max_tokens": 64}
    )
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(messages=FIRST, **GREEDY).choices[0].message.content


def the_other_client():
    other = huggingface_hub.InferenceClient(base_url=base + "/v1", api_key=key, timeout=120)
    whole = other.chat_completion(FIRST, model=model, temperature=0, max_tokens=24)
    text = whole.choices[0].message.content
    assert text and whole.usage.total_tokens > 0
    parts = other.chat_completion(FIRST, model=model, temperature=0, max_tokens=24, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text


def figures_are_served():
    def get(path):
        request = urllib.request.Request(base + path, headers={"Authorization": "Bearer " + key})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    assert "coldplane_slots " in get("/metrics")
    assert json.loads(get("/status"))["slots"]["total"] > 0
    assert json.loads(get("/ready")) == {"status": "ok"}


TESTS = [
    chat_and_stream_agree,
    turns_reuse_what_was_said,
    a_session_is_named,
    log_probabilities,
    completions_and_stop,
    errors_have_their_classes,
    leaving_a_stream_is_no_harm,
    the_other_client,
    figures_are_served,
]
failed = 0
for test in TESTS:
    try:
        test()
        print(test.__name__, "passed")
    except Exception as error:  # whatever a client raises is a failure with its reason
        failed += 1
        print(test.__name__, "FAILED:", type(error).__name__, error)
if server is not None:
    server.stdin.close()
    failed += server.wait() != 0
print("openai", openai.__version__, "huggingface_hub", huggingface_hub.__version__)
print("%d passed, %d failed" % (len(TESTS) - failed, failed))
sys.exit(failed > 0)
