"""Actions and their grammar, episodes on real pages, and the engine against the plain forward pass."""
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import threading
import time
import warnings
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import (PAGE, ComputedStep, Env, answer, chromium, descendants, pad, redirect, scripted, task_at,
                      tiny_model)

import mgrpo
from compress import Trajectory, Turn, context, fit_page, to_record, trajectory_rows
from model import KVCache, token_logprobs
from rollout import (ACTIONS, Call, Engine, Request, Settings, actions_help, check_room, episode, parse, play, progress,
                     rollout, task_key)
from worlds.browser import ActionError, Browser, EnvError, bounded

SETTINGS = Settings(max_turns=4, max_new_tokens=12, max_context=600, concurrency=4, timeout=5)

# ------------------------------------------------------------------------------------------ grammar

MARKDOWN = "Intro\n\n# Setup\n```\nmake\n```\n# end"
CLICK_12 = Call("Click", None, "12")
CALLS = [
    ('do(action="Click", element="12")', CLICK_12),
    ("<think>hm</think><answer># Element: red lamp <12>\ndo(action='Click', element='12')</answer>", CLICK_12),
    (
        '# Note: $24\n```python\ndo(action="Type", argument="a, \\"b\\" (c)", element="3")\n```',
        Call("Type", 'a, "b" (c)', "3"),
    ),
    ('do(action="Type", argument="two\nlines", element="3")', Call("Type", "two\nlines", "3")),
    (
        f'do(action="Type", argument="{MARKDOWN}", element="3")\n```\n# Note: done\n',
        Call("Type", MARKDOWN, "3"),
    ),
    ('do("Click", element=7)', Call("Click", None, "7")),
    (
        'do(action="Select Dropdown Option", argument="blue", element="[4]")',
        Call("Select Dropdown Option", "blue", "4"),
    ),
    ('do(action="Click", element="<12>")', CLICK_12),
    ('do(action="click", element="12")', CLICK_12),
    ('do(action="SCROLL DOWN")', Call("Scroll Down")),
    ('do(action="Type", argument="a\n```\nb\n# c", element="3")\n```\n\n```', Call("Type", "a\n```\nb\n# c", "3")),
    ("go_backward()", Call("Go Backward")),
    ("go_forward()", Call("Go Forward")),
    ('do(action="Go Backward")', Call("Go Backward")),
    ('do(action="Scroll Down")', Call("Scroll Down")),
    ('do(action="Wait")', Call("Wait")),
    ('exit(message="$24")', Call("exit", "$24")),
    ("exit()", Call("exit", "")),
    ('exit("N/A")', Call("exit", "N/A")),
    ('do(action="exit", message="$24")', Call("exit", "$24")),
    ('do("exit", "N/A")', Call("exit", "N/A")),
    ("exit(message=-3.50)", Call("exit", "-3.50")),
    ("exit(message=None)", Call("exit", "")),
    ('exit("Paris", "")', Call("exit", "Paris")),
    ('do(action="exit", element="3", message="")', Call("exit", "")),
    ('do(action="exit", element="3", argument="42")', Call("exit", "42")),
    ('exit(message="", answer="5")', Call("exit", "5")),
    ('exit(message=None, answer="5")', Call("exit", "5")),
    ('exit(message="Rome", reason="it says so")', Call("exit", "Rome")),
    ('do(action="exit", answer="Paris", element="")', Call("exit", "Paris")),
    ('exit(answer="12")', Call("exit", "12")),
    ('exit(message="\\ud83d\\ude00 \\ud83d")', Call("exit", "\U0001f600 \ufffd")),
    ('do(\n  action="Click",  # the lamp\n  element="3"\n)', Call("Click", None, "3")),
    ('do(action="Type", argument="a\u2028b", element="3")', Call("Type", "a\u2028b", "3")),
    ('do(action="Click", element="3")' + "\n# why" * 2000, Call("Click", None, "3")),
    ('do(action="Type", element="3",  # the user\'s text\n argument="a\nb")', Call("Type", "a\nb", "3")),
    ('do(action="Type",\n element="3", argument="a\nb")', Call("Type", "a\nb", "3")),
    ('do(action="Type", argument="it\'s \\"a\n\nb\\"",\n element=\'3\')', Call("Type", "it's \"a\n\nb\"", "3")),
    ('I will search.\ndo(action="Search", argument="do(x)", element="1")', Call("Search", "do(x)", "1")),
]


@pytest.mark.parametrize("text, call", CALLS)
def test_the_grammar_of_the_paper_is_understood(text, call):
    assert parse(text) == call
    assert parse(str(call)) == call  # the canonical form is in the grammar


NO_ACTIONS = [
    ("", "no action"),
    ("click the lamp", "no action"),
    ('do(action="Click")', "needs the id"),
    ('do(action="Click", element="a7")', "needs the id"),
    ('do(action="Click", element="<>")', "needs the id"),
    ('do(action="Click", element="²")', "needs the id"),
    ('do(action="Type", element="3")', "needs an argument"),
    ('do(action="Fly", element="3")', "unknown action"),
    ('do(action="Click", element="3"', "cannot read"),
    ('do(action="Click", element="1")\nexit(message="a")', "cannot read"),
    ('do(action=__import__("os").getcwd(), element="1")', "cannot read"),
    ("do(" * 2600, "cannot read"),
    (f'exit(message="{"a" * 8000}")', "longer than 8000 characters"),
    (f'exit(message="{"#" * 9000}' + "\n#" * 9000, "longer than 16000 characters"),
    ('do("x y' + "\n" * 60_000, "longer than 16000 characters"),  # each blank line was tried as the call's last
    ("do(action=1)[0]", "cannot read"),
    ("<answer>do(action=", "was cut"),
    ('<think>a</think><answer>do(action="Click", element="3")', "close the answer"),
    ('Action: do(action="Click", element="3")', "on a line of its own"),
    ('do(action="Click", element="3")\nThis clicks the lamp.', "nothing after it"),
    ("exit(1,200)", "exit takes one text"),
    ("exit(1,2,3,4,5,6,7,8,9)", "exit takes one text"),
    ('exit("Paris", "Rome")', "exit takes one text"),
    ('exit("Paris", message="Rome")', "exit takes one text"),
    ('exit(message={{"price": 5}})', "cannot read"),
    ('exit(message="Paris", message="Rome")', "cannot read"),
    ('do(action="Click", element={1: [2]}[0])', "cannot read"),
]


