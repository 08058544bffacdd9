"""Judging: what earns the success and what does not. The task's side of an episode, the benchmark, figures."""
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest
from conftest import GOOD, ROOT, answer, chat_server, fuzzy, make_task, target
from test_run import start_ranks

import evaluate
import run as runs
from compress import Trajectory, Turn
from evaluate import (SiteSettings, Config, Environment, checks, episode_metrics, pass_at, rate, score, string_match,
                      summarize, table, url_match, wilson)
from rollout import Settings
from worlds import webarena
from worlds.browser import Browser, EnvError, PlaywrightError
from worlds.endpoint import Endpoint
from worlds.webarena import check_row, site_urls
from worlds.words import words

# ------------------------------------------------------------------------------------------------ answers

EXACT = [
    ("170", "170", True),
    ("170", "'170'", True),
    ("170", '"170"', True),
    ('"170"', "170", True),
    ("Paid", "pAID", True),
    ("170", " 170", False),
    ("170", "170.", False),
    ("$49", "$49", True),
    ("N/A", "n/a", True),
    ("170", "", False),
]

INCLUDE = [
    # The disputed rows first: WebArena's own evaluator passes "170" in "000000170".
    ("170", "000000170", False),
    ("170", "order 000000170", False),
    ("170", "it is order 170.", True),
    ("170", "170/171", True),
    ("170", "170, 171", True),
    ("170", "(170)", True),
    ("0", "there are 10", False),
    ("0", "0", True),
    ("nils", "nils's post", True),
    ("nils", "it was Nils", True),
    ("red lamp", "two Red Lamps", True),
    ("red lamp", "lamp red", False),
    ("$7.50", "it costs $7.50 now", True),
    ("7.50", "it costs $7.50", True),
    ("5%", "15%", True),
    ("N/A", "n/a", True),
    ("N/A", "not available", False),
    ("LGTM |OR| looks good", "it looks good", True),
    ("LGTM |OR| looks good", "fine", False),
    ("LGTM |OR| looks good", "lgtm!", True),
    ("10:30", "at 10:30", True),
    ("don't", "i don't know", True),
    ("state-of-art", "a state-of-art lamp", True),
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
    assert len(rows) > 400
    for text, cut in rows:
        assert words(text) == cut.split()


@pytest.mark.parametrize("text, nltks, ours", [
    ("maj. jones", "maj. jones", "maj . jones"),
    ("'tis'twas", "'t is 't was", "'t is 'twas"),
    ('?"lamp?" b', "? `` lamp ? '' b", "? '' lamp ? '' b"),
])
def test_words_differ_from_nltks_where_their_file_says_so(text, nltks, ours):
    assert nltks != ours
    assert words(text) == ours.split()


@pytest.mark.parametrize("ref, page, passes", [
    ("lamps", "(we sell lamps.)</p>", True),
    ("lamps", "we sell lamps.</p>", False),
    ("lamps", 'lamps." He said', True),
    ("red", "it is 'red' I think", False),
    ("present", "2020–present", False),
    ("2020–present", "2020–presently", False),
    ("lamp", "::lamp ,,lamp", False),
    ("can", "you cannot", True),
    ("inc", "acme inc. sells", False),
    ("5", "see order 5. next", False),
    ("5", "see order 5. Six", False),
    ("5", "see order 5. 6", True),
    ("red ", "red ", False),
])
def test_a_full_stop_or_a_quote_may_be_part_of_a_word(ref, page, passes):
    """As in the benchmark: a single word must be one of nltk's words, as it stands."""
    assert string_match(page, {"must_include": [ref]}) is passes


@pytest.mark.parametrize("reference, answer, passes", [
    ({"must_include": ["red", "blue"]}, "red and blue", True),
    ({"must_include": ["red", "blue"]}, "red", False),
    ({"must_include": "170"}, "071", False),  # a bare string is one reference, not three letters
    ({"must_exclude": ["red"]}, "a red one", False),
    ({"must_exclude": ["red"]}, "bored", True),
    ({"must_exclude": ["red lamp"]}, "a red lamp", False),
    ({"one_of": ["red", "blue"]}, "dark blue", True),
    ({"one_of": ["red", "blue"]}, "green", False),
    ({"required_values": ["<= 700"]}, "699", True),
    ({"required_values": ["<= 700"]}, "1,000", False),
    ({"required_values": [">= 1000"]}, " 1,000 ", True),
    ({"required_values": ["> 700"]}, "699", False),
    ({"required_values": ["== 3 |OR| == 5"]}, "5", True),
    ({"required_values": ["== 3"]}, "three", False),
    ({"exact_match": "5", "must_include": ["5"]}, "5", True),
    ({"exact_match": "5", "must_include": ["6"]}, "5", False),
    # The benchmark's own ways: integers only, < and > with a tolerance, no parts between slashes to exclude.
    ({"required_values": ["<= 700"]}, "699.5", False),
    ({"required_values": ["> 700"]}, "700", True),
    ({"required_values": ["< 700"]}, "700", True),
    ({"required_values": ["< 700"]}, "701", False),
    ({"must_exclude": ["red"]}, "red/blue", True),
    ({"must_include": ["red"]}, "red/blue", True),
])
def test_every_reference_of_every_kind_must_hold(reference, answer, passes):
    assert string_match(answer, reference) is passes


@pytest.mark.parametrize("reference", [
    {"exact_match": "N/A"},
    {"must_include": ["N/A"]},
    {"must_exclude": ["red"]},
    {"one_of": [""]},
])
def test_no_answer_earns_nothing_not_even_where_nothing_is_asked(reference):
    """The released trainer grades an episode that never exits as "N/A": its 25 unachievable tasks pay for giving up."""
    assert string_match(None, reference) is False


def test_one_of_takes_one_pair_of_quotes_off_an_answer_and_the_other_kinds_two():
    """As in VisualAgentBench, which cleans an answer once and, for these kinds, in the matcher once more."""
    once = "'a'"
    twice = "\"'a'\""

    assert string_match(twice, {"one_of": ["'a"]})
    assert string_match("'A'", {"one_of": ["a"]})
    assert not string_match(once, {"one_of": ["'a"]})

    assert string_match(twice, {"exact_match": "a"})
    assert string_match(twice, {"must_include": ["a"]})
    assert not string_match(twice, {"must_exclude": ["a"]})


@pytest.mark.parametrize("inequality, answer, passes", [
    (">= 7.5", "7", False),
    ("<= 7.5", "7", True),
    (">= 7.5", "8", True),
])
def test_a_bound_may_lie_between_two_integers(inequality, answer, passes):
    assert string_match(answer, {"required_values": [inequality]}) is passes


def test_a_language_models_verdict_is_never_guessed():
    with pytest.raises(ValueError, match="language model"):
        string_match("anything", {"fuzzy_match": ["something"]})


# --------------------------------------------------------------------------------------------------- urls


@pytest.mark.parametrize("url, reference, note, passes", [
    ("http://h/a", "http://h/a", None, True),
    ("http://h/a/", "http://h/a", None, True),
    ("http://h/a", "http://h/a/", "EXACT", True),
    ("http://h/a//", "http://h/a", None, False),
    ("http://h/ab", "http://h/a", None, False),
    ("http://h/A", "http://h/a", None, False),
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
    ("http://h/b/1", "http://h/a |OR| http://h/b", "GOLD in PRED", True),
])
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
            for task, said in judgements:
                session = await browser.open({"start_url": start_url})
                try:
                    out.append(await checks(task, said, session.page))
                except (PlaywrightError, EnvError, ConnectionError, ValueError) as error:
                    out.append(error)
                await session.close()
        return out

    def judge(start_url, *judgements):
        return run(play(start_url, judgements))
    return judge


def unanswered(*tasks):
    """Judgements of episodes that gave no answer."""
    return [(task, None) for task in tasks]


def only_check(judge, start_url, task, said=None):
    """The check of a task that makes one."""
    (made,) = judge(start_url, (task, said))
    (check,) = made
    return check


def several(*tasks):
    """One task that looks at the pages of several."""
    pages = [task["eval"]["program_html"][0] for task in tasks]
    return make_task(eval_types=["program_html"], program_html=pages)


PAGE = """<title>cart</title><h1 id=t>Red Lamp</h1><p class=n>3</p><p class=n>5</p><input value="size m">
          <b>fish &amp; chips</b><button onclick="late.textContent = 'unfolded'">more</button><i id=late></i>"""
TEXT = "document.querySelector('#t').innerText"
LATE = "document.querySelector('#late').textContent"
UNFOLD = ["document.querySelector('button').click()"]


def test_program_html_reads_pages_as_the_benchmark_does(judge, site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    size = "document.querySelector('input').value"
    joined = "[...document.querySelectorAll('.n')].map(e => e.innerText).join(', ')"
    count = "document.querySelectorAll('.n').length"
    passing = [
        target("last", TEXT, exact_match="red lamp"),
        target("last", TEXT, must_include=["red", "lamp"]),
        target("last", TEXT, must_exclude=["blue"]),
        target("last", TEXT, must_include=["blue |OR| red"]),
        target("last", size, exact_match="size m"),
        target("last", joined, exact_match="3, 5"),
        target("last", count, required_values=["== 2"]),
        target("last", "", must_include=["red lamp"]),
        target("last", "", must_include=["fish &amp; chips"]),
        target(f"{base}/other", TEXT, exact_match="blue lamp"),
        target("last", LATE, UNFOLD, exact_match="unfolded"),
    ]
    failing = [
        target("last", TEXT, exact_match="red"),
        target("last", TEXT, must_include=["re"]),
        target("last", "", must_include=["fish & chips"]),
        target(f"{base}/other", TEXT, exact_match="red lamp"),
        target("last", LATE, exact_match="unfolded"),
    ]
    tasks = passing + failing
    verdicts = [True] * len(passing) + [False] * len(failing)

    judged = judge(f"{base}/", *unanswered(*tasks))

    for task, verdict, made in zip(tasks, verdicts, judged, strict=True):
        passed = [check.passed for check in made]
        assert passed == [verdict] * len(made), (task["eval"], made)


def test_the_page_that_the_episode_left_open_is_judged_before_other_pages(judge, site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    other = target(f"{base}/other", TEXT, exact_match="blue lamp")
    here = target("last", TEXT, exact_match="red lamp")

    (made,) = judge(f"{base}/", (several(other, here), None))

    assert [check.passed for check in made] == [True, True]


def test_a_page_that_differs_by_its_fragment_alone_is_loaded_again(judge, site):
    base = site({"/": PAGE})
    here = target("last", LATE, UNFOLD, exact_match="unfolded")
    again = target(f"{base}/#t", LATE, exact_match="unfolded")

    (made,) = judge(f"{base}/", (several(here, again), None))

    assert [check.passed for check in made] == [True, False]


def test_a_missing_element_fails_every_check(judge, site):
    locators = [
        "document.querySelector('#no').innerText",
        "document.querySelector('#no')",
        "document.querySelector('[')",
    ]
    wanted = [
        {"must_include": ["x"]},
        {"must_exclude": ["x"]},
        {"exact_match": ""},
        {"exact_match": "None"},
    ]
    judgements = []
    for locator in locators:
        for contents in wanted:
            task = target("last", locator, **contents)
            judgements.append((task, "done"))

    judged = judge(site({"/": PAGE}) + "/", *judgements)

    for (check,) in judged:
        assert not check.passed
        assert "there is no" in check.detail


def test_the_page_says_why_there_is_no_such_text(judge, site):
    task = target("last", "document.querySelect('p').innerText", exact_match="x")
    check = only_check(judge, site({"/": PAGE}) + "/", task)
    assert not check.passed
    assert "querySelect is not a function" in check.detail


NO_JAVASCRIPT = "is not valid JavaScript (SyntaxError"
NO_TEXT = "finds an element, not its text; add .innerText"


@pytest.mark.parametrize("locator, says", [
    ("document.querySelector('p'.innerText", NO_JAVASCRIPT),
    ("document.(", NO_JAVASCRIPT),
    ("document.querySelector('p')", NO_TEXT),
    ("document.querySelectorAll('p')", NO_TEXT),
    ("[...document.querySelectorAll('p')].map(found => [found])", NO_TEXT),
    ("document.fonts.ready.then(() => document.body)", NO_TEXT),
])
def test_a_locator_that_finds_no_text_anywhere_is_the_tasks_fault(judge, site, locator, says):
    """An element was once judged as the text "ref: <Node>", which holds nothing that a task excludes."""
    task = target("last", locator, must_exclude=["x"])
    (voided,) = judge(site({"/": PAGE}) + "/", (task, "done"))
    assert isinstance(voided, EnvError)
    assert says in str(voided)


@pytest.mark.parametrize("locator", [
    "document.querySelector('textarea').value",
    "[...document.querySelectorAll('textarea')].map(field => field.value)",
])
def test_a_text_that_reads_like_an_element_is_judged(judge, site, locator):
    """Else an agent that fails could void its episode by typing it."""
    page = "<textarea>ref: &lt;Node&gt;</textarea>"
    check = only_check(judge, site({"/": page}) + "/", target("last", locator, must_include=["x"]))
    assert not check.passed


def test_a_page_that_says_what_playwright_says_is_judged(judge, site):
    base = site({"/": "<p>see ref: &lt;Node&gt; here</p>"})
    check = only_check(judge, f"{base}/", target("last", "document.querySelector('p').innerText", must_include=["see ref"]))
    assert check.passed


def test_text_that_a_locator_cannot_parse_is_the_agents(judge, site):
    """JSON.parse raises a SyntaxError, too, but the locator itself is in order."""
    task = target("last", "document.body && JSON.parse('{').n", exact_match="1")
    check = only_check(judge, site({"/": PAGE}) + "/", task)
    assert not check.passed
    assert "JSON" in check.detail


def test_a_value_that_playwright_cannot_read_is_a_missing_element(judge, site):
    no_date = "document.querySelector = () => ({innerText: new Date(8.64e15)})"
    base = site({"/": f"<p id=t>x</p><script>{no_date}</script>"})
    check = only_check(judge, f"{base}/", target("last", TEXT, must_include=["x"]), "done")
    assert not check.passed
    assert "there is no" in check.detail


def test_a_site_that_does_not_answer_is_no_verdict(judge, site):
    def broken(request):
        answer(request, status=503)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # where nobody listens
        base = site({"/": PAGE, "/503": broken})
        pages = [f"http://127.0.0.1:{port}/", f"{base}/503", f"{base}/no"]
        tasks = [target(url, "", must_include=["x y"]) for url in pages]
        refused, failing, absent = judge(f"{base}/", *unanswered(*tasks))

    assert isinstance(refused, PlaywrightError)
    assert isinstance(failing, EnvError)
    assert absent[0].passed is False  # a page that does not exist is an honest failure


def test_an_image_that_never_comes_leaves_the_verdict_as_it_is(judge, site):
    """It once made failures void, while successes counted: the rate was too high."""
    def hang(request):
        time.sleep(8)

    base = site({"/": '<p id=t>out of stock</p><img src="/hang">', "/hang": hang})
    wanted = ["in stock", "out of stock"]
    tasks = [target("last", TEXT, must_include=[text]) for text in wanted]
    tasks += [target(f"{base}/", TEXT, must_include=[text]) for text in wanted]
    judged = judge(f"{base}/", *unanswered(*tasks))
    assert [check.passed for (check,) in judged] == [False, True, False, True]


def test_what_a_page_does_when_it_has_loaded_is_part_of_it(judge, site):
    """Its image comes late, and only then its scripts fetch a number or go to another page."""
    def late(request):
        time.sleep(0.3)
        answer(request, b"")

    image = "<img src='/late'>"
    counts = "onload=\"fetch('/three').then(r => r.text()).then(n => document.getElementById('t').textContent = n)\""
    moves = "onload=\"location = '/final'\""
    base = site({"/": PAGE, "/late": late, "/three": "3", "/final": "<p id=t>final</p>",
                 "/counts": f"<body {counts}><p id=t>0</p>{image}", "/moves": f"<body {moves}><p id=t>0</p>{image}"})
    tasks = [target(f"{base}/counts", TEXT, exact_match="3"), target(f"{base}/counts", TEXT, exact_match="0"),
             target(f"{base}/moves", TEXT, exact_match="final")]
    judged = judge(f"{base}/", *unanswered(*tasks))
    assert [check.passed for (check,) in judged] == [True, False, True]


def with_script(code):
    return f"{PAGE}<script>{code}</script>"


BUILT_LATER = with_script("setTimeout(() => document.getElementById('t').textContent = 'built', 700)")


def test_the_judge_sees_the_episodes_own_world_and_waits_for_scripts(judge, site):
    def whoami(request):
        who = request.headers.get("Cookie", "nobody")
        answer(request, f"<p id=t>{who}</p>".encode(), **{"Set-Cookie": "user=ada"})

    slow = "fetch('/who').then(r => r.text()).then(t => document.body.innerHTML = '<p id=t>built</p>')"
    restless = "sessionStorage.n || setTimeout(() => { sessionStorage.n = 1; location.reload() }, 400)"
    base = site({
        "/": PAGE,
        "/who": whoami,
        "/slow": with_script(slow),
        "/late": BUILT_LATER,
        "/restless": with_script(restless),
    })

    # 1) A cookie stays within an episode, and pages opened by their address are read with their scripts.
    first_visit = target(f"{base}/who", TEXT, must_include=["nobody"])
    second_visit = target(f"{base}/who", TEXT, must_include=["user=ada"])
    slow_page = target(f"{base}/slow", TEXT, exact_match="built")
    visits = several(first_visit, second_visit)
    twice, opened = judge(f"{base}/", *unanswered(visits, slow_page))
    assert twice[0].passed
    assert twice[1].passed
    assert opened[0].passed

    # 2) The page where the episode ended.
    built = target("last", TEXT, exact_match="built")
    (ended_late,) = judge(f"{base}/late", (built, None))
    assert ended_late[0].passed
    (ended_restless,) = judge(f"{base}/restless", (built, None))
    assert ended_restless[0].passed is False  # a verdict, not an error


def test_a_page_opened_by_its_address_is_looked_at_again_while_it_still_changes(judge, site):
    """The benchmark waits three seconds. Scripts often show things later than their last request."""
    base = site({"/": PAGE, "/late": BUILT_LATER})
    wanted = target(f"{base}/late", TEXT, exact_match="built")
    unwanted = target(f"{base}/late", TEXT, must_exclude=["built"])

    there, absent = judge(f"{base}/", *unanswered(wanted, unwanted))

    assert there[0].passed
    assert not absent[0].passed


def test_a_page_that_is_looked_at_again_has_its_late_scripts(judge, site):
    """A script that the page adds and that takes longer than the second in which nothing changes."""
    def built(request):
        time.sleep(2.2)
        script = b"document.getElementById('t').textContent = 'built'"
        answer(request, script, **{"Content-Type": "text/javascript"})

    add = "const s = document.createElement('script'); s.src = '/built.js'; document.head.append(s);"
    app = with_script(f"setTimeout(() => {{ {add} }}, 50)")
    base = site({"/": PAGE, "/app": app, "/built.js": built})

    check = only_check(judge, f"{base}/", target(f"{base}/app", TEXT, exact_match="built"))

    assert check.passed, check.detail


def test_looking_again_does_not_press_a_button_again(judge, site):
    page = """<i id=late></i><button onclick="late.textContent += 'pressed'">more</button>
              <script>setTimeout(() => document.body.append(' in time'), 700)</script>"""
    locator = "document.body.innerText.replace('more', '')"
    task = target("last", locator, UNFOLD, exact_match="pressed in time")

    check = only_check(judge, site({"/": page}) + "/", task)

    assert check.passed, check.detail


def test_javascript_of_a_task_file_runs_as_in_the_benchmark(judge, site):
    """It evaluates `() => TEXT`: of `a; b` only b runs, {...} is a block, and a failed action ends the rest."""
    missing = "document.querySelector('#no').click()"
    block = "{ document.querySelector('#late').textContent = 'block' }"
    two = "document.querySelector('#late').textContent = 'a'; document.querySelector('#t').textContent = 'b'"
    promised = f"document.body && Promise.resolve({TEXT})"
    rejected = "document.body && Promise.reject(new Error('no'))"
    passing = [
        target("last", LATE, [block], exact_match="block"),
        target("last", f"{LATE} + {TEXT}", [two], exact_match="b"),
        target("last", LATE, [missing, *UNFOLD], exact_match=""),
        target("last", promised, exact_match="red lamp"),
    ]
    failing = target("last", rejected, exact_match="")

    judged = judge(site({"/": PAGE}) + "/", *unanswered(*passing, failing))

    passed = [check.passed for (check,) in judged]
    assert passed == [True, True, True, True, False], judged


def test_helpers_are_looked_up_by_name_and_never_run_as_python(judge, site, tmp_path):
    members = """<table><tr><td data-label=Account><span class=gl-avatar-labeled-sublabel>@ada</span></td>
                 <td class=col-max-role><span>Guest</span></td></tr>
                 <tr><td data-label=Account><span class=gl-avatar-labeled-sublabel>@bob</span></td>
                 <td class=col-max-role><span>Owner</span></td></tr></table>"""
    comment = "/f/books/7/a-title/comment"
    base = site({comment: members, "/f/books/7/": "<p id=t>the post</p>"})
    role = "func:gitlab_get_project_memeber_role(__page__, '{}')"
    evil = f"func:__import__('os').system('touch {tmp_path}/evil')"
    tasks = [
        target("func:reddit_get_post_url('__last_url__')", TEXT, exact_match="the post"),
        target("last", role.format("bob"), exact_match="owner"),
        target("last", role.format("eve"), exact_match="owner"),
        target("last", evil, exact_match="0"),
        target("func:shopping_get_it()", TEXT, exact_match="0"),
    ]

    post, bob, nobody, *refused = judge(f"{base}{comment}", *unanswered(*tasks))

    assert post[0].passed
    assert bob[0].passed
    assert not nobody[0].passed
    for error in refused:
        assert isinstance(error, ValueError)
    assert not (tmp_path / "evil").exists()


def test_the_shops_helpers_ask_its_own_interface(judge, site):
    def send(request, said, right):
        status = 200 if right else 401
        body = json.dumps(said).encode()
        answer(request, body, status, **{"Content-Type": "application/json"})

    def token(request):
        length = int(request.headers.get("Content-Length", 0))
        asked = json.loads(request.rfile.read(length))
        send(request, "key", right=asked["password"] == "admin1234")

    def keyed(said):
        """Says it to those who have the key."""
        def handler(request):
            send(request, said, right=request.headers.get("Authorization") == "Bearer key")
        return handler

    orders = {"items": [{"increment_id": "000000191"}]}
    ada = {"nickname": "Ada", "ratings": [{"percent": 20}]}
    bob = {"nickname": "Bob", "ratings": [{"percent": 80}]}
    base = site({
        "/": PAGE,
        "/rest/default/V1/integration/admin/token": token,
        "/rest/V1/orders": keyed(orders),
        "/sales/order/view/order_id/191/": "<p id=t>order 191</p>",
        "/rest/V1/products/B07/reviews": keyed([ada, bob]),
        "/rest/V1/products/B08/reviews": keyed([]),
        "/rest/V1/products/B10/reviews": keyed([{"ratings": []}]),
    })
    author = "func:shopping_get_sku_latest_review_author('{}')"
    rating = "func:shopping_get_sku_latest_review_rating('{}')"
    rows = [
        target("func:shopping_get_latest_order_url()", TEXT, exact_match="order 191"),
        target("last", author.format("B07"), exact_match="bob"),
        target("last", rating.format("B07"), must_include=["80"]),
        target("last", author.format("B08"), exact_match="bob"),
        target("last", author.format("B09"), exact_match="bob"),
        target("last", rating.format("B10"), exact_match="bob"),
    ]
    checked = [check_row(row)[0] for row in rows]
    tasks = site_urls(checked, {"SHOPPING": base})

    *judged, down, odd = judge(f"{base}/", *unanswered(*tasks))

    assert [made[0].passed for made in judged] == [True, True, True, False]
    assert isinstance(down, ConnectionError)
    assert isinstance(odd, ConnectionError)
    assert "latest_review_rating" in str(odd)


def test_a_task_file_may_ask_for_every_matcher_that_there_is():
    assert set(webarena.CHECKS) == set(evaluate.MATCHERS)


def test_the_reward_is_the_product_and_why_names_the_factor_that_was_0(run, site):
    base = site({"/": PAGE})
    task = target("last", TEXT, exact_match="red lamp")
    task["eval"] |= {
        "eval_types": ["string_match", "url_match", "program_html"],
        "reference_answers": {"must_include": ["3"]},
        "reference_url": base,
    }

    async def play():
        rewards = []
        why = []
        async with Browser(Settings()) as browser:
            session = await browser.open({"start_url": f"{base}/"})
            for said in ("it is 3", "it is 4", None):
                rewards.append(await score(task, said, session.page))
            await score(task, "it is 4", session.page, why)
            await session.close()
        return rewards, why

    rewards, why = run(play())

    assert rewards == [1.0, 0.0, 0.0]
    assert [check.passed for check in why] == [False, True, True]
    assert why[0].name == "must_include “3”"
    assert "it is 4" in why[0].detail


def test_a_task_that_checks_nothing_is_no_success(chat):
    task = {"task_id": 3, "eval": {"eval_types": ["string_match"], "reference_answers": {}}}
    with pytest.raises(ValueError, match="task 3 checks nothing"):
        asyncio.run(score(task, "x", SimpleNamespace(url="http://h/")))


# ------------------------------------------------------------------------------------------- the benchmark

SHELF = """<title>shelf</title><h1>lamps</h1><a href="/red">red lamp</a> <a href="/blue">blue lamp</a>"""


def read_run(path):
    """(summary, trajectories) of a run's directory."""
    summary = json.loads((path / "summary.json").read_text())
    lines = (path / "trajectories.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.fixture
def main(run, sandbox_sites, monkeypatch):
    """evaluate.main with the Chromium and the sandbox that the tests share."""
    def open_shared(*specs):
        return contextlib.nullcontext({"sandbox": sandbox_sites})

    def main(**values):
        return evaluate.main(Config(**values))

    monkeypatch.setattr(asyncio, "run", run)
    monkeypatch.setattr(evaluate.worlds, "open_sites", open_shared)
    return main


def test_a_context_longer_than_the_policy_knows_is_refused(main, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="--max-context 5000: the model knows 4096 positions; give at most that"):
        main(model=str(checkpoint), max_context=5000, tasks="sandbox:test:1", out=str(tmp_path / "run"))


def test_a_tokenizer_with_ids_that_the_policy_lacks_is_refused(main, checkpoint, tmp_path):
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    token = tokenizer["added_tokens"][0] | {"id": 5000, "content": "<far>"}
    tokenizer["added_tokens"].append(token)
    other = tmp_path / "policy"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="the tokenizer has ids up to [0-9]*, the model [0-9]* embeddings"):
        main(model=str(other), max_context=4000, tasks="sandbox:test:1", out=str(tmp_path / "run"))


def shelf_tasks(base, path):
    """Two tasks that end on a page, one of them wanting words that only a judge can compare."""
    start = {"start_url": f"{base}/"}
    there = make_task(eval_types=["url_match"], reference_url=f"{base}/red")
    spoken = fuzzy(["red"]) | {"task_id": 8, "intent": "say the first lamp's colour"}
    path.write_text(json.dumps([there | start, spoken | start]))
    return str(path)


def test_a_model_behind_a_url_plays_like_a_checkpoint_and_a_judge_judges_it(main, site, tmp_path, capsys, monkeypatch):
    failed = []

    def policy(request):
        assert request["model"] == "p"
        assert request["temperature"] == 0.5
        assert request["max_tokens"] == 99
        messages = request["messages"]
        roles = [message["role"] for message in messages]
        alternating = ["system"] + ["user", "assistant"] * 4
        assert roles == alternating[:len(roles)]

        first_page = messages[1]["content"]
        page = messages[-1]["content"]
        if "say the first" in first_page:
            return 'exit(message="It is red.\ud83d")'  # half a character
        if "Round 0" in page:
            assert page.startswith("Task: find the lamp")
            assert "<a>red lamp <0></a>" in page
            return '<think>there</think><answer>do(action="Click", element="0")</answer>'
        assert "** Simplified html **" in first_page  # it has been compressed away
        if len(failed) < 2:
            failed.append(request)
            return 503
        return "exit(message='')"

    base = site({"/": SHELF, "/red": "<p>a red lamp</p>"})
    url, _ = chat_server(site, policy)
    judge_url, judged = chat_server(site, "correct")
    monkeypatch.setattr(Endpoint, "pause", 0.01)

    main(
        policy_url=url,
        policy_model="p",
        judge_url=judge_url,
        judge_model="j",
        temperature=0.5,
        max_new_tokens=99,
        max_context=4000,
        tasks=shelf_tasks(base, tmp_path / "tasks.json"),
        out=str(tmp_path / "run"),
        runs=2,
        max_turns=[2, 1],
    )

    summary, records = read_run(tmp_path / "run")
    (long, two), (short, one) = summary["splits"].items()
    assert "within 2 turns" in long
    assert two["success_rate"] == 1
    assert two["n"] == 4
    assert two["runs"] == [1, 1]
    assert two["pass_at"] == {"1": 1, "2": 1}
    assert two["judge_free"]["n"] == 2
    assert "within 1 turns" in short
    assert one["success_rate"] == 1  # after the click, the page is right without an exit

    assert len(judged) <= 2  # of four equal answers, two came at the same time
    assert judged[0]["model"] == "j"

    assert len(records) == 8
    first_words = {record["turns"][0]["response"][:4] for record in records}
    assert first_words == {"<thi", "exit"}

    out = capsys.readouterr().out
    assert "without a judge" in out
    assert "pass@2 100.0%" in out


def test_a_policy_that_never_answers_ends_the_evaluation_with_one_sentence(main, site, tmp_path):
    url, _ = chat_server(site, 401)
    tasks = shelf_tasks(site({"/": SHELF}), tmp_path / "tasks.json")
    says = "none of the 1 episodes.*401.*; check the endpoint's address, its model's name and OPENAI_API_KEY"
    with pytest.raises(ValueError, match=says):
        main(policy_url=url, policy_model="p", tasks=tasks, out=str(tmp_path / "run"))


def test_what_the_fence_stopped_is_told_once(tmp_path, capsys):
    env = Environment({}, tmp_path, SiteSettings())
    env.report_blocked(set())
    env.report_blocked({"http://b:2", "http://a:1"})
    env.report_blocked({"http://b:2", "http://c:3"})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("add --allow http://a:1,http://b:2")
    assert second.endswith("add --allow http://c:3")


def test_where_servers_failed_their_output_is_named(tmp_path):
    why = ["environment", False, "the server ended"]
    broken = Trajectory({"task_id": 0}, status="env_error", checks=[why])
    judged = Trajectory({"task_id": 0})
    (tmp_path / "servers.log").write_text("== task 0\n")

    says = "none of the 2 .* the server ended; see what .* wrote in .*servers.log"
    with pytest.raises(ValueError, match=says):
        evaluate.require_verdicts([broken, broken], tmp_path)
    evaluate.require_verdicts([broken, judged], tmp_path)
    broken.checks = [["environment", False, "the task's locator 'x' finds an element, not its text; add .innerText"]]
    with pytest.raises(ValueError, match="add .innerText; correct the task's locator"):
        evaluate.require_verdicts([broken], tmp_path)
    broken.checks = [["environment", False, "the verifier v.py ended without a verdict"]]
    with pytest.raises(ValueError, match="correct the verifier"):
        evaluate.require_verdicts([broken], tmp_path)
    broken.checks = [["environment", False, "http://x/chat/completions: RemoteDisconnected('closed')"]]
    with pytest.raises(ValueError, match="see what the endpoint printed"):
        evaluate.require_verdicts([broken], tmp_path)


def test_a_checkpoint_is_evaluated_end_to_end(main, checkpoint, tmp_path, capsys):
    """A random policy: no success, but every file, and a second evaluation replaces the first."""
    out = tmp_path / "run"
    out.mkdir()
    config = out / "config.json"
    before = tmp_path / "before"
    earlier = json.dumps({"run": {"script": "evaluate.py", "model": "x"}})
    before.write_text(earlier)
    os.link(before, config)

    for _ in range(2):
        main(
            model=str(checkpoint),
            tasks="sandbox:test:2,sandbox:test-unseen:1",
            out=str(out),
            max_turns=[2],
            max_new_tokens=8,
            max_context=2000,
            concurrency=3,
        )

    summary, records = read_run(out)
    assert summary["n"] == 3
    assert summary["splits"]["sandbox:test:2"]["n"] == 2
    assert len(records) == 3
    assert "sandbox:test-unseen:1" in capsys.readouterr().out
    assert (out / "report.html").exists()
    assert json.loads(config.read_text())["run"]["max_turns"] == [2]
    # config.json was replaced, not written over: a reader never sees half of it.
    assert before.read_text() == earlier


def test_an_evaluation_leaves_the_config_of_somebody_else_alone(main, checkpoint, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"theirs": 1}')
    main(model=str(checkpoint), tasks="sandbox:test:1", out=str(tmp_path), max_turns=[1], max_new_tokens=8,
         max_context=2000, concurrency=1)
    assert config.read_text() == '{"theirs": 1}'
    assert (tmp_path / "summary.json").exists()


def test_an_evaluation_in_a_training_runs_directory_keeps_its_config(main, site, tmp_path):
    config = tmp_path / "config.json"
    of_training = '{"model_type": "qwen2", "run": {"script": "mgrpo.py"}}'
    config.write_text(of_training)
    url, _ = chat_server(site, "exit(message='')")
    tasks = shelf_tasks(site({"/": SHELF}), tmp_path / "tasks.json")

    main(policy_url=url, policy_model="p", tasks=tasks, out=str(tmp_path), max_turns=[1])

    assert config.read_text() == of_training
    summary, _ = read_run(tmp_path)
    assert summary["n"] == 1


def test_a_split_is_on_record_before_the_next_one_is_played(main, site, tmp_path):
    """A later split whose site is down once took the figures of the earlier ones with it."""
    url, _ = chat_server(site, "exit(message='')")
    good = shelf_tasks(site({"/": SHELF}), tmp_path / "good.json")
    bad = tmp_path / "bad.json"
    broken = {"serve": "false {port}", "start_url": "http://127.0.0.1:{port}/"}
    bad.write_text(json.dumps([make_task(eval_types=["url_match"], reference_url="http://127.0.0.1:{port}/red") | broken]))
    with pytest.raises(ValueError, match="none of the 1 episodes"):
        main(policy_url=url, policy_model="p", tasks=f"{good},{bad}", out=str(tmp_path / "run"), max_turns=[1])
    summary, records = read_run(tmp_path / "run")
    assert list(summary["splits"]) == [good]
    assert len(records) == 1


def test_the_flags_of_an_evaluation_reach_its_episodes(chat, site, tmp_path, monkeypatch):
    given = []

    async def play(policy, chat, tasks, **more):
        given.append(more)
        return [Trajectory(task, member) for task in tasks for member in range(more["group_size"])]

    monkeypatch.setattr(evaluate, "rollout", play)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([GOOD | {"start_url": site({"/": SHELF})}]))
    cfg = Config(tasks=str(path), runs=3, seed=5, temperature=0.5, max_turns=[2, 4])
    env = Environment({}, tmp_path, cfg)

    evaluate.evaluate_splits(None, chat, env, cfg, directory=runs.RunDirectory(tmp_path / "run", {}))

    assert [more["settings"].max_turns for more in given] == [2, 4]
    for more in given:
        assert (more["group_size"], more["seed"], more["temperature"]) == (3, 5, 0.5)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["n"] == 3  # of the last limit, not of all


def test_a_killed_evaluation_plays_only_what_is_missing(site, tmp_path):
    """SIGKILL at the fifth of six episodes. The same command then plays the fifth and the sixth."""
    process = None

    def policy(request):
        if len(seen) == 5:
            process.kill()
        return "exit(message='')"

    url, seen = chat_server(site, policy)
    start = {"start_url": site({"/": SHELF})}
    files = []
    for name in ("one.json", "two.json"):
        spec = {"eval_types": ["url_match"], "reference_url": start["start_url"]}
        tasks = [make_task(**spec) | start | {"task_id": number} for number in range(3)]
        file = tmp_path / name
        file.write_text(json.dumps(tasks))
        files.append(str(file))
    out = tmp_path / "run"
    command = [sys.executable, "evaluate.py", "--policy-url", url, "--policy-model", "p", "--concurrency", "1",
               "--tasks", ",".join(files), "--out", str(out)]

    def play() -> str:
        nonlocal process
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        shown, _ = process.communicate(timeout=600)
        return shown

    play()
    assert process.returncode == -9
    assert len(seen) == 5
    shown = play()
    assert process.returncode == 0
    assert "4 episodes of this evaluation have been judged already" in shown
    assert len(seen) == 7

    summary, records = read_run(out)
    assert [split["n"] for split in summary["splits"].values()] == [3, 3]
    assert summary["success_rate"] == 1
    assert "per_template" not in summary  # two sources may number their templates alike
    assert all("per_template" in split for split in summary["splits"].values())
    assert [record["task_id"] for record in records] == [0, 1, 2, 0, 1, 2]
    assert not (out / "unfinished").exists()


def unfinished(out, sites=None, loaded=(), **settings) -> evaluate.Unfinished:
    return evaluate.Unfinished(runs.RunDirectory(out, {}), Config(**settings), sites or {}, loaded)


def kept_episode(task) -> Trajectory:
    turn = Turn("http://x/", "a page", [1, 2], response_ids=[3, 4], logps=[-0.25, -1e-9], response="é",
                ended=False, action="exit(message='')", error="no")
    return Trajectory(task, member=1, turns=[turn], answer="", success=1.0, reward=1.0, fault="it crashed",
                      checks=[["url_match", True, "there"]])


def test_an_episode_comes_back_as_it_was_kept_by_whichever_rank(tmp_path, monkeypatch):
    asked = make_task() | {"intent_from": "told()", "intent": ""}
    told = {**asked, "intent": "press \u2028 it"}
    unfinished(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "rank", lambda: 1)
        episode = kept_episode({**told, "storage_state": {"cookies": ["a secret"]}})
        unfinished(tmp_path).add("split", episode)

    now = unfinished(tmp_path)
    assert now.find("split", asked, 1) == kept_episode(told)
    assert now.find("split", asked, 0) is None
    assert now.find("another split", asked, 1) is None
    file = next(tmp_path.glob("unfinished/*/0-1.jsonl"))
    assert "secret" not in file.read_text()


def test_an_episode_without_a_verdict_is_played_again_and_a_cut_line_harms_no_other(tmp_path):
    task = make_task()
    kept = unfinished(tmp_path)
    kept.add("split", replace(kept_episode(task), status="env_error"))
    assert unfinished(tmp_path).find("split", task, 1) is None

    kept.add("split", kept_episode(task))
    file = next(tmp_path.glob("unfinished/*/0-0.jsonl"))
    with open(file, "a") as lines:
        lines.write('{"batch": "spl')
    again = unfinished(tmp_path)
    again.add("other", kept_episode(task))
    back = unfinished(tmp_path)
    assert back.find("split", task, 1) == kept_episode(task)
    assert back.find("other", task, 1) == kept_episode(task)


@pytest.mark.parametrize("line", ["{}", "[1]", "not JSON", "not UTF-8: \xff"])
def test_a_damaged_episode_is_one_sentence_that_names_its_file_and_the_way_out(line, tmp_path):
    unfinished(tmp_path).add("split", kept_episode(make_task()))
    file = next(tmp_path.glob("unfinished/*/*.jsonl"))
    file.write_bytes(file.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"cannot use {file} .--no-resume does without it"):
        unfinished(tmp_path)
    unfinished(tmp_path, resume=False)


def test_with_other_settings_weights_tasks_or_sites_an_evaluation_begins_anew(tmp_path, capsys):
    weights = tmp_path / "model.safetensors"
    weights.write_text("one")
    tasks = tmp_path / "tasks.json"
    tasks.write_text("[]")
    judge = tmp_path / "check.py"
    judge.write_text("one")
    prompt = tmp_path / "agent.json"
    prompt.write_text("{}")
    task = make_task(eval_types=["verify"], verify=str(judge))
    out = tmp_path / "run"
    sites = {"SHOPPING": "http://one"}
    loaded = [task, fuzzy("a lamp")]
    settings = {"model": str(tmp_path), "tasks": f"sandbox:test,{tasks}", "sites": sites, "loaded": loaded}

    def comes_back(**others) -> bool:
        """Whether the episode is found under other settings, or after something has changed."""
        return unfinished(out, **settings | others).find("split", task, 1) is not None

    unfinished(out, **settings).add("split", kept_episode(task))
    assert comes_back(concurrency=3, timeout=9.0, model=f"{tmp_path}/", sites={"SHOPPING": "http://one", "sandbox": {}})
    assert not comes_back(temperature=0.5)
    assert "an evaluation that was interrupted here had other settings" in capsys.readouterr().out
    assert not comes_back(sites={"SHOPPING": "http://two"})
    for file in (weights, prompt, tasks, judge):
        before = file.read_text()
        file.write_text("two")
        assert not comes_back()
        file.write_text(before)

    assert comes_back()  # none of these has deleted it
    assert not comes_back(resume=False)
    assert not comes_back()


def interrupt(play, monkeypatch):
    """An evaluation that ends before its results are written."""
    def full(*_):
        raise ValueError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "report", full)
        with pytest.raises(ValueError, match="the disk is full"):
            play()


def test_episodes_are_kept_until_the_report_is_written_and_all_have_a_verdict(main, site, tmp_path, capsys, monkeypatch):
    url, seen = chat_server(site, "exit(message='')")
    start = {"start_url": site({"/": SHELF})}
    spec = {"eval_types": ["url_match"], "reference_url": start["start_url"]}
    good = make_task(**spec) | start
    broken = make_task(eval_types=["url_match"], reference_url="http://127.0.0.1:{port}/")
    broken |= {"task_id": 8, "serve": "false {port}", "start_url": "http://127.0.0.1:{port}/"}
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([good, broken]))
    out = tmp_path / "run"

    def play():
        main(policy_url=url, policy_model="p", tasks=str(tasks), out=str(out), max_turns=[1])
        return capsys.readouterr().out

    interrupt(play, monkeypatch)
    shown = play()
    assert len(seen) == 1
    assert "episodes without a verdict: 1; repeat the command to play only these" in shown
    summary, records = read_run(out)
    assert (summary["n"], summary["env_errors"]) == (1, 1)
    assert [record["status"] for record in records] == ["ok", "env_error"]


