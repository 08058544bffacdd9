"""Judging: what earns the success and what does not. The task's side of an episode, the benchmark, figures."""
import asyncio
import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from conftest import GOOD, ROOT, chat_server, fuzzy, make_task, target
from test_run import start_ranks

import evaluate
import run as runs
from compress import Trajectory, Turn
from evaluate import (SiteSettings, Config, Environment, checks, figures, pass_at, rate, score, string_match, summarize,
                      table, url_match, wilson)
from rollout import Settings
from worlds import webarena
from worlds.browser import Browser, EnvError, PlaywrightError
from worlds.endpoint import Endpoint
from worlds.webarena import check_row, site_urls
from worlds.words import words

# ------------------------------------------------------------------------------------------------ answers

EXACT = [("170", "170", True), ("170", "'170'", True), ("170", '"170"', True), ('"170"', "170", True),
         ("Paid", "pAID", True), ("170", " 170", False), ("170", "170.", False), ("$49", "$49", True),
         ("N/A", "n/a", True), ("170", "", False)]

INCLUDE = [  # the disputed rows first: WebArena's own evaluator passes "170" in "000000170"
    ("170", "000000170", False), ("170", "order 000000170", False), ("170", "it is order 170.", True),
    ("170", "170/171", True), ("170", "170, 171", True), ("170", "(170)", True), ("0", "there are 10", False),
    ("0", "0", True), ("nils", "nils's post", True), ("nils", "it was Nils", True), ("red lamp", "two Red Lamps", True),
    ("red lamp", "lamp red", False), ("$7.50", "it costs $7.50 now", True), ("7.50", "it costs $7.50", True),
    ("5%", "15%", True), ("N/A", "n/a", True), ("N/A", "not available", False),
    ("LGTM |OR| looks good", "it looks good", True), ("LGTM |OR| looks good", "fine", False),
    ("LGTM |OR| looks good", "lgtm!", True), ("10:30", "at 10:30", True), ("don't", "i don't know", True),
    ("state-of-art", "a state-of-art lamp", True)
]


@pytest.mark.parametrize("ref, answer, passes", EXACT)
def test_exact_match_ignores_case_and_one_pair_of_quotes_only(ref, answer, passes):
    assert string_match(answer, {"exact_match": ref}) is passes


@pytest.mark.parametrize("ref, answer, passes", INCLUDE)
def test_must_include_takes_a_single_word_as_a_word(ref, answer, passes):
    assert string_match(answer, {"must_include": [ref]}) is passes


def test_words_are_those_of_nltk():
    """Random texts and page sources with nltk 3.8.1's words: see tests/golden/make_words.py."""
    rows = json.loads((ROOT / "tests/golden/words.json").read_text())
    assert len(rows) > 400 and all(words(text) == cut.split() for text, cut in rows)


@pytest.mark.parametrize("text, nltks, ours", [
    ("maj. jones", "maj. jones", "maj . jones"), ("'tis'twas", "'t is 't was", "'t is 'twas"),
    ('?"lamp?" b', "? `` lamp ? '' b", "? '' lamp ? '' b")])
def test_words_differ_from_nltks_where_their_file_says_so(text, nltks, ours):
    assert nltks != ours and words(text) == ours.split()


@pytest.mark.parametrize("ref, page, passes", [
    ("lamps", "(we sell lamps.)</p>", True), ("lamps", "we sell lamps.</p>", False), ("lamps", 'lamps." He said', True),
    ("red", "it is 'red' I think", False), ("present", "2020–present", False), ("2020–present", "2020–presently", False),
    ("lamp", "::lamp ,,lamp", False), ("can", "you cannot", True), ("inc", "acme inc. sells", False),
    ("5", "see order 5. next", False), ("5", "see order 5. Six", False), ("5", "see order 5. 6", True), ("red ", "red ", False)])
def test_a_full_stop_or_a_quote_may_be_part_of_a_word(ref, page, passes):
    """As in the benchmark: a single word must be one of nltk's words, as it stands."""
    assert string_match(page, {"must_include": [ref]}) is passes


@pytest.mark.parametrize(
    "reference, answer, passes",
    [({"must_include": ["red", "blue"]}, "red and blue", True), ({"must_include": ["red", "blue"]}, "red", False),
     ({"must_include": "170"}, "071", False),  # a bare string is one reference, not three letters
     ({"must_exclude": ["red"]}, "a red one", False), ({"must_exclude": ["red"]}, "bored", True),
     ({"must_exclude": ["red lamp"]}, "a red lamp", False), ({"one_of": ["red", "blue"]}, "dark blue", True),
     ({"one_of": ["red", "blue"]}, "green", False), ({"required_values": ["<= 700"]}, "699", True),
     ({"required_values": ["<= 700"]}, "1,000", False), ({"required_values": [">= 1000"]}, " 1,000 ", True),
     ({"required_values": ["> 700"]}, "699", False), ({"required_values": ["== 3 |OR| == 5"]}, "5", True),
     ({"required_values": ["== 3"]}, "three", False), ({"exact_match": "5", "must_include": ["5"]}, "5", True),
     ({"exact_match": "5", "must_include": ["6"]}, "5", False),
     # The benchmark's own ways: integers only, < and > with a tolerance, no parts between slashes to exclude.
     ({"required_values": ["<= 700"]}, "699.5", False), ({"required_values": ["> 700"]}, "700", True),
     ({"required_values": ["< 700"]}, "700", True), ({"required_values": ["< 700"]}, "701", False),
     ({"must_exclude": ["red"]}, "red/blue", True), ({"must_include": ["red"]}, "red/blue", True)])