@pytest.mark.parametrize("text, says", NO_ACTIONS)
def test_what_is_not_an_action_is_explained_to_the_agent(text, says):
    with pytest.raises(ActionError, match=says):
        parse(text)


def test_a_string_that_was_cut_is_read_at_once_however_many_backslashes_it_holds():
    """A regular expression once tried both readings of each: 24 took 23 seconds, and all episodes waited."""
    cut = 'do(action="Type", element="3", argument="' + "a line\\n" * 400
    quotes = "do(action=" + "\\'" * 250 + "\n#" * 375
    for text in (cut, quotes):
        with pytest.raises(ActionError, match="cannot read"):
            parse(text)
    assert parse(f'{cut}")').argument == "a line\n" * 400


@pytest.mark.parametrize("text, says", [
    ("do(" + "#\n" * 3900, "cannot read"),  # 4.3 s: each comment was tried as what follows the call
    ("do(" + "#)\n" * 2600, "cannot read"),
    ("do(" + "1," * 3990 + ")", "cannot read"),  # 6.6 s: each number was looked up in the whole text
    ("<answer>" * 10_000, "no </answer>"),  # 7.0 s: each was tried as the one that is closed
    ("\n" * 100_000 + "x", "no action found"),  # 0.9 s
])
def test_an_unreadable_response_is_refused_at_once(text, says):
    """All episodes wait meanwhile. The fastest of three counts: now and then Python collects the garbage of other tests."""
    seconds = []
    for _ in range(3):
        began = time.thread_time()
        with pytest.raises(ActionError, match=says):
            parse(text)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.5


def test_line_breaks_count_once_towards_the_longest_call():
    """Escaped, each has two characters; such a call was refused as if it were two calls."""
    lines = "a line of some text\n" * 390
    assert parse(f'do(action="Type", element="3", argument="{lines}")').argument == lines


def test_an_unknown_name_is_quoted_in_part():
    """The quotation comes first in the next observation, and the page is cut from its end."""
    with pytest.raises(ActionError) as error:
        parse(f'do(action="{"a" * 7000}")')
    assert len(str(error.value)) < 400