def test_an_interrupted_evaluation_is_judged_by_the_program_as_it_is_now(main, site, tmp_path, monkeypatch):
    """Verdicts of the earlier program were once kept."""
    url, seen = chat_server(site, "exit(message='')")
    judge = tmp_path / "check.py"
    judge.write_text("def verify(server_url):\n    return True, ''\n")
    task = make_task(eval_types=["verify"], verify="check.py") | {"start_url": site({"/": SHELF})}
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([task]))
    out = tmp_path / "run"
    play = partial(main, policy_url=url, policy_model="p", tasks=str(tasks), out=str(out), max_turns=[1])

    interrupt(play, monkeypatch)
    judge.write_text("def verify(server_url):\n    return False, ''\n")
    play()
    assert len(seen) == 2
    summary, _ = read_run(out)
    assert summary["success_rate"] == 0.0


def pointing_task(number, wanted, unwanted, shop):
    """A task that the small base can do: to open one of two categories."""
    task = make_task(eval_types=["url_match"], reference_url=f"{shop}/category/{wanted}")
    return task | {
        "task_id": number,
        "world": number,
        "start_url": shop,
        "intent": f"point at {wanted} else at {unwanted}",
    }


def test_two_ranks_split_the_tasks_and_give_one_ranks_figures(main, sandbox_sites, tmp_path, capfd):
    """Three tasks on two ranks, two runs each; only rank 0 claims the directory and writes."""
    # 1) Play, with two processes and in this one.
    shop = sandbox_sites["SHOPPING"]
    tasks = [
        pointing_task(0, "kitchen", "garden", shop),
        pointing_task(1, "kitchen", "office", shop),
        pointing_task(2, "garden", "kitchen", shop),
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    values = {
        "model": "worlds/base",
        "tasks": str(tmp_path / "tasks.json"),
        "temperature": 1.0,
        "runs": 2,
        "concurrency": 1,
        "max_new_tokens": 32,
        "max_context": 1536,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    both = start_ranks("evaluate.py", *flags, "--max-turns=1", f"--out={tmp_path / '2'}")
    main(**values, max_turns=[1], out=str(tmp_path / "1"))
    statuses = [process.wait(timeout=600) for process in both]
    assert statuses == [0, 0], capfd.readouterr().err

    # 2) Both wrote the same.
    def outcome(path):
        summary, records = read_run(path)
        summary.pop("run")
        rows = []
        for record in records:
            place = (record["task_id"], record["member"])
            responses = tuple(turn["response"] for turn in record["turns"])
            rows.append((place, record["success"], responses))
        return summary, rows

    summary, rows = outcome(tmp_path / "1")
    assert outcome(tmp_path / "2") == (summary, rows)
    places = [place for place, _, _ in rows]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    said = {responses for _, _, responses in rows}
    assert len(said) > 1  # the responses are not all the same


# -------------------------------------------------------------------------------------- figures and tables


@pytest.mark.parametrize("successes, n, low, high", [
    (0, 10, 0, .2775),
    (1, 10, .0179, .4042),
    (5, 10, .2366, .7634),
    (10, 10, .7225, 1),
    (56, 165, .2716, .4146),
    (0, 0, 0, 1),
])
def test_wilson_against_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-3)


def episodes(*wins):
    """One task per row of successes, one run per success. What training maximizes is something else."""
    made = []
    for number, row in enumerate(wins):
        task = GOOD | {"task_id": number}
        for member, success in enumerate(row):
            reward = -0.3 + 0.7 * success
            made.append(Trajectory(task, member=member, success=float(success), reward=reward))
    return made


def played(success, site="shopping", status="ok", answer="x", fault="", **changes):
    """An episode of one turn; the changes are the turn's."""
    turn = {
        "url": "http://h/",
        "observation": "page",
        "message_ids": [1],
        "response_ids": [5, 6],
        "logps": [-.1, -2.],
        "response": "ab",
        "action": "exit()",
    }
    return Trajectory(
        task=GOOD | {"sites": [site], "intent_template_id": site},
        turns=[Turn(**(turn | changes))],
        answer=answer,
        success=success,
        reward=-success,
        status=status,
        fault=fault,
    )


def test_runs_of_one_task_are_not_counted_as_independent():
    """Ten tasks that always or never succeed are ten observations, however often they are played."""
    always = [[1, 1, 1, 1]] * 5
    never = [[0, 0, 0, 0]] * 5
    settled = rate(episodes(*always, *never))
    assert settled["n"] == 40
    assert settled["ci95"] == pytest.approx(wilson(5, 10))

    halves = [[1, 0, 1, 0]] * 10
    mixed = rate(episodes(*halves))
    assert mixed["success_rate"] == 0.5
    assert mixed["ci95"] == pytest.approx(wilson(5, 10))

    noisy = rate(episodes([1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 1]))
    low, _ = noisy["ci95"]
    low_of_tasks, _ = wilson(2, 4)
    low_of_runs, _ = wilson(8, 16)
    assert low_of_tasks < low <= low_of_runs + 1e-9

    single = rate(episodes([1], [0], [0]))
    assert single["ci95"] == pytest.approx(wilson(1, 3))


def test_few_tasks_with_repeated_runs_have_the_effective_size_of_their_spread():
    """Means 3/4 and 1/4: their sample variance 1/8 is that of a rate of 1/2 in four independent episodes."""
    assert rate(episodes([1, 1, 1, 0], [1, 0, 0, 0]))["ci95"] == pytest.approx(wilson(2, 4))


def test_each_sentence_that_a_page_makes_up_is_a_task_of_its_own():
    """MiniWoB++: four runs of one page are four tasks, not four runs of one."""
    played = episodes([1, 1, 0, 0])
    for tau, sentence in zip(played, ("press a", "press b", "press c", "press d")):
        tau.task = tau.task | {"intent_from": "core.getUtterance()", "intent": sentence}
    assert rate(played)["ci95"] == pytest.approx(wilson(2, 4))
    assert pass_at(played) == {1: 0.5}


def test_pass_at_k_is_the_chance_that_one_of_k_runs_succeeds():
    wins = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    counted = {}
    for k in (1, 2, 3, 4):
        lucky = 0
        for row in wins:
            for drawn in combinations(row, k):
                lucky += any(drawn)
        counted[k] = lucky / 3 / math.comb(4, k)
    assert pass_at(episodes(*wins)) == pytest.approx(counted)

    two_broke = pass_at(episodes([1, 0, 0, 0], [1, 1]))  # two runs of the second task
    assert two_broke[2] == pytest.approx((0.5 + 1) / 2)


def test_intervals_cover_the_truth_as_often_as_their_docstring_says():
    """20 tasks, 8 runs each: half of them nearly always succeed, or two of them carry nearly all success."""
    def coverage(low, high, share, n=1500):
        rng = random.Random(0)
        truth = low * (1 - share) + high * share
        hits = 0
        for _ in range(n):
            chances = []
            for _ in range(20):
                is_easy = rng.random() < share
                chances.append(high if is_easy else low)
            wins = []
            for chance in chances:
                wins.append([rng.random() < chance for _ in range(8)])
            bottom, top = rate(episodes(*wins))["ci95"]
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
    assert pass_at(shaped) == {1: 0.25, 2: 0.5}
    assert rate(shaped)["success_rate"] == 0.25
    assert summarize(shaped) == summarize(episodes([1, 0], [0, 0]))


def test_without_a_valid_episode_there_is_no_success_rate_not_even_0():
    # 1) Both episodes broke.
    shop = played(0.0, status="env_error")
    forum = played(0.0, site="reddit", status="env_error")
    broken = summarize([shop, forum])
    for key in ("success_rate", "turns", "response_tokens", "trajectory_tokens", "exited"):
        assert broken[key] is None
    assert broken["n"] == 0
    assert broken["ci95"] == [0.0, 1.0]
    assert broken["env_errors"] == 2
    assert broken["episodes"] == 2
    assert broken["per_site"]["reddit"]["success_rate"] is None
    _, line = table([("sandbox:test", broken)]).splitlines()
    assert line.split() == ["sandbox:test", "-", "0.0%", "to", "100.0%", "0", "2"]

    # 2) The second run of every task broke.
    one_run_broke = episodes([1, 0], [1, 0])
    one_run_broke[1].status = "env_error"
    one_run_broke[3].status = "env_error"
    summary = summarize(one_run_broke)
    evaluate.print_splits({"test": summary})
    assert summary["runs"] == [1.0, None]


def test_the_figures_of_a_step_count_turns_tokens_and_what_went_wrong():
    cut = played(
        0.0,
        fault="Chromium crashed",
        ended=False,
        action="",
        error="cannot read it",
        page_cut=True,
    )
    second = replace(
        cut.turns[0],
        ended=True,
        action="do(...)",
        message_ids=[1, 2, 3],
        page_cut=False,
    )
    cut.turns.append(second)

    made = episode_metrics([cut, played(1.0), played(0.0, status="env_error")])

    made.pop("ci95")
    assert made == {
        "success_rate": 0.5,
        "n": 2,
        "episodes": 3,
        "env_errors": 1,
        "env_retries": 1,
        "turns": 1.5,
        "response_tokens": 2.0,
        "trajectory_tokens": (1 + 2 + 3 + 2 + 1 + 2) / 2,
        "exited": 1.0,
        "truncated": 1,
        "invalid_actions": 1,
        "failed_actions": 1,
        "pages_cut": 1,
    }


def test_tasks_of_two_sources_with_one_id_are_two_tasks():
    twice = episodes([1, 1], [0, 0])
    sources = [{}, {"source": 1}]
    for tau in twice:
        tau.task = GOOD | sources[tau.task["task_id"]]
    assert rate(twice)["ci95"] == pytest.approx(wilson(1, 2))
    assert pass_at(twice) == {1: 0.5, 2: 0.5}


def test_an_environment_error_is_not_a_failure_in_the_summary():
    summary = summarize([
        played(1.0),
        played(0.0, answer=None),
        played(1.0, site="reddit", ended=False, action="", error="no action"),
        played(0.0, site="reddit", status="env_error"),
    ])

    # 1) All episodes.
    assert summary["n"] == 3
    assert summary["env_errors"] == 1
    assert summary["episodes"] == 4
    assert summary["success_rate"] == pytest.approx(2 / 3)
    assert summary["exited"] == pytest.approx(2 / 3)
    assert summary["turns"] == 1
    assert summary["response_tokens"] == 2
    assert summary["truncated"] == 1
    assert summary["invalid_actions"] == 1

    # 2) Parts of them.
    reddit = summary["per_site"]["reddit"]
    assert reddit["success_rate"] == 1
    assert reddit["n"] == 1
    assert summary["per_template"]["shopping"]["n"] == 2
    assert summarize([])["n"] == 0

    # 3) As JSON, and as a table whose columns stand below each other.
    written = json.dumps(summary, allow_nan=False)
    assert json.loads(written) == summary
    _, *lines = table([("sandbox:test", summary), ("  reddit", reddit)]).splitlines()
    assert "66.7%" in lines[0]
    assert "100.0%" in lines[1]
    places = {line.index("%") for line in lines}
    assert len(places) == 1


def test_columns_stay_below_their_names_up_to_100_percent():
    perfect = {"success_rate": 1.0, "ci95": [0.9826, 1.0], "n": 1000, "turns": 10.0, "env_errors": 0}
    head, line = table([("sandbox:test", perfect)]).splitlines()
    assert line.index("100.0%") + len("100.0%") == head.index("success") + len("success")
    assert line.index("98.3% to 100.0%") + len("98.3% to 100.0%") == head.index("95% interval") + len("95% interval")
    assert len(line) == len(head)


def test_compare_puts_the_same_split_of_several_runs_next_to_each_other(tmp_path, monkeypatch):
    for name, success in (("bc", 0.25), ("r1", 0.5)):
        made = {"success_rate": success, "ci95": [0.1, 0.9], "n": 4}
        summary = {"splits": {"test": made, "unseen": made}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))

    shown = evaluate.compare([str(tmp_path / "bc"), str(tmp_path / "r1")])

    rows = [line.split()[:3] for line in shown.splitlines()]
    assert rows[1:5] == [
        ["test", "bc", "25.0%"],
        ["test", "r1", "50.0%"],
        ["unseen", "bc", "25.0%"],
        ["unseen", "r1", "50.0%"],
    ]
    monkeypatch.chdir(tmp_path / "r1")
    assert "test    r1  " in evaluate.compare(["."])  # the run has its name from wherever it is seen
    with pytest.raises(ValueError, match=f"^cannot use {tmp_path}/none/summary.json: FileNotFoundError"):
        evaluate.compare([str(tmp_path / "none")])
    (tmp_path / "bc/summary.json").write_text('{"splits": {}}')
    with pytest.raises(ValueError, match="bc/summary.json: it holds no evaluation"):
        evaluate.compare([str(tmp_path / "bc")])