def test_every_reference_of_every_kind_must_hold(reference, answer, passes):
    assert string_match(answer, reference) is passes


@pytest.mark.parametrize(
    "reference", [{"exact_match": "N/A"}, {"must_include": ["N/A"]}, {"must_exclude": ["red"]}, {"one_of": [""]}])
def test_no_answer_earns_nothing_not_even_where_nothing_is_asked(reference):
    """The released trainer grades an episode that never exits as "N/A": its 25 unachievable tasks pay for giving up."""
    assert string_match(None, reference) is False


def test_one_of_takes_one_pair_of_quotes_off_an_answer_and_the_other_kinds_two():
    """As in VisualAgentBench, which cleans an answer once and, for these kinds, in the matcher once more."""
    assert string_match("\"'a'\"", {"one_of": ["'a"]}) and string_match("'A'", {"one_of": ["a"]})
    assert not string_match("'a'", {"one_of": ["'a"]})
    assert string_match("\"'a'\"", {"exact_match": "a"}) and string_match("\"'a'\"", {"must_include": ["a"]})
    assert not string_match("\"'a'\"", {"must_exclude": ["a"]})


def test_a_language_models_verdict_is_never_guessed():
    with pytest.raises(ValueError, match="language model"):
        string_match("anything", {"fuzzy_match": ["something"]})


# --------------------------------------------------------------------------------------------------- urls


@pytest.mark.parametrize("url, reference, note, passes",
                         [("http://h/a", "http://h/a", None, True), ("http://h/a/", "http://h/a", None, True),
                          ("http://h/a", "http://h/a/", "EXACT", True), ("http://h/a//", "http://h/a", None, False),
                          ("http://h/ab", "http://h/a", None, False), ("http://h/A", "http://h/a", None, False),
                          ("http://localhost:1/a", "http://127.0.0.1:1/a", None, True),
                          ("http://127.0.0.1:1/a", "http://localhost:1/a", None, True),
                          ("http://h/?a=1&b=2", "http://h/?b=2&a=1", None, False),
                          ("http://h/?a=1", "http://h/", None, False),
                          ("http://h/b", "http://h/a |OR| http://h/b", None, True),
                          ("http://h/c", "http://h/a |OR| http://h/b", None, False),
                          ("http://h/a/7", "http://h/a/", "GOLD in PRED", True),
                          ("http://h/a", "http://h/a/7", "GOLD in PRED", False),
                          ("http://h/?a=1&b=2", "http://h/?b=2&a=1", "GOLD in PRED", False),
                          ("http://h/?a=1&b=2", "http://h/?a=1", "GOLD in PRED", True),
                          ("http://h/b/1", "http://h/a |OR| http://h/b", "GOLD in PRED", True)])
def test_url_match(url, reference, note, passes):
    assert url_match(url, reference, note) is passes


@pytest.mark.parametrize("note", ["GOLD IN PRED", "exact", "", 0])
def test_an_unknown_rule_for_urls_is_refused_and_not_taken_for_exact(note):
    with pytest.raises(ValueError, match=f"url_note {note!r} is unknown"):
        url_match("http://h/a", "http://h/a", note)


# -------------------------------------------------------------------------------------------------- pages


@pytest.fixture
def judge(run):
    """judge(start_url, *[(task, answer)]) -> their checks, each in a browser context of its own, or the exception."""
    async def play(start_url, judgements):
        out = []
        async with Browser(Settings(timeout=10)) as browser:
            for task, answer in judgements:
                session = await browser.open({"start_url": start_url})
                try:
                    out.append(await checks(task, answer, session.page))
                except (PlaywrightError, EnvError, ConnectionError, ValueError) as error:
                    out.append(error)
                await session.close()
        return out

    return lambda start_url, *judgements: run(play(start_url, judgements))


def several(*tasks):
    """One task that looks at the pages of several."""
    return make_task(eval_types=["program_html"], program_html=[t["eval"]["program_html"][0] for t in tasks])


PAGE = """<title>cart</title><h1 id=t>Red Lamp</h1><p class=n>3</p><p class=n>5</p><input value="size m">
          <b>fish &amp; chips</b><button onclick="late.textContent = 'unfolded'">more</button><i id=late></i>"""
TEXT = "document.querySelector('#t').innerText"
LATE, UNFOLD = "document.querySelector('#late').textContent", ["document.querySelector('button').click()"]


