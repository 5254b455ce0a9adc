#!/usr/bin/env python3
# tests/openai_client.py - two unmodified clients from PyPI against a running server.
#
# Responsible for: the `openai` package and the independent client of `huggingface_hub`, streaming
# and not, over several turns of a chat; errors as the classes that openai makes of them.
# Not responsible for: exact texts of a model.
#
# Usage: openai_client.py --start PROGRAM for a server that prints address and key and ends with its
# standard input (tests/stage_http, whose answers are what the prompt says), or openai_client.py
# --daemon COLDPLANED MODEL, which also kills it between turns and shows it two keys.
# The last line is `N passed, N failed`.
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request

import huggingface_hub
import openai



class Stage:
    def __init__(self, program):
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = next(line for line in self.process.stdout if line.startswith("http"))
        self.base, self.key = told.split()

    def stop(self):
        self.process.stdin.close()
        return self.process.wait()


class Daemon:
    """coldplaned with a home of its own, which stays over restarts."""

    def __init__(self, program, model, keys=()):
        self.command = [program, "--model", model, "--listen", "127.0.0.1:0"]
        self.home = tempfile.mkdtemp()
        if keys:
            path = os.path.join(self.home, "key")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write("".join(key + "\n" for key in keys))
        self.start()
        with open(os.path.join(self.home, "key")) as file:
            self.key = file.readline().strip()

    def start(self):
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, "COLDPLANE_HOME": self.home},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if " ready " in line:
                break
        else:
            raise RuntimeError("".join(self.said))
        port = re.search(r" port=(\d+)", "".join(self.said)).group(1)
        self.base = "http://127.0.0.1:" + port
        threading.Thread(target=lambda: list(self.process.stderr), daemon=True).start()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.process.terminate()
        return self.process.wait()

    def stop(self):
        code = self.end()
        shutil.rmtree(self.home, ignore_errors=True)
        return code


if sys.argv[1] == "--daemon":
    server = Daemon(*sys.argv[2:4])
else:
    server = Stage(sys.argv[2])
base, key = server.base, server.key
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


def conversation(daemon, between):
    """Three plain turns; what each answered and what it cost."""
    messages, seen = [], []
    for turn in range(3):
        messages.append({"role": "user", "content": "Name a river, number %d." % turn})
        one = openai.OpenAI(base_url=daemon.base + "/v1", api_key=daemon.key, max_retries=0)
        answer = one.chat.completions.create(messages=messages, **GREEDY)
        cold = answer.model_extra["coldplane"]
        text = answer.choices[0].message.content
        seen.append((text, answer.usage.prompt_tokens, cold))
        messages.append({"role": "assistant", "content": text})
        between(daemon)
    return seen


def a_killed_daemon_goes_on():
    def restart(daemon):
        daemon.kill()
        daemon.start()

    runs = []
    for between in (lambda daemon: None, restart):
        daemon = Daemon(*sys.argv[2:4])
        runs.append(conversation(daemon, between))
        assert daemon.stop() == 0
    for turn, (quiet, killed) in enumerate(zip(*runs)):
        assert quiet[0] == killed[0], (turn, quiet, killed)
        assert quiet[1] == killed[1], (turn, quiet, killed)
        if turn == 0:
            continue
        cold = killed[2]
        assert cold["woken_from"] == "disk" and quiet[2]["woken_from"] == "device", (quiet, killed)
        # What had no KV yet is the new turn alone: its text and the marks around it.
        assert cold["tokens_reused"] >= runs[1][turn - 1][1], (turn, killed)
        assert cold["tokens_prefilled"] < 32, (turn, killed)


def chat_until_the_end(daemon, number, acknowledged):
    """Turn after turn until the daemon takes no more; what was answered is remembered."""
    one = openai.OpenAI(base_url=daemon.base + "/v1", api_key=daemon.key, max_retries=0)
    messages = []
    try:
        for turn in range(1000):
            messages.append({"role": "user", "content": "Chat %d, turn %d." % (number, turn)})
            answer = one.chat.completions.create(messages=messages, **GREEDY)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            acknowledged[number] = (list(messages), answer.usage.prompt_tokens)
    except (openai.APIConnectionError, openai.APIStatusError) as error:
        status = getattr(error, "status_code", 0)
        assert status in (0, 408, 429, 503), error


def a_terminated_daemon_loses_nothing():
    daemon = Daemon(*sys.argv[2:4])
    acknowledged = {}
    threads = [
        threading.Thread(target=chat_until_the_end, args=(daemon, number, acknowledged))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    while len(acknowledged) < 6 and all(thread.is_alive() for thread in threads):
        threads[0].join(0.1)
    assert len(acknowledged) == 6, acknowledged
    assert daemon.end() == 0
    for thread in threads:
        thread.join()
    daemon.start()
    one = openai.OpenAI(base_url=daemon.base + "/v1", api_key=daemon.key, max_retries=0)
    for messages, prompt_tokens in acknowledged.values():
        more = messages + [{"role": "user", "content": "And then?"}]
        cold = one.chat.completions.create(messages=more, **GREEDY).model_extra["coldplane"]
        assert cold["woken_from"] != "new", (cold, messages)
        assert cold["tokens_reused"] >= prompt_tokens, (cold, prompt_tokens, messages)
    assert daemon.stop() == 0


def keys_share_nothing():
    keys = ["the-first-key-0123456789", "the-second-key-9876543210"]
    daemon = Daemon(*sys.argv[2:4], keys=keys)
    text = "Tell me about ceramics, kilns and glazes. " * 60
    messages = [{"role": "user", "content": text}]
    seen = []
    for one_key in (keys[0], keys[1], keys[0]):
        one = openai.OpenAI(base_url=daemon.base + "/v1", api_key=one_key, max_retries=0)
        answer = one.chat.completions.create(messages=messages, **GREEDY)
        seen.append((answer.model_extra["coldplane"], answer.choices[0].message.content))
    assert seen[0][0]["tokens_reused"] == seen[1][0]["tokens_reused"] == 0, seen
    assert seen[2][0]["tokens_reused"] > 0, seen
    assert seen[0][1] == seen[1][1] == seen[2][1], seen
    other = openai.OpenAI(base_url=daemon.base + "/v1", api_key=keys[1], max_retries=0)
    refused(openai.NotFoundError,
            lambda: other.chat.completions.create(
                messages=messages, extra_body={"session": seen[0][0]["session"]}, **GREEDY))
    assert daemon.stop() == 0


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
if sys.argv[1] == "--daemon":
    TESTS += [a_killed_daemon_goes_on, a_terminated_daemon_loses_nothing, keys_share_nothing]
failed = 0
for test in TESTS:
    try:
        test()
        print(test.__name__, "passed")
    except Exception as error:  # whatever a client raises is a failure with its reason
        failed += 1
        print(test.__name__, "FAILED:", type(error).__name__, error)
failed += server.stop() != 0
print("openai", openai.__version__, "huggingface_hub", huggingface_hub.__version__)
print("%d passed, %d failed" % (len(TESTS) - failed, failed))
sys.exit(failed > 0)