# -------------------------------------------------------------------------------------- Environment


def test_a_replaced_score_is_used_wherever_an_environment_judges(monkeypatch, tmp_path):
    """bc.py once kept the original of a `score` that a fork had replaced."""
    async def generous(task, answer, page, why=None, judge=None):
        return 1.0

    env = Environment({}, tmp_path, SiteSettings())
    monkeypatch.setattr(evaluate, "score", generous)
    reward = asyncio.run(env.verdict(GOOD, None, None, []))
    assert reward == 1.0


def test_only_one_rank_asks_the_reset_server_and_the_others_wait(monkeypatch, tmp_path):
    done = []

    def all_max(value):
        done.append("together")

    monkeypatch.setattr(webarena, "reset", done.append)
    monkeypatch.setattr(runs, "all_max", all_max)
    env = Environment({}, tmp_path, SiteSettings(reset_url="http://h:1"))

    env.begin_batch([GOOD])
    monkeypatch.setattr(runs, "rank", lambda: 1)
    env.begin_batch([GOOD])

    assert done == ["http://h:1", "together", "together"]


def test_the_first_episodes_of_a_batch_get_pictures_and_equal_ids_get_different_names(tmp_path):
    env = Environment({}, tmp_path, SiteSettings(screenshots=3))
    env.begin_batch([GOOD, GOOD | {"source": 1}], group_size=2, name="0/4")
    assert env.pictured == {
        ("7", 0): "0/4-7-0",
        ("7", 1): "0/4-7-1",
        ("1:7", 0): "0/4-1:7-0",
    }
    env.begin_batch([GOOD | {"source": 2}], name="0/4")  # a fork plays a step's batch in parts: there were three
    assert len(env.pictured) == 3
    env.begin_batch([GOOD], group_size=2)  # without a name, as for held-out tasks, nobody would see them
    assert env.pictured == {}