def test_program_html_reads_pages_as_the_benchmark_does(judge, site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    joined = "[...document.querySelectorAll('.n')].map(e => e.innerText).join(', ')"
    table = [
        (target("last", TEXT, exact_match="red lamp"), True), (target("last", TEXT, exact_match="red"), False),
        (target("last", TEXT, must_include=["red", "lamp"]), True),
        (target("last", TEXT, must_include=["re"]), False), (target("last", TEXT, must_exclude=["blue"]), True),
        (target("last", TEXT, must_include=["blue |OR| red"]), True),
        (target("last", "document.querySelector('input').value", exact_match="size m"), True),
        (target("last", joined, exact_match="3, 5"), True),
        (target("last", "document.querySelectorAll('.n').length", required_values=["== 2"]), True),
        (target("last", "", must_include=["red lamp"]), True),
        (target("last", "", must_include=["fish & chips"]), False),
        (target("last", "", must_include=["fish &amp; chips"]), True),
        (target(f"{base}/other", TEXT, exact_match="blue lamp"), True),
        (target(f"{base}/other", TEXT, exact_match="red lamp"), False),
        (target("last", LATE, exact_match="unfolded"), False),
        (target("last", LATE, UNFOLD, exact_match="unfolded"), True)]
    for (task, wanted), made in zip(table, judge(f"{base}/", *[(task, None) for task, _ in table]), strict=True):
        assert [passed for _, passed, _ in made] == [wanted] * len(made), (task["eval"], made)


def test_the_page_that_the_episode_left_open_is_judged_before_other_pages(judge, site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    both = several(target(f"{base}/other", TEXT, exact_match="blue lamp"), target("last", TEXT, exact_match="red lamp"))
    (made,) = judge(f"{base}/", (both, None))
    assert [passed for _, passed, _ in made] == [True, True]


def test_a_page_that_differs_by_its_fragment_alone_is_loaded_again(judge, site):
    base = site({"/": PAGE})
    both = several(target("last", LATE, UNFOLD, exact_match="unfolded"), target(f"{base}/#t", LATE, exact_match="unfolded"))
    (made,) = judge(f"{base}/", (both, None))
    assert [passed for _, passed, _ in made] == [True, False]


def test_a_missing_element_fails_every_check(judge, site):
    locators = ("document.querySelector('#no').innerText", "document.querySelector('#no')", "document.querySelector('[')")
    contents = ({"must_include": ["x"]}, {"must_exclude": ["x"]}, {"exact_match": ""}, {"exact_match": "None"})
    tasks = [(target("last", locator, **c), "done") for locator in locators for c in contents]
    made = judge(site({"/": PAGE}) + "/", *tasks)
    assert all(not passed and "there is no" in why for (_, passed, why), in made)


def test_the_page_says_why_there_is_no_such_text(judge, site):
    ((_, passed, why),), = judge(site({"/": PAGE}) + "/", (target("last", "document.querySelect('p').innerText", exact_match="x"), None))
    assert not passed and "querySelect is not a function" in why


@pytest.mark.parametrize("locator", ["document.querySelector('p'.innerText", "document.("])
def test_a_locator_that_is_no_javascript_is_the_tasks_fault(judge, site, locator):
    voided, = judge(site({"/": PAGE}) + "/", (target("last", locator, must_include=["x"]), "done"))
    assert isinstance(voided, EnvError) and "is no JavaScript (SyntaxError" in str(voided)


def test_text_that_a_locator_cannot_parse_is_the_agents(judge, site):
    """JSON.parse raises a SyntaxError, too, but the locator itself is in order."""
    ((_, passed, why),), = judge(site({"/": PAGE}) + "/", (target("last", "document.body && JSON.parse('{').n", exact_match="1"), None))
    assert not passed and "JSON" in why


def test_a_value_that_playwright_cannot_read_is_a_missing_element(judge, site):
    page = "<p id=t>x</p><script>document.querySelector = () => ({innerText: new Date(8.64e15)})</script>"
    ((_, passed, why),), = judge(site({"/": page}) + "/", (target("last", TEXT, must_include=["x"]), "done"))
    assert not passed and "there is no" in why


def test_a_site_that_does_not_answer_is_no_verdict(judge, site):
    def broken(handler):
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}/"
        base = site({"/": PAGE, "/503": broken})
        pages = (dead, f"{base}/503", f"{base}/no")
        refused, failing, absent = judge(f"{base}/", *[(target(url, "", must_include=["x y"]), None) for url in pages])
    assert isinstance(refused, PlaywrightError) and isinstance(failing, EnvError)
    assert absent[0][1] is False  # a page that does not exist is an honest failure


def test_the_judge_sees_the_episodes_own_world_and_waits_for_scripts(judge, site):
    def whoami(handler):
        body = f"<p id=t>{handler.headers.get('Cookie', 'nobody')}</p>".encode()
        handler.send_response(200)
        handler.send_header("Set-Cookie", "user=ada")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    slow = "fetch('/who').then(r => r.text()).then(t => document.body.innerHTML = '<p id=t>built</p>')"
    late = "setTimeout(() => document.getElementById('t').textContent = 'built', 700)"
    restless = "sessionStorage.n || setTimeout(() => { sessionStorage.n = 1; location.reload() }, 400)"
    scripts = {"/slow": slow, "/late": late, "/restless": restless}
    base = site({"/": PAGE, "/who": whoami} | {path: f"{PAGE}<script>{code}</script>" for path, code in scripts.items()})
    visits = [target(f"{base}/who", TEXT, must_include=[who]) for who in ("nobody", "user=ada")]
    built = target("last", TEXT, exact_match="built")
    twice, opened = judge(f"{base}/", (several(*visits), None), (target(f"{base}/slow", TEXT, exact_match="built"), None))
    assert twice[0][1] and twice[1][1] and opened[0][1]
    assert judge(f"{base}/late", (built, None))[0][0][1]  # also where the episode ended
    assert judge(f"{base}/restless", (built, None))[0][0][1] is False  # a verdict, not an error


def test_a_page_opened_by_its_address_is_looked_at_again_while_it_still_changes(judge, site):
    """The benchmark waits three seconds. Scripts often show things later than their last request."""
    late = f"{PAGE}<script>setTimeout(() => document.getElementById('t').textContent = 'built', 700)</script>"
    base = site({"/": PAGE, "/late": late})
    there, absent = judge(f"{base}/", *[(target(f"{base}/late", TEXT, **contents), None) for contents in
                                        ({"exact_match": "built"}, {"must_exclude": ["built"]})])
    assert there[0][1] and not absent[0][1]


def test_a_page_that_is_looked_at_again_has_its_late_scripts(judge, site):
    """A script that the page adds and that takes longer than the second in which nothing changes."""
    def built(handler):
        time.sleep(2.2)
        handler.send_response(200)
        handler.send_header("Content-Length", "55")
        handler.end_headers()
        handler.wfile.write(b"document.getElementById('t').textContent = 'built'".ljust(55))

    add = "const s = document.createElement('script'); s.src = '/built.js'; document.head.append(s);"
    base = site({"/": PAGE, "/app": f"{PAGE}<script>setTimeout(() => {{ {add} }}, 50)</script>", "/built.js": built})
    ((_, passed, why),), = judge(f"{base}/", (target(f"{base}/app", TEXT, exact_match="built"), None))
    assert passed, why


def test_looking_again_does_not_press_a_button_again(judge, site):
    page = """<i id=late></i><button onclick="late.textContent += 'pressed'">more</button>
              <script>setTimeout(() => document.body.append(' in time'), 700)</script>"""
    locator = "document.body.innerText.replace('more', '')"
    ((_, passed, why),), = judge(site({"/": page}) + "/", (target("last", locator, UNFOLD, exact_match="pressed in time"), None))
    assert passed, why


def test_javascript_of_a_task_file_runs_as_in_the_benchmark(judge, site):
    """It evaluates `() => TEXT`: of `a; b` only b runs, {...} is a block, and a failed action ends the rest."""
    missing, block = "document.querySelector('#no').click()", "{ document.querySelector('#late').textContent = 'block' }"
    two = "document.querySelector('#late').textContent = 'a'; document.querySelector('#t').textContent = 'b'"
    rejected = "document.body && Promise.reject(new Error('no'))"
    table = [(LATE, [block], "block", True), (f"{LATE} + {TEXT}", [two], "b", True), (LATE, [missing, *UNFOLD], "", True),
             (f"document.body && Promise.resolve({TEXT})", [], "red lamp", True), (rejected, [], "", False)]
    tasks = [(target("last", locator, actions, exact_match=text), None) for locator, actions, text, _ in table]
    made = judge(site({"/": PAGE}) + "/", *tasks)
    assert [passed for (_, passed, _), in made] == [passed for *_, passed in table], made


def test_helpers_are_looked_up_by_name_and_never_run_as_python(judge, site, tmp_path):
    page = """<table><tr><td data-label=Account><span class=gl-avatar-labeled-sublabel>@ada</span></td>
              <td class=col-max-role><span>Guest</span></td></tr>
              <tr><td data-label=Account><span class=gl-avatar-labeled-sublabel>@bob</span></td>
              <td class=col-max-role><span>Owner</span></td></tr></table>"""
    base = site({"/f/books/7/a-title/comment": page, "/f/books/7/": "<p id=t>the post</p>"})
    evil = f"func:__import__('os').system('touch {tmp_path}/evil')"
    role = "func:gitlab_get_project_memeber_role(__page__, '{}')"
    post, bob, nobody, *refused = judge(
        f"{base}/f/books/7/a-title/comment",
        (target("func:reddit_get_post_url('__last_url__')", TEXT, exact_match="the post"), None),
        (target("last", role.format("bob"), exact_match="owner"), None),
        (target("last", role.format("eve"), exact_match="owner"), None), (target("last", evil, exact_match="0"), None),
        (target("func:shopping_get_it()", TEXT, exact_match="0"), None))
    assert post[0][1] and bob[0][1] and not nobody[0][1]
    assert all(isinstance(error, ValueError) for error in refused) and not (tmp_path / "evil").exists()


def test_the_shops_helpers_ask_its_own_interface(judge, site):
    def said(answer, key=None):
        def handler(h):
            asked = h.rfile.read(int(h.headers.get("Content-Length", 0)))
            right = h.headers.get("Authorization") == "Bearer key" if key is None else json.loads(asked)["password"] == key
            body = json.dumps(answer).encode()
            h.send_response(200 if right else 401)
            h.send_header("Content-Length", str(len(body)))
            h.send_header("Content-Type", "application/json")
            h.end_headers()
            h.wfile.write(body)
        return handler

    base = site({"/": PAGE, "/rest/default/V1/integration/admin/token": said("key", "admin1234"),
                 "/rest/V1/orders": said({"items": [{"increment_id": "000000191"}]}),
                 "/sales/order/view/order_id/191/": "<p id=t>order 191</p>",
                 "/rest/V1/products/B07/reviews": said([{"nickname": "Ada", "ratings": [{"percent": 20}]},
                                                        {"nickname": "Bob", "ratings": [{"percent": 80}]}]),
                 "/rest/V1/products/B08/reviews": said([]), "/rest/V1/products/B10/reviews": said([{"ratings": []}])})
    helper = "func:shopping_get_sku_latest_review_{}('{}')"
    rows = [target("func:shopping_get_latest_order_url()", TEXT, exact_match="order 191"),
            target("last", helper.format("author", "B07"), exact_match="bob"),
            target("last", helper.format("rating", "B07"), must_include=["80"]),
            target("last", helper.format("author", "B08"), exact_match="bob"),
            target("last", helper.format("author", "B09"), exact_match="bob"),
            target("last", helper.format("rating", "B10"), exact_match="bob")]
    tasks = site_urls([check_row(row)[0] for row in rows], {"SHOPPING": base})
    *made, down, odd = judge(f"{base}/", *[(task, None) for task in tasks])
    assert [checks[0][1] for checks in made] == [True, True, True, False]
    assert isinstance(down, ConnectionError) and isinstance(odd, ConnectionError) and "latest_review_rating" in str(odd)


def test_a_task_file_may_ask_for_every_matcher_that_there_is():
    assert set(webarena.CHECKS) == set(evaluate.MATCHERS)


def test_the_reward_is_the_product_and_why_names_the_factor_that_was_0(run, site):
    base = site({"/": PAGE})
    task = target("last", TEXT, exact_match="red lamp")
    task["eval"] |= {"eval_types": ["string_match", "url_match", "program_html"],
                     "reference_answers": {"must_include": ["3"]}, "reference_url": base}

    async def play():
        async with Browser(Settings()) as browser:
            session, why = await browser.open({"start_url": f"{base}/"}), []
            rewards = [await score(task, answer, session.page) for answer in ("it is 3", "it is 4", None)]
            await score(task, "it is 4", session.page, why)
            await session.close()
            return rewards, why

    rewards, why = run(play())
    assert rewards == [1.0, 0.0, 0.0] and [passed for _, passed, _ in why] == [False, True, True]
    assert why[0][0] == "must_include “3”" and "it is 4" in why[0][2]


# ------------------------------------------------------------------------------------------- the benchmark

SHELF = """<title>shelf</title><h1>lamps</h1><a href="/red">red lamp</a> <a href="/blue">blue lamp</a>"""


def read_run(path):
    """(summary, trajectories) of a run's directory."""
    lines = (path / "trajectories.jsonl").read_text().splitlines()
    return json.loads((path / "summary.json").read_text()), [json.loads(line) for line in lines]


@pytest.fixture
def main(run, sandbox_sites, monkeypatch):
    """evaluate.main with the Chromium and the sandbox that the tests share."""
    monkeypatch.setattr(asyncio, "run", run)
    monkeypatch.setattr(evaluate.worlds, "open_sites", lambda *specs: contextlib.nullcontext({"sandbox": sandbox_sites}))
    return lambda **values: evaluate.main(Config(**values))


def shelf_tasks(base, path):
    """Two tasks that end on a page, one of them wanting words that only a judge can compare."""
    there = make_task(eval_types=["url_match"], reference_url=f"{base}/red")
    spoken = fuzzy(["red"]) | {"task_id": 8, "intent": "say the first lamp's colour"}
    path.write_text(json.dumps([task | {"start_url": f"{base}/"} for task in (there, spoken)]))
    return str(path)


def test_a_model_behind_a_url_plays_like_a_checkpoint_and_a_judge_judges_it(main, site, tmp_path, capsys, monkeypatch):
    def policy(request):
        assert request["model"] == "p" and request["temperature"] == 0.5 and request["max_tokens"] == 99
        roles = [m["role"] for m in request["messages"]]
        assert roles == ["system", *["user", "assistant"] * 4][:len(roles)]
        last = request["messages"][-1]["content"]
        if "say the first" in request["messages"][1]["content"]:
            return 'exit(message="It is red.\ud83d")'  # half a character
        if "Round 0" in last:
            assert last.startswith("Task: find the lamp") and "<a>red lamp <0></a>" in last
            return '<think>there</think><answer>do(action="Click", element="0")</answer>'
        assert "** Simplified html **" in request["messages"][1]["content"]  # the first page has been compressed away
        return 503 if len(tried) < 2 and not tried.append(0) else "exit(message='')"

    tried = []
    base = site({"/": SHELF, "/red": "<p>a red lamp</p>"})
    url, asked = chat_server(site, policy)
    judge_url, judged = chat_server(site, "correct")
    monkeypatch.setattr(Endpoint, "pause", 0.01)
    main(policy_url=url, policy_model="p", judge_url=judge_url, judge_model="j", temperature=0.5, max_new_tokens=99,
         max_context=4000, tasks=shelf_tasks(base, tmp_path / "tasks.json"), out=str(tmp_path / "run"), runs=2,
         max_turns=[2, 1])
    summary, records = read_run(tmp_path / "run")
    (long, two), (short, one) = summary["splits"].items()
    assert "within 2 turns" in long and "within 1 turns" in short
    assert two["success_rate"] == 1 and two["n"] == 4 and two["runs"] == [1, 1]
    assert two["pass_at"] == {"1": 1, "2": 1} and two["judge_free"]["n"] == 2
    assert one["success_rate"] == 1  # after the click, the page is right without an exit
    assert len(judged) <= 2 and judged[0]["model"] == "j"  # of four equal answers, two came at the same time
    assert len(records) == 8 and {r["turns"][0]["response"][:4] for r in records} == {"<thi", "exit"}
    out = capsys.readouterr().out
    assert "without a judge" in out and "pass@2 100.0%" in out


def test_a_policy_that_never_answers_ends_the_evaluation_with_one_sentence(main, site, tmp_path):
    url, _ = chat_server(site, 401)
    tasks = shelf_tasks(site({"/": SHELF}), tmp_path / "tasks.json")
    with pytest.raises(ValueError, match="none of the 1 episodes.*401"):
        main(policy_url=url, policy_model="p", tasks=tasks, out=str(tmp_path / "run"))


def test_where_servers_failed_their_output_is_named(tmp_path):
    broken = Trajectory({"task_id": 0}, status="env_error", checks=[["environment", False, "the server ended"]])
    (tmp_path / "servers.log").write_text("== task 0\n")
    with pytest.raises(ValueError, match="none of the 2 .* the server ended; see what .* wrote in .*servers.log"):
        evaluate.require_verdicts([broken, broken], tmp_path)
    evaluate.require_verdicts([broken, Trajectory({"task_id": 0})], tmp_path)


def test_a_checkpoint_is_evaluated_end_to_end(main, checkpoint, tmp_path, capsys):
    """A random policy: no success, but every file, and a second evaluation replaces the first."""
    before, out = tmp_path / "before", tmp_path / "run"
    out.mkdir()
    before.write_text("{}")
    os.link(before, out / "config.json")
    for _ in range(2):
        main(model=str(checkpoint), tasks="sandbox:test:2,sandbox:test-unseen:1", out=str(out), max_turns=[2],
             max_new_tokens=8, max_context=2000, concurrency=3)
    summary, records = read_run(out)
    assert summary["n"] == 3 and summary["splits"]["sandbox:test:2"]["n"] == 2 and len(records) == 3
    assert "sandbox:test-unseen:1" in capsys.readouterr().out and (out / "report.html").exists()
    assert json.loads((out / "config.json").read_text())["run"]["max_turns"] == [2]
    assert before.read_text() == "{}"  # config.json was replaced, not written over: a reader never sees half of it


def test_an_evaluation_in_a_training_runs_directory_keeps_its_config(main, site, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    url, _ = chat_server(site, "exit(message='')")
    tasks = shelf_tasks(site({"/": SHELF}), tmp_path / "tasks.json")
    main(policy_url=url, policy_model="p", tasks=tasks, out=str(tmp_path), max_turns=[1])
    assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen2"}' and read_run(tmp_path)[0]["n"] == 1


def test_two_ranks_split_the_tasks_and_give_one_ranks_figures(main, sandbox_sites, tmp_path, capfd):
    """Three tasks on two ranks, two runs each; only rank 0 claims the directory and writes."""
    pairs = list(permutations("kitchen garden office".split(), 2))[:3]
    tasks = [make_task(eval_types=["url_match"], reference_url=f"{sandbox_sites['SHOPPING']}/category/{a}") | {
        "task_id": i, "world": i, "start_url": sandbox_sites["SHOPPING"], "intent": f"point at {a} else at {b}"}
        for i, (a, b) in enumerate(pairs)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    values = {"model": "worlds/base", "tasks": str(tmp_path / "tasks.json"), "temperature": 1.0, "runs": 2,
              "concurrency": 1, "max_new_tokens": 32, "max_context": 1536}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    flags += ["--max-turns=1", f"--out={tmp_path / '2'}"]
    both = start_ranks("evaluate.py", *flags)
    main(**values, max_turns=[1], out=str(tmp_path / "1"))
    assert [process.wait(timeout=120) for process in both] == [0, 0], capfd.readouterr().err
    found = []
    for ranks in "12":
        summary, records = read_run(tmp_path / ranks)
        played = [(r["task_id"], r["member"], r["success"], [t["response"] for t in r["turns"]]) for r in records]
        found.append(({key: value for key, value in summary.items() if key != "run"}, played))
    assert found[0] == found[1] and [row[:2] for row in found[1][1]] == [(i, k) for i in range(3) for k in range(2)]
    assert len({tuple(row[3]) for row in found[1][1]}) > 1  # the responses are not all the same


# -------------------------------------------------------------------------------------- figures and tables


@pytest.mark.parametrize("successes, n, low, high", [
    (0, 10, 0, .2775), (1, 10, .0179, .4042), (5, 10, .2366, .7634), (10, 10, .7225, 1), (56, 165, .2716, .4146),
    (0, 0, 0, 1)])
def test_wilson_against_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-3)


def episodes(*wins):
    """One task per row of successes, one run per success. What training maximizes is something else."""
    return [Trajectory(GOOD | {"task_id": i}, member=m, success=float(r), reward=-0.3 + 0.7 * r)
            for i, row in enumerate(wins) for m, r in enumerate(row)]


def played(success, site="shopping", status="ok", answer="x", fault="", **turn):
    made = Turn(**{"url": "http://h/", "observation": "page", "observation_ids": [1], "action_ids": [5, 6],
                   "logps": [-.1, -2.], "response": "ab", "action": "exit()"} | turn)
    return Trajectory(GOOD | {"sites": [site], "intent_template_id": site}, turns=[made], answer=answer, success=success,
                      reward=-success, status=status, fault=fault)


def test_runs_of_one_task_are_not_counted_as_independent():
    """Ten tasks that always or never succeed are ten observations, however often they are played."""
    settled = rate(episodes(*[[1] * 4] * 5, *[[0] * 4] * 5))
    assert settled["n"] == 40 and settled["ci95"] == pytest.approx(wilson(5, 10))
    mixed = rate(episodes(*[[1, 0, 1, 0]] * 10))
    assert mixed["success_rate"] == 0.5 and mixed["ci95"] == pytest.approx(wilson(5, 10))
    noisy = rate(episodes([1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1]))
    assert wilson(2, 4)[0] < noisy["ci95"][0] <= wilson(8, 16)[0] + 1e-9
    assert rate(episodes([1], [0], [0]))["ci95"] == pytest.approx(wilson(1, 3))


def test_pass_at_k_is_the_chance_that_one_of_k_runs_succeeds():
    wins = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    drawn = {k: sum(any(c) for row in wins for c in combinations(row, k)) / 3 / math.comb(4, k) for k in range(1, 5)}
    assert pass_at(episodes(*wins)) == pytest.approx(drawn)
    assert pass_at(episodes([1, 0, 0, 0], [1, 1]))[2] == pytest.approx((0.5 + 1) / 2)  # two runs of the second broke


def test_intervals_cover_the_truth_as_often_as_their_docstring_says():
    """20 tasks, 8 runs each: half of them nearly always succeed, or two of them carry nearly all success."""
    def coverage(low, high, share, n=1500):
        rng, hits = random.Random(0), 0
        truth = low * (1 - share) + high * share
        for _ in range(n):
            chances = [high if rng.random() < share else low for _ in range(20)]
            bottom, top = rate(episodes(*[[rng.random() < p for _ in range(8)] for p in chances]))["ci95"]
            hits += bottom <= truth <= top
        return hits / n

    assert coverage(0.05, 0.95, 0.5) == pytest.approx(0.95, abs=0.015)
    assert coverage(0.02, 0.9, 0.1) == pytest.approx(0.85, abs=0.02)


@pytest.mark.parametrize("reward", [0.4, -0.5, -3.0, 2.0])
def test_a_reward_that_is_no_success_changes_no_figure(reward):
    """A reward of 0.4 once gave pass@1 = 0.5, and a negative one "math domain error"."""
    shaped = episodes([1, 0], [0, 0])
    for tau in shaped:
        tau.reward = reward
    assert pass_at(shaped) == {1: 0.25, 2: 0.5} and rate(shaped)["success_rate"] == 0.25
    assert summarize(shaped) == summarize(episodes([1, 0], [0, 0]))


def test_without_a_valid_episode_there_is_no_success_rate_not_even_0():
    broken = summarize([played(0.0, status="env_error"), played(0.0, "reddit", "env_error")])
    assert [broken[key] for key in ("success_rate", "turns", "response_tokens", "trajectory_tokens", "exited")] == [None] * 5
    assert (broken["n"], broken["ci95"], broken["env_errors"], broken["episodes"]) == (0, [0.0, 1.0], 2, 2)
    assert broken["per_site"]["reddit"]["success_rate"] is None
    line = table([("sandbox:test", broken)]).splitlines()[1].split()
    assert line == ["sandbox:test", "-", "0.0%", "to", "100.0%", "0", "2"]
    one_run_broke = episodes([1, 0], [1, 0])
    one_run_broke[1].status = one_run_broke[3].status = "env_error"
    evaluate.print_splits({"test": summarize(one_run_broke)})
    assert summarize(one_run_broke)["runs"] == [1.0, None]


def test_the_figures_of_a_step_count_turns_tokens_and_what_went_wrong():
    cut = played(0.0, fault="Chromium crashed", ended=False, action="", error="cannot read it", page_cut=True)
    cut.turns.append(replace(cut.turns[0], ended=True, action="do(...)", observation_ids=[1, 2, 3], page_cut=False))
    made = figures([cut, played(1.0), played(0.0, status="env_error")])
    assert {key: made[key] for key in made if key != "ci95"} == {
        "success_rate": 0.5, "n": 2, "episodes": 3, "env_errors": 1, "env_retries": 1, "turns": 1.5, "response_tokens": 2.0,
        "trajectory_tokens": (1 + 2 + 3 + 2 + 1 + 2) / 2, "exited": 1.0, "truncated": 1, "invalid_actions": 1,
        "failed_actions": 1, "pages_cut": 1}


def test_tasks_of_two_sources_with_one_id_are_two_tasks():
    twice = episodes([1, 1], [0, 0])
    for tau in twice:
        tau.task = GOOD | ({"source": 1} if tau.task["task_id"] else {})
    assert rate(twice)["ci95"] == pytest.approx(wilson(1, 2)) and pass_at(twice) == {1: 0.5, 2: 0.5}


def test_an_environment_error_is_not_a_failure_in_the_summary():
    s = summarize([played(1.0), played(0.0, answer=None),
                   played(1.0, "reddit", ended=False, action="", error="no action"), played(0.0, "reddit", "env_error")])
    assert (s["n"], s["env_errors"], s["episodes"]) == (3, 1, 4) and s["success_rate"] == pytest.approx(2 / 3)
    assert s["per_site"]["reddit"]["success_rate"] == 1 and s["per_site"]["reddit"]["n"] == 1
    assert s["per_template"]["shopping"]["n"] == 2 and s["exited"] == pytest.approx(2 / 3)
    assert (s["turns"], s["response_tokens"], s["truncated"], s["invalid_actions"]) == (1, 2, 1, 1)
    assert summarize([])["n"] == 0 and json.loads(json.dumps(s, allow_nan=False)) == s
    lines = table([("sandbox:test", s), ("  reddit", s["per_site"]["reddit"])]).splitlines()
    assert "66.7%" in lines[1] and "100.0%" in lines[2] and len({line.index("%") for line in lines[1:]}) == 1


def test_compare_puts_the_same_split_of_several_runs_next_to_each_other(tmp_path):
    for name, success in (("bc", 0.25), ("r1", 0.5)):
        figures = {"success_rate": success, "ci95": [0.1, 0.9], "n": 4}
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"splits": {"test": figures, "unseen": figures}}))
    lines = evaluate.compare([str(tmp_path / "bc"), str(tmp_path / "r1")]).splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [["test", "bc", "25.0%"], ["test", "r1", "50.0%"],
                                                        ["unseen", "bc", "25.0%"], ["unseen", "r1", "50.0%"]]
    with pytest.raises(ValueError, match=f"{tmp_path}/none/summary.json"):
        evaluate.compare([str(tmp_path / "none")])