def test_a_policys_backslashes_print_no_warnings():
    """Python 3.12 shows a SyntaxWarning for "\\d" in the text that it parses; 3.11 has it, but hides it."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        call = parse('do(action="Type", argument="costs \\d", element="3")')
    assert call.argument == "costs \\d"
    assert shown == []


def test_prompt_and_parser_share_one_table():
    lines = actions_help().splitlines()
    for line in lines:
        written, _, _ = line.removeprefix("- ").partition(": ")
        call = parse(written)
        assert call.name in ACTIONS
    assert len(lines) == len(ACTIONS)


def test_a_response_as_long_as_the_context_is_refused():
    with pytest.raises(ValueError, match="--max-new-tokens 2048 leaves no room"):
        Settings(max_new_tokens=2048, max_context=1536)


def test_a_task_whose_sentence_fills_the_context_is_refused(chat):
    """Its episodes had no turns and counted as failures."""
    settings = Settings(max_new_tokens=9, max_context=600)
    tasks = [{"intent": intent, "task_id": number} for number, intent in enumerate(["buy a lamp", "lamp " * 600])]
    check_room(chat, tasks[:1], settings)
    with pytest.raises(ValueError, match="--max-context 600 leaves no room for a page: the sentence of task 1 is too long"):
        check_room(chat, tasks, settings)


def test_a_context_is_refused_exactly_where_a_long_page_has_no_room(chat):
    task = {"intent": "buy a lamp", "task_id": 0}
    n_system = len(chat.system_ids())
    found = []
    for budget in range(n_system + 1, n_system + 200):
        fits = fit_page(chat, Trajectory(task), "lamp " * 2000, budget) is not None
        try:
            check_room(chat, [task], Settings(max_new_tokens=9, max_context=budget + 9))
            refused = False
        except ValueError:
            refused = True
        assert fits != refused, budget
        found.append(fits)
    assert found == sorted(found)
    assert len(set(found)) == 2


@pytest.mark.parametrize("n_tasks", [24, pytest.param(150, marks=pytest.mark.slow)])
def test_a_submitted_form_is_seen_before_the_next_observation(site, chat, run, n_tasks):
    """Browsers submit a form one task after the click. Looking too early once cost one episode in 150."""
    form = '<form method=post action="/sent"><input name=q><button>send</button></form>'
    base = site({"/": form, "/sent": "sent"})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]
    act = scripted(chat, ['do(action="Click", element="1")', "exit()"])
    settings = Settings(concurrency=12, max_turns=2, max_new_tokens=9, max_context=600)

    played = run(play(act, chat, tasks, Env(), settings))

    seen = [tau.turns[1].observation for tau in played]
    assert seen == ["sent"] * n_tasks


# ----------------------------------------------------------------------------------------- episodes

@pytest.fixture
def run_episode(run, chat):
    """Plays one scripted episode."""
    def run_episode(url, texts, env=Env(), settings=SETTINGS):
        async def go():
            async with Browser(settings) as browser:
                act = scripted(chat, texts)
                task = task_at(url)
                return await episode(browser, chat, task, env, act, settings, member=0, slot=0)
        return run(go())
    return run_episode


def test_an_error_is_read_in_the_next_observation(site, run_episode):
    texts = ['do(action="Click", element="99")', "nonsense", 'exit(message="red")']
    tau = run_episode(site({"/": PAGE}), texts)

    assert tau.answer == "red"
    assert tau.success == 1.0
    assert tau.status == "ok"
    assert len(tau.turns) == 3
    assert tau.reward == tau.success

    first, second, third = [turn.observation for turn in tau.turns]
    assert second.startswith("error: there is no element 99")
    assert third.startswith("error: no action")
    assert not first.startswith("error")


def test_the_tasks_side_logs_in_watches_before_each_action_and_judges_once(site, run_episode):
    told = []

    class Telling(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            told.append("enter")
            cookie = {"name": "who", "value": "ann", "url": task["start_url"]}
            yield task | {"storage_state": {"cookies": [cookie]}}
            told.append("leave")

        async def watch(self, session, trajectory):
            _, _, path = session.page.url.rpartition("/")
            response = trajectory.turns[-1].response
            told.append((path, response))

        async def verdict(self, task, answer, page, checks):
            told.append(answer)
            checks.append(["seen", True, ""])
            return 1.0

    def greet(request):
        cookies = request.headers["Cookie"].encode()
        answer(request, b"<a href='/two'>" + cookies + b"</a>")

    click = 'do(action="Click", element="0")'
    goodbye = "exit('bye')"
    tau = run_episode(site({"/": greet, "/two": "two"}), [click, goodbye], Telling())

    assert tau.turns[0].observation == "<a>who=ann <0></a>"
    assert told == ["enter", ("", click), ("two", goodbye), "bye", "leave"]
    assert tau.success == 1.0
    assert tau.checks == [["seen", True, ""]]


def test_the_turn_limit_leaves_no_answer(site, run_episode):
    settings = Settings(max_turns=2, max_context=900, max_new_tokens=20)
    tau = run_episode(site({"/": PAGE}), ['do(action="Scroll Down")'], settings=settings)
    assert tau.answer is None
    assert len(tau.turns) == 2


def test_a_broken_world_is_no_failure_of_the_agent(site, run_episode, monkeypatch):
    # No site at all.
    tau = run_episode("http://127.0.0.1:9/", ["exit()"])
    assert tau.status == "env_error"

    # A start page that is not there: the task's address is wrong. That of a later page is for the agent to read.
    base = site({"/": '<a href="/none">x</a>'})
    tau = run_episode(base + "/nothing", ["exit()"])
    assert tau.checks[0][2].endswith("/nothing answered 404; is start_url right?")
    tau = run_episode(base, ['do(action="Click", element="0")', "exit()"])
    assert tau.status == "ok"

    # A later page that breaks off.
    def drop(handler):
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    base = site({"/": '<a href="/gone">x</a>', "/gone": drop})
    tau = run_episode(base, ['do(action="Click", element="0")', "exit()"])
    assert tau.status == "env_error"
    assert tau.success == 0
    assert tau.reward == 0
    assert tau.checks

    # A start page that leads to itself.
    tau = run_episode(site({"/": redirect("/")}), ["exit()"])
    assert "ERR_TOO_MANY_REDIRECTS" in tau.checks[0][2]

    # A judge that never comes to an end.
    async def never_judges(task, answer, page, checks):
        await page.evaluate("for (;;);")

    def hurried(work, seconds, what):
        if what == "judging the episode":
            seconds /= 25  # of ten times the timeout of 5 s
        return bounded(work, seconds, what)

    with monkeypatch.context() as patch:
        patch.setattr("rollout.bounded", hurried)
        tau = run_episode(site({"/": PAGE}), ["exit()"], Env(never_judges))
    assert tau.status == "env_error"
    assert tau.checks[0][2] == "judging the episode took more than 2 s"

    # A judge that finds its site down.
    async def cannot_judge(task, answer, page, checks):
        raise EnvError("the judged site is down")

    tau = run_episode(site({"/": PAGE}), ["exit()"], Env(cannot_judge))
    assert tau.status == "env_error"


def test_an_episode_that_breaks_after_its_verdict_has_none(site, run_episode):
    """As when the task's server cannot be ended."""
    class Breaking(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            yield task
            raise EnvError("the server hangs")

    tau = run_episode(site({"/": "x"}), ["exit('bye')"], env=Breaking())
    assert (tau.status, tau.broken_by) == ("env_error", "the server hangs")
    assert (tau.success, tau.reward) == (0.0, 0.0)


def test_a_history_that_fills_the_context_ends_the_episode(site, chat, run_episode):
    settings = Settings(max_turns=50, max_context=400, max_new_tokens=60)
    note = "# Note: " + "word " * 12
    text = f'{note}\ndo(action="Scroll Down")'

    tau = run_episode(site({"/": PAGE}), [text], settings=settings)

    assert tau.status == "ok"
    assert 1 < len(tau.turns) < 50
    for t in range(len(tau.turns)):
        assert len(context(chat, tau, t)) <= 400 - 60


def test_the_next_task_is_prepared_before_each_verdict_and_leftovers_are_ended(site, chat, run):
    """A worker plays what it has drawn early, so the order stays, also where a verdict is asked for twice."""
    told = []

    class Telling(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            told.append(("enter", task["task_id"]))
            yield task

        def prepare(self, task):
            told.append(("prepare", task["task_id"]))

        async def end_prepared(self):
            told.append("end")

        async def verdict(self, task, answer, page, checks):
            told.append(("score", task["task_id"]))
            if task["task_id"] == 0 and told.count(("score", 0)) == 1:
                raise EnvError("no verdict")
            if task["task_id"] == 2:
                raise RuntimeError("a bug")
            return 1.0

    url = site({"/": "one"})
    tasks = [task_at(url, task_id=number) for number in range(4)]
    settings = replace(SETTINGS, concurrency=1)
    act = scripted(chat, ["exit('bye')"])
    with pytest.raises(RuntimeError, match="a bug"):
        run(play(act, chat, tasks, Telling(), settings))
    assert told == [
        ("enter", 0),
        ("prepare", 1),
        ("score", 0),
        ("enter", 0),  # once more: there was no verdict
        ("score", 0),
        ("enter", 1),
        ("prepare", 2),
        ("score", 1),
        ("enter", 2),
        ("prepare", 3),
        ("score", 2),
        "end",
    ]


def test_a_task_after_one_that_got_no_verdict_is_prepared_as_well(site, chat, run):
    told = []

    class Telling(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            told.append(("enter", task["task_id"]))
            if task["task_id"] == 0:
                raise EnvError("the site is down")
            yield task

        def prepare(self, task):
            told.append(("prepare", task["task_id"]))

    url = site({"/": "one"})
    tasks = [task_at(url, task_id=number) for number in range(2)]
    broken, sound = run(play(scripted(chat, ["exit('bye')"]), chat, tasks, Telling(), replace(SETTINGS, concurrency=1)))
    assert [broken.status, sound.status] == ["env_error", "ok"]
    assert told == [("enter", 0), ("enter", 0), ("prepare", 1), ("enter", 1)]


def test_a_progress_line_says_how_far_how_fast_and_what_broke():
    turn = Turn("", "", [], [5, 6, 7], [], "")
    success = Trajectory({}, turns=[turn, turn], success=1.0)
    second_attempt = Trajectory({}, turns=[turn], fault="the page crashed")
    lost = Trajectory({}, status="env_error", fault="the page crashed")
    lost.checks = [["environment", False, "refused at http://x"]]

    done = [success, second_attempt, lost]
    assert progress(done, 5, 2.0) == (
        "3/5 episodes (60%), success 50%, 1.5 turns/s, 1 s left, env errors 1; "
        "2 x the page crashed; 1 x refused")
    assert "(99%)" in progress([success] * 999, 1000, 2.0)


def test_the_tasks_side_hears_what_the_fence_stopped(site, chat):
    heard = []

    class Hearing(Env):
        def report_blocked(self, origins):
            heard.append(origins)

    outside = site({"/api": "x"})
    inside = site({"/": f"<p>here<script>fetch('{outside}/api').catch(() => 0); fetch('/gone')</script>"})
    for settings in (SETTINGS, replace(SETTINGS, allow=outside)):
        asyncio.run(play(scripted(chat, ["exit('bye')"]), chat, [task_at(inside)], Hearing(), settings))
    assert heard == [{outside}, set()]


# ------------------------------------------------------------------------------------------- engine

def model_for(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def plain_logprobs(model, ids, response) -> list[float]:
    """Of each id of a response, from one plain forward pass over context and response."""
    logits = model(torch.tensor([ids + response]))[0].log_softmax(-1)
    logps = []
    for k, token in enumerate(response):
        predictor = len(ids) - 1 + k
        logps.append(logits[predictor, token].item())
    return logps


@pytest.mark.parametrize("alike", [False, True])  # whether slots copy the beginnings of each other's contexts
@pytest.mark.parametrize("graphed_step", [None, ComputedStep])
def test_batched_decoding_with_kept_trunks_equals_plain_generation(chat, graphed_step, alike):
    """Many episodes join and leave one cache: the same ids and log-probs as one row at a time."""
    model = model_for(chat)

    async def talk(engine, slot):
        rng = random.Random(slot)
        first = slot + 3
        if alike:
            first = 3
        ids = [first] * (4 + slot)
        out = []
        for turn in range(4):
            response, logps, _ = await engine.respond(ids, slot, rng)
            out.append((list(ids), response, logps))
            ids = ids[:-2] + response + [9, 9, turn, slot]  # rolls back two positions, as a page does
            await asyncio.sleep(0.001 * slot)
        return out

    async def run():
        engine = Engine(model, chat.end_id, n_slots=5, length=200, max_new_tokens=10)
        engine.graphed = None
        if graphed_step is not None:
            engine.graphed = graphed_step(model, engine.cache)
        server = asyncio.ensure_future(engine.serve())
        try:
            return await asyncio.gather(*(talk(engine, slot) for slot in range(5)))
        finally:
            server.cancel()

    with torch.no_grad():
        for talked in asyncio.run(run()):
            for ids, response, logps in talked:
                expected = plain_logprobs(model, ids, response)
                assert logps == pytest.approx(expected, abs=1e-4)


def test_a_group_reads_its_first_page_once(chat):
    """The others copy keys and values, from a slot that decodes meanwhile, and compute what they do not share."""
    model = model_for(chat)
    computed = []

    def watch(_, inputs):
        computed.append(inputs[0].shape)

    model.register_forward_pre_hook(watch)
    system = list(range(3, 23))
    page = list(range(50, 80))
    another_page = page[::-1]
    contexts = [
        system + page,
        system + page,
        system + page,
        system + another_page,
        system,
    ]

    async def run():
        engine = Engine(model, chat.end_id, n_slots=5, length=80, max_new_tokens=10)
        server = asyncio.ensure_future(engine.serve())
        asked = []
        for slot, ids in enumerate(contexts):
            asked.append(engine.respond(ids, slot, random.Random(slot)))
        answers = await asyncio.gather(*asked)
        late = await engine.respond(contexts[0], 4, random.Random(9))  # the donors have gone on
        server.cancel()
        return [*answers, late]

    answers = asyncio.run(run())
    prefilled = [T for B, T in computed if T > 1]
    assert prefilled == [len(system + page) - 1, len(page) - 1]
    for ids, (response, logps, _) in zip([*contexts, contexts[0]], answers, strict=True):
        expected = plain_logprobs(model, ids, response)
        assert logps == pytest.approx(expected, abs=1e-4)


def test_the_engine_does_not_round_a_random_number_up_to_the_last_token(chat, monkeypatch):
    model = model_for(chat)

    def all_for_7(x):
        logits = torch.full((len(x), 400), -1e4)
        logits[:, 7] = 0.0
        return logits

    model.logits = all_for_7
    monkeypatch.setattr(random.Random, "random", lambda self: 1 - 2**-53)
    engine = Engine(model, chat.end_id, n_slots=4, length=600, max_new_tokens=12)
    request = Request(0, [1, 2], random.Random())

    engine.running.append(request)
    engine.prefill(request)
    engine.decode()

    assert request.response_ids == [7]


def test_a_response_ends_with_its_end_token(chat):
    """The model says 7, 7 and then the end, for as long as it is asked."""
    model = model_for(chat)
    script = [7, 7, chat.end_id, 7, 7]
    steps = iter(script)

    def scripted_logits(x):
        logits = torch.full((len(x), 400), -1e4)
        logits[:, next(steps)] = 0.0
        return logits

    model.logits = scripted_logits

    async def respond(max_new_tokens):
        engine = Engine(model, chat.end_id, n_slots=1, length=60, max_new_tokens=max_new_tokens)
        serving = asyncio.create_task(engine.serve())
        response, logps, ended = await engine.respond([3, 4, 5], 0, random.Random(0))
        serving.cancel()
        return response, len(logps), ended

    assert asyncio.run(respond(max_new_tokens=5)) == ([7, 7, chat.end_id], 3, True)
    steps = iter(script)
    assert asyncio.run(respond(max_new_tokens=2)) == ([7, 7], 2, False)


def test_an_engine_that_fails_fails_the_rollout_instead_of_hanging(site, chat, run):
    def fail(x):
        raise ZeroDivisionError

    model = model_for(chat)
    model.logits = fail
    tasks = [task_at(site({"/": PAGE}))]
    with pytest.raises(ZeroDivisionError):
        run(rollout(model, chat, tasks, Env(), SETTINGS))


@pytest.mark.parametrize("n_tasks", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_rollout_logprobs_equal_training_logprobs(site, chat, run, n_tasks):
    """The claim of the project, on real pages: every action token, float32, 1e-4."""
    model = model_for(chat)
    base = site({"/": PAGE, "/two": "two"})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]

    trajectories = run(rollout(model, chat, tasks, Env(), SETTINGS, group_size=2, seed=1, temperature=0.8))
    assert len(trajectories) == 2 * n_tasks
    for tau in trajectories:
        assert tau.status == "ok"
        assert len(tau.turns) == 4

    sampled = []
    scored = []
    for tau in trajectories:
        for row in trajectory_rows(chat, tau):
            logp_N, _, _ = token_logprobs(model, *pad([row]), temperature=0.8)
            scored.append(logp_N.detach())
            sampled += row.logps
    assert len(sampled) > 60 * n_tasks
    torch.testing.assert_close(torch.cat(scored), torch.tensor(sampled), atol=1e-4, rtol=0)


@pytest.mark.parametrize("n_tasks", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_a_rollout_does_not_depend_on_how_many_run_at_once(site, chat, run, n_tasks):
    """At temperature 1, one browser context or many: the same ids; log-probs round with the batch."""
    model = model_for(chat)
    base = site({"/": PAGE})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]

    def sampled(concurrency):
        """(the ids of each response, the log-probs of all)."""
        settings = Settings(max_turns=2, max_new_tokens=12, max_context=600, concurrency=concurrency)
        responses = []
        logps = []
        for tau in run(rollout(model, chat, tasks, Env(), settings, group_size=2, seed=5)):
            for turn in tau.turns:
                responses.append(turn.response_ids)
                logps += turn.logps
        return responses, logps

    alone, logps_alone = sampled(concurrency=1)
    together, logps_together = sampled(concurrency=n_tasks // 2)
    assert alone == together
    assert len(alone) == 4 * n_tasks
    assert logps_alone == pytest.approx(logps_together, abs=1e-5)


def test_nothing_of_a_rollout_holds_its_cache(site, chat, monkeypatch):
    """A cache takes gigabytes. It goes with the rollout, even if something still refers to the engine.

    It has a slot for each episode at once: for the one episode here, not for --concurrency.
    """
    caches = []
    slots = []

    class Watched(KVCache):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            caches.append(weakref.ref(self))
            slots.append(self.n_slots)

    monkeypatch.setattr("rollout.KVCache", Watched)
    model = model_for(chat)
    tasks = [task_at(site({"/": PAGE}))]
    gc.collect()
    gc.disable()
    try:
        asyncio.run(rollout(model, chat, tasks, Env(), SETTINGS))
        assert len(caches) == 1
        assert caches[0]() is None
        assert slots == [1]
    finally:
        gc.enable()


def test_all_forward_passes_of_an_engine_run_on_one_thread(chat):
    """Each thread would have its own workspaces on a GPU."""
    model = model_for(chat)
    threads = set()

    def watch(*_):
        threads.add(threading.get_ident())

    model.register_forward_pre_hook(watch)

    async def respond():
        engine = Engine(model, chat.end_id, n_slots=6, length=64, max_new_tokens=8)
        server = asyncio.ensure_future(engine.serve())
        asked = []
        for slot in range(6):
            ids = [3 + slot] * 20
            asked.append(engine.respond(ids, slot, random.Random(slot)))
        await asyncio.gather(*asked)
        server.cancel()
        await asyncio.wait([server])

    asyncio.run(respond())
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_forward_pass_ends_before_the_rollout_does(chat, monkeypatch):
    """Afterwards the weights are sharded again: a pass that still runs would read freed memory."""
    began = threading.Event()
    let_end = threading.Event()
    events = []

    @contextlib.contextmanager
    def unsharded(model):
        try:
            yield model
        finally:
            events.append("resharded")

    def prefill(engine, request):
        began.set()
        let_end.wait(20)
        events.append("computed")

    async def play(act, *_, **more):
        turn = Turn("", "", [5], [], [], "")
        trajectory = Trajectory({"task_id": 0, "intent": "x"}, turns=[turn])
        waiting = asyncio.ensure_future(act(trajectory, 0))
        await asyncio.to_thread(began.wait)
        threading.Timer(0.2, let_end.set).start()
        waiting.cancel()
        raise ZeroDivisionError

    monkeypatch.setattr("rollout.unsharded", unsharded)
    monkeypatch.setattr("rollout.Engine.prefill", prefill)
    monkeypatch.setattr("rollout.play", play)
    model = model_for(chat)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(rollout(model, chat, [], Env(), SETTINGS))
    assert events == ["computed", "resharded"]


def test_siblings_live_in_worlds_of_their_own(site, chat, run):
    seen = []

    def page(handler):
        seen.append(handler.headers["X-World"])
        answer(handler)

    tasks = [task_at(site({"/": page}), world=7)]
    act = scripted(chat, ["exit()"])
    run(play(act, chat, tasks, Env(), SETTINGS, group_size=3))

    worlds = {world for world in seen if world}
    assert len(worlds) == 3
    assert all(world.startswith("7-") for world in worlds)


# ------------------------------------------------------------------------- attacks, and failures of the world


def test_a_page_that_leaves_the_sites_at_once_does_not_end_the_run(site, chat):
    outside = site({"/": "<p>pwned</p>"})
    inside = site({
        "/": "<a href='/trap'>on</a>",
        "/trap": f"<script>location = '{outside}'</script>",
        "/home": f"<script>location.replace('{outside}')</script>",
    })
    act = scripted(chat, ['do(action="Click", element="0")', "exit()"])

    def played_from(path):
        [tau] = asyncio.run(play(act, chat, [task_at(inside + path)], Env(), SETTINGS))
        return tau

    later = played_from("/")
    at_the_start = played_from("/home")
    assert later.status == "ok"
    assert "is not one of the task's sites" in later.turns[1].observation
    for turn in later.turns + at_the_start.turns:
        assert "pwned" not in turn.observation


# A name is cut after 300 UTF-16 units: here in the middle of the emoji.
HALVES = ("<a href='/ok'>" + "x" * 299 + "\U0001f600</a><a href='/ok'>half</a>"
          "<script>document.links[1].textContent = 'half \\ud83d!'; alert('\\udc00')</script>")
FORM = ("<form name=f><input name=title value=a><input name=disabled>"
        "<input name=name><img name=title></form>")
JOIN = "<script>Array.prototype.join = () => ({length: 1})</script>"
ODD = {  # pages whose text is no proper text -> a part of what the agent reads
    "half a surrogate pair": (HALVES, "half ?! <1></a>"),
    "a result that is no text": (JOIN, "{'length': 1}"),
    "names that are elements": (FORM, "<input>disabled <1></input>"),
}


BENT = {  # what a page does to the language of our scripts -> the agent's or the world's error, "" for none
    "Object.keys = () => []": "error: element 0 cannot be found",
    "Array.isArray = () => true": "error: element 0 cannot be found",
    "Array.prototype.join = () => new Date(8.64e15)": "garbles what is read of it",
    "setTimeout = Promise = undefined": "",
    "window[Symbol.for('work')] = 1": "",
}


@pytest.mark.parametrize("script", BENT)
def test_a_page_that_bends_our_scripts_ends_no_run(site, script, run_episode):
    base = site({"/": f"<button>x</button><script>{script}</script>"})
    tau = run_episode(f"{base}/", ['do(action="Click", element="0")', "exit()"])
    error = BENT[script]
    if "garbles" in error:
        assert tau.status == "env_error"
        assert error in tau.checks[0][2]
    else:
        button = "<button>x <0></button>"
        assert tau.status == "ok"
        assert tau.turns[0].observation == button
        assert tau.turns[1].observation == f"{error}\n{button}".strip()


def test_a_field_that_lies_about_what_typing_asks_ends_no_run(site, run_episode):
    script = "Object.defineProperty(i, 'isContentEditable', {get() { return new Date(8.64e15) }})"
    base = site({"/": f"<input id=i><script>{script}</script>"})
    tau = run_episode(f"{base}/", ['do(action="Type", argument="a", element="0")', "exit()"])
    assert tau.status == "ok"
    assert tau.turns[1].observation == "<input> <0></input>"  # no error; worlds/page/ takes it for an editor


@pytest.mark.parametrize("name", ODD)
def test_a_page_may_give_anything_and_the_episode_can_be_written_as_json(site, chat, name, run_episode):
    page, seen = ODD[name]
    base = site({"/": page, "/ok": "ok"})
    texts = ['do(action="Switch Tab", argument="²")', "exit()"]

    tau = run_episode(f"{base}/", texts)

    assert tau.status == "ok", tau.checks
    assert seen in tau.turns[0].observation
    assert "there is no tab" in tau.turns[1].observation
    record = to_record(tau, chat)
    line = json.dumps(record, ensure_ascii=False).encode()
    assert json.loads(line) == record


def test_a_blocked_link_in_the_last_turn_is_judged_where_it_was_pressed(site, chat):
    outside = site({"/": "x"})
    base = site({"/": f"<a href='{outside}'>out</a>"})
    judged = []

    async def look(task, answer, page, checks):
        judged.append(page.url)
        return 0.0

    act = scripted(chat, ['do(action="Click", element="0")'])
    tasks = [task_at(f"{base}/")]
    settings = replace(SETTINGS, max_turns=1)
    [tau] = asyncio.run(play(act, chat, tasks, Env(look), settings))
    assert tau.status == "ok"
    assert judged == [f"{base}/"]


def processes(kind: str) -> list[int]:
    if kind == "driver":
        return [process for process, command in descendants().items() if "run-driver" in command]
    return chromium(kind)


@pytest.mark.parametrize("kind, how", [
    ("browser", signal.SIGKILL),
    ("renderer", signal.SIGKILL),
    ("driver", signal.SIGKILL),  # Playwright's own process
    pytest.param("browser", signal.SIGSTOP, marks=pytest.mark.slow),  # it hangs
])
def test_episodes_that_a_killed_chromium_took_along_are_played_again(site, chat, kind, how):
    url = site({"/": "<a href='/'>again</a>"})
    others = processes(kind)
    killed = []

    async def act(trajectory, slot):
        if trajectory.task["task_id"] == 1 and not killed:  # in the midst of an episode
            killed.extend(set(processes(kind)) - set(others))
            for process in killed:
                os.kill(process, how)
        text = "exit()"
        if len(trajectory.turns) < 3:
            text = 'do(action="Click", element="0")'
        return [*chat.encode(text), chat.end_id], [], True

    settings = Settings(concurrency=2, max_turns=5, max_new_tokens=40, max_context=800, timeout=3)
    tasks = [task_at(url, task_id=i) for i in range(6)]
    played = asyncio.run(play(act, chat, tasks, Env(), settings))

    assert killed
    assert [(tau.status, tau.success) for tau in played] == [("ok", 1.0)] * 6
    assert played[1].fault
    assert not played[5].fault
    assert not set(killed) & set(processes(kind))


def chaotic(fates: Counter):
    """A page of a site that does not answer 5% of its requests, and answers 500 to another 5%."""
    rng = random.Random(0)

    def page(request):
        luck = rng.random()
        fate = "fine"
        if luck < 0.05:
            fate = "hung"
        elif luck < 0.1:
            fate = "500"
        fates[fate] += 1
        if fate == "hung":
            time.sleep(5)
        with contextlib.suppress(OSError):  # the browser may have given up
            if fate == "500":
                answer(request, b"out of order", 500)
            else:
                answer(request, b"<a href='/shaky'>on</a>")
    return page


def trains(rewards) -> bool:
    """Whether a group's rewards differ."""
    return bool(0 < rewards.mean() < 1)


@pytest.mark.parametrize("n_tasks, G", [(5, 6), pytest.param(20, 10, marks=pytest.mark.slow)])
def test_a_step_in_chaos_completes_and_counts_right(site, checkpoint, tmp_path, monkeypatch, capsys,
                                                    n_tasks, G):
    """One step of mgrpo.py while Chromium is killed three times and the site is shaky.

    An episode fails if its first page does not come, or comes with a 500, or if it loses its Chromium. It is
    then played once more; a second failure is an environment error. Later pages may hang or say 500:
    the agent reads that.
    """
    # 1) The site and its tasks. The first task's page is always down.
    def down(request):
        answer(request, b"out of order", 500)

    fates = Counter()
    base = site({
        "/shaky": chaotic(fates),
        "/calm": "<a href='/shaky'>on</a>",
        "/down": down,
    })
    first_page = {0: "down", 1: "calm", n_tasks - 1: "calm"}
    spec = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "yes"}}
    tasks = []
    for i in range(n_tasks):
        path = first_page.get(i, "shaky")
        tasks.append(task_at(f"{base}/{path}", task_id=i, require_login=False, eval=spec))
    task_file = tmp_path / "tasks.json"
    task_file.write_text(json.dumps(tasks))

    # 2) The policy: two clicks, then an answer, which is right for every second member of a group.
    others = chromium("browser")
    kills = [(1, 1), (1, 1), (n_tasks - 1, 0)]  # the first of these twice: there is no third attempt

    async def scripted_rollout(model, chat, tasks, env, settings, *, group_size, seed, temperature, tick, **_):
        async def act(tau, slot):
            who = (tau.task["task_id"], tau.member)
            if who in kills:
                kills.remove(who)
                [ours] = set(chromium("browser")) - set(others)
                os.kill(ours, signal.SIGKILL)
            if len(tau.turns) < 3:
                text = 'do(action="Click", element="0")'
            elif tau.member % 2 == 1:
                text = 'exit(message="yes")'
            else:
                text = 'exit(message="no")'
            ids = [*chat.encode(text), chat.end_id]
            return ids, [-1.0] * len(ids), True
        return await play(act, chat, tasks, env, settings, group_size=group_size, tick=tick)

    # 3) One step.
    monkeypatch.setattr(mgrpo, "rollout", scripted_rollout)
    out = tmp_path / "run"
    cfg = mgrpo.Config(
        model=str(checkpoint),
        tasks=str(task_file),
        out=str(out),
        steps=1,
        batch=n_tasks,
        G=G,
        concurrency=G // 2,
        timeout=2.5,
    )
    mgrpo.main(cfg)
    assert kills == []
    assert chromium("browser") == others
    assert fates["hung"]
    assert fates["500"]

    # 4) Every episode is recorded. Task 0, and the episode killed twice, have no verdict.
    lines = (out / "trajectories.jsonl").read_text().splitlines()
    played = [json.loads(line) for line in lines]
    everyone = []
    for i in range(n_tasks):
        for member in range(G):
            everyone.append((i, member))
    recorded = [(tau["task_id"], tau["member"]) for tau in played]
    assert sorted(recorded) == everyone

    ok = [tau for tau in played if tau["status"] == "ok"]
    for tau in ok:
        assert "out of order" not in tau["turns"][0]["observation"]
        assert (tau["task_id"], tau["member"]) != (1, 1)
        assert tau["task_id"] != 0
    for tau in played:
        if tau["status"] != "ok":
            assert tau["fault"]

    # 5) What the metrics count.
    metrics = json.loads((out / "metrics.jsonl").read_text())
    errors = len(played) - len(ok)
    assert metrics["env_errors"] == errors
    assert f"env errors {errors}; " in capsys.readouterr().out
    assert metrics["env_retries"] == sum(bool(tau["fault"]) for tau in played)
    success_rate = sum(tau["success"] for tau in ok) / len(ok)
    assert metrics["success_rate"] == pytest.approx(success_rate)

    groups = []
    for i in range(n_tasks):
        rewards = [tau["reward"] for tau in ok if tau["task_id"] == i]
        groups.append(torch.tensor(rewards))
    assert metrics["groups_kept"] == sum(trains(group) for group in groups)
    assert trains(groups[1])  # although it
    assert len(groups[1]) < G  # has lost members

    # 6) Advantages: over what is left of a group; nothing for what has left it.
    for tau in played:
        group = groups[tau["task_id"]]
        expected = 0
        if tau["status"] == "ok" and trains(group):
            expected = float((tau["reward"] - group.mean()) / group.std())
        assert tau["advantage"] == pytest.approx(expected, abs=1e-5)


def test_every_forward_of_a_rollout_runs_unsharded(site, chat, monkeypatch, run):
    """Ranks decode different numbers of tokens. Sharded, each forward would wait for another rank's."""
    model = model_for(chat)
    inside = []
    seen = []

    @contextlib.contextmanager
    def spy(of):
        inside.append(of)
        yield of
        inside.remove(of)

    def watch(*_):
        seen.append(inside == [model])

    monkeypatch.setattr("rollout.unsharded", spy)
    model.register_forward_hook(watch)
    base = site({"/": "<a href=/>on</a>"})
    tasks = [task_at(f"{base}/")]
    settings = Settings(max_turns=2, max_new_tokens=4, max_context=600, concurrency=1)
    run(rollout(model, chat, tasks, Env(), settings))

    assert len(seen) > 4
    assert all(seen)
    assert not inside


def test_one_at_a_time_two_runs_are_equal_bit_for_bit(site, chat, run):
    """The server's delays differ from run to run, so with several episodes at once the batches would."""
    def late(request):
        time.sleep(random.random() * 0.05)
        answer(request, b"<a href='/'>on</a> <a href='/b'>off</a>")

    base = site({"/": late, "/b": late})
    model = model_for(chat)
    settings = Settings(max_turns=3, max_new_tokens=12, max_context=600, concurrency=1)
    tasks = [task_at(f"{base}/", task_id=i) for i in range(5)]

    def episodes():
        found = []
        for tau in run(rollout(model, chat, tasks, Env(), settings, group_size=2, seed=3)):
            found.append([(turn.response_ids, turn.logps) for turn in tau.turns])
        return found

    first = episodes()
    second = episodes()
    assert first == second
    assert len(first) == 10


def test_equal_ids_of_two_sources_have_random_numbers_of_their_own(site, chat, run):
    """A task file may number its tasks as the sandbox does. Both used to draw the same stream, so on equal
    pages they played the same episode twice."""
    model = model_for(chat)
    here = task_at(site({"/": PAGE}))
    there = task_at(site({"/": PAGE}), source=1)
    assert task_key(here) == "0"
    assert task_key(there) == "1:0"

    settings = Settings(max_turns=1, max_new_tokens=12, max_context=600, concurrency=1)
    first, second = run(rollout(model, chat, [here, there], Env(), settings, seed=3))
    assert first.turns[0].observation == second.turns[0].observation
    assert first.turns[0].response_ids != second.turns[0].response_ids

    [again] = run(rollout(model, chat, [here], Env(), settings, seed=3))  # alone, an id draws what it always drew
    assert again.turns[0].response_ids == first.turns[0].response_ids