@pytest.mark.parametrize("name", ["trajectories.jsonl", "summary.json", "report.html", "unfinished"])
def test_an_evaluation_does_not_touch_what_no_run_has_written(tmp_path, name):
    """It once replaced and deleted such files of a folder that was given by mistake."""
    mine = tmp_path / name
    mine.mkdir()
    (mine / "chapter.txt").touch()
    with pytest.raises(ValueError, match=f"{tmp_path} is not the directory of a run, and {name} in it would be lost"):
        evaluate.main(Config(out=str(tmp_path)))
    assert (mine / "chapter.txt").exists()


def test_a_source_that_is_named_twice_is_refused(tmp_path):
    """It was once played once, without a word."""
    cfg = Config(tasks="sandbox:test/5:1,sandbox:test/5:1")
    with pytest.raises(ValueError, match="--tasks names sandbox:test/5:1 twice; --runs 2"):
        evaluate.load_splits(cfg, Environment({}, tmp_path, SiteSettings()))


def test_the_sources_of_an_evaluation_are_numbered_apart(site, tmp_path):
    task = GOOD | {"start_url": site({"/": SHELF})}
    a = tmp_path / "a.json"
    b = tmp_path / "b.json"
    a.write_text(json.dumps([task | {"task_id": 0}]))
    b.write_text(json.dumps([task | {"task_id": 0}, task | {"task_id": 1}]))
    cfg = Config(tasks=f"{a},{b}")
    env = Environment({}, tmp_path, SiteSettings())

    splits = evaluate.load_splits(cfg, env)

    found = {}
    for name, tasks in splits.items():
        found[name] = [(task.get("source"), task["task_id"]) for task in tasks]
    assert found == {str(a): [(None, 0)], str(b): [(1, 0), (1, 1)]}

    judged = fuzzy(["red"]) | {"start_url": task["start_url"]}
    a.write_text(json.dumps([judged]))
    with pytest.raises(ValueError, match="--tasks .*a.json leaves no task to play"):
        evaluate.load_splits(cfg, env)