# ------------------------------------------------------------------------------ the task's side of an episode


def test_a_replaced_score_is_used_wherever_an_environment_judges(monkeypatch, tmp_path):
    """bc.py once kept the original of a `score` that a fork had replaced."""
    async def generous(task, answer, page, why=None, judge=None):
        return 1.0
    env = Environment({}, tmp_path, SiteSettings())
    monkeypatch.setattr(evaluate, "score", generous)
    assert asyncio.run(env.score(GOOD, None, None, [])) == 1.0


def test_only_one_rank_asks_the_reset_server_and_the_others_wait(monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(webarena, "reset", lambda url: done.append(url))
    monkeypatch.setattr(runs, "all_max", lambda value: done.append("together"))
    env = Environment({}, tmp_path, SiteSettings(reset_url="http://h:1"))
    env.reset([GOOD])
    monkeypatch.setattr(runs, "rank", lambda: 1)
    env.reset([GOOD])
    assert done == ["http://h:1", "together", "together"]


def test_the_first_episodes_of_a_batch_get_pictures_and_equal_ids_get_different_names(tmp_path):
    env = Environment({}, tmp_path, SiteSettings(screenshots=3))
    env.reset([GOOD, GOOD | {"source": 1}], group=2, name="0/4")
    assert env.pictured == {("7", 0): "0/4-7-0", ("7", 1): "0/4-7-1", ("1:7", 0): "0/4-1:7-0"}
    env.reset([GOOD], group=2)  # without a name, as for held-out tasks, nobody would see them
    assert env.pictured == {}


def test_the_sources_of_an_evaluation_are_numbered_apart(site, tmp_path):
    for name, n in (("a", 1), ("b", 2)):
        rows = [GOOD | {"task_id": i, "start_url": site({"/": SHELF})} for i in range(n)]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    a, b = (str(tmp_path / f"{name}.json") for name in "ab")
    splits = evaluate.load_splits(Config(tasks=f"{a},{b}"), Environment({}, tmp_path, SiteSettings()))
    found = {name: [(task.get("source"), task["task_id"]) for task in tasks] for name, tasks in splits.items()}
    assert found == {a: [(None, 0)], b: [(1, 0), (1, 1)]}
    (tmp_path / "a.json").write_text(json.dumps([fuzzy(["red"]) | {"start_url": site({"/": SHELF})}]))
    with pytest.raises(ValueError, match="--tasks .*a.json leaves no task to play"):
        evaluate.load_splits(Config(tasks=f"{a},{b}"), Environment({}, tmp_path, SiteSettings()))


# --------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("arguments, max_context, max_turns", [
    (["--model", "worlds/base"], 1536, [10]), (["--model", "worlds/base", "--max-context", "900"], 900, [10]),
    (["--model", "worlds/base", "--max-turns", "5,10"], 1536, [5, 10]), (["--model", "a/b"], 16384, [15]),
    ([], 1536, [10]), (["--policy-url", "http://127.0.0.1:9/v1"], 16384, [15]),
    (["--policy-url", "http://127.0.0.1:9/v1", "--model", "worlds/base"], 1536, [10]),
    (["--validate", "tasks.json"], 16384, [15]), (["--report"], 16384, [15]), (["--compare", "a,b"], 16384, [15])])