# --------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("arguments, max_context, max_turns", [
    (["--model", "worlds/base"], 1536, [10]),
    (["--model", "worlds/base", "--max-context", "900"], 900, [10]),
    (["--model", "worlds/base", "--max-turns", "5,10"], 1536, [5, 10]),
    (["--model", "a/b"], 16384, [15]),
    ([], 1536, [10]),
    (["--policy-url", "http://127.0.0.1:9/v1"], 16384, [15]),
    (["--policy-url", "http://127.0.0.1:9/v1", "--model", "worlds/base"], 1536, [10]),
    (["--validate", "tasks.json"], 16384, [15]),
    (["--report"], 16384, [15]),
    (["--compare", "a,b"], 16384, [15]),
])
def test_evaluation_plays_with_the_sizes_of_training(arguments, max_context, max_turns, monkeypatch, tmp_path):
    """Of --model, else of runs/mgrpo, but only if a checkpoint plays or its format is asked for."""
    sizes = {"max_context": 1536, "max_turns": 10, "max_new_tokens": 64}
    for name in ("worlds/base", "runs/mgrpo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"run": sizes}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])

    cfg = runs.parse_args(Config, "", {}, evaluate.checkpoint_of)

    assert cfg.max_context == max_context
    assert cfg.max_turns == max_turns


def test_the_flags_of_an_evaluation_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runs.parse_args(Config, evaluate.__doc__, {}, evaluate.checkpoint_of)

    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0: greedy (default: 0.0)" in shown
    assert "--max-turns N,N,..." in shown
    assert "(default: [15])" in shown
    assert "WebArena's reset server" in shown


def complaint(end, capsys):
    """The sentence that a command ended with: its status, or the last line that it printed."""
    if isinstance(end.value.code, str):
        return end.value.code
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("arguments, says", [
    (["--model", "no/such/checkpoint"], ["no/such/checkpoint"]),
    (["--validate", "nowhere.json"], ["nowhere.json"]),
    (["--report", "--out", "nowhere"], ["nowhere", "--out"]),
    (["--max-turns", "5;10"], ["--max-turns", "5;10"]),
])
def test_bad_input_gives_one_sentence_and_a_status(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runs.command_line(evaluate.main, Config, "", start=evaluate.checkpoint_of)

    assert end.value.code
    said = complaint(end, capsys)
    assert "\n" not in said
    for word in ["evaluate.py: ", *says]:
        assert word in said


def test_a_chromium_that_does_not_start_is_one_sentence_with_its_own_complaint(monkeypatch, capsys, tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho 'ERROR:dbus/bus.cc(406)] Failed to connect to the bus' >&2\n"
                      "echo 'libnss3.so: cannot open' >&2\nexit 127\n")
    broken.chmod(0o755)

    async def start():
        async with Browser(Settings()):
            pass

    def main(cfg):
        asyncio.run(start())

    monkeypatch.setattr("worlds.browser.find_chromium", lambda *_: str(broken))
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    with pytest.raises(SystemExit) as end:
        runs.command_line(main, Config, "")

    assert complaint(end, capsys) == "evaluate.py: Chromium failed: libnss3.so: cannot open"


def test_a_misspelled_source_is_named_before_a_model_is_opened(tmp_path):
    cfg = Config(model=str(tmp_path / "nowhere"), tasks="sandbox:tset", out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="tset"):
        evaluate.main(cfg)


def test_a_finished_evaluation_ends_without_a_status(site, tmp_path):
    """The script as it is called: figures are written again, and a task file is looked at."""
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([GOOD]))

    def check_run(*arguments, says):
        command = [sys.executable, "evaluate.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout, done.stderr

    (tmp_path / "metrics.jsonl").write_text("")
    check_run("--report", "--out", str(tmp_path), says="report.html")
    check_run("--validate", str(tasks), says="1 usable tasks, 0 broken rows")