def test_evaluation_plays_with_the_sizes_of_training(arguments, max_context, max_turns, monkeypatch, tmp_path):
    """Of --model, else of runs/mgrpo, but only if a checkpoint plays or its format is asked for."""
    monkeypatch.chdir(tmp_path)
    for name in ("worlds/base", "runs/mgrpo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"run": {"max_context": 1536, "max_turns": 10, "max_new_tokens": 64}}')
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    cfg = runs.parse_args(Config, "", {}, evaluate.checkpoint_of)
    assert (cfg.max_context, cfg.max_turns) == (max_context, max_turns)


def test_the_flags_of_an_evaluation_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runs.parse_args(Config, evaluate.__doc__, {}, evaluate.checkpoint_of)
    shown = " ".join(capsys.readouterr().out.split())
    says = ["0: greedy (default: 0.0)", "--max-turns N,N,...", "(default: [15])", "WebArena's reset server"]
    assert end.value.code == 0 and all(text in shown for text in says), shown


@pytest.mark.parametrize("arguments, says", [
    (["--model", "no/such/checkpoint"], ["no/such/checkpoint"]), (["--validate", "nowhere.json"], ["nowhere.json"]),
    (["--report", "--out", "nowhere"], ["nowhere", "--out"]), (["--max-turns", "5;10"], ["--max-turns", "5;10"])])
def test_bad_input_gives_one_sentence_and_a_status(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runs.command_line(evaluate.main, Config, "", start=evaluate.checkpoint_of)
    said = end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert end.value.code and "\n" not in said and all(word in said for word in ["evaluate.py: ", *says])


def test_a_chromium_that_does_not_start_is_one_sentence_with_its_own_complaint(monkeypatch, capsys, tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho 'libnss3.so: cannot open' >&2\nexit 127\n")
    broken.chmod(0o755)

    async def start():
        async with Browser(Settings()):
            pass
    monkeypatch.setattr("worlds.browser.find_chromium", lambda *_: str(broken))
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    with pytest.raises(SystemExit) as end:
        runs.command_line(lambda cfg: asyncio.run(start()), Config, "")
    said = end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert said == "evaluate.py: Chromium failed: libnss3.so: cannot open"


def test_a_finished_evaluation_ends_without_a_status(site, tmp_path):
    """The script as it is called: figures are written again, and a task file is looked at."""
    (tmp_path / "tasks.json").write_text(json.dumps([GOOD]))
    for arguments, says in ((["--report", "--out", tmp_path], "report.html"),
                            (["--validate", tmp_path / "tasks.json"], "1 usable tasks, 0 broken rows")):
        done = subprocess.run([sys.executable, "evaluate.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and says in done.stdout, done.stderr
