"""Judging: what earns the reward, what does not, what is refused. Real pages, served on loopback to a real browser."""
import asyncio
import json
import socket
import subprocess
import sys

import pytest
from playwright.async_api import Error as PlaywrightError

import evaluate
from compress import Trajectory, Turn
from conftest import ROOT
from evaluate import (check_row, checks, load_tasks, needs_judge, open_sites, read_tasks, report, score, site_urls,
                      start_run, string_match, summarize, table, url_match, wilson)
from rollout import Browser, EnvError, Settings


def make_task(**spec):
    return {
        "task_id": 7, "sites": ["shopping"], "intent": "find the lamp", "start_url": "about:blank",
        "intent_template_id": 1, "eval": spec
    }


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


@pytest.mark.parametrize(
    "reference, answer, passes",
    [({"must_include": ["red", "blue"]}, "red and blue", True), ({"must_include": ["red", "blue"]}, "red", False),
     ({"must_include": "170"}, "071", False),  # a bare string is one reference, not three letters
     ({"must_exclude": ["red"]}, "a red one", False), ({"must_exclude": ["red"]}, "bored", True),
     ({"must_exclude": ["red lamp"]}, "a red lamp", False), ({"one_of": ["red", "blue"]}, "dark blue", True),
     ({"one_of": ["red", "blue"]}, "green", False), ({"required_values": ["<= 700"]}, "699", True),
     ({"required_values": ["<= 700"]}, "1,000", False), ({"required_values": [">= 1000"]}, " 1,000 ", True),
     ({"required_values": ["> 700"]}, "700", False), ({"required_values": ["== 3 |OR| == 5"]}, "5", True),
     ({"required_values": ["== 3"]}, "three", False), ({"exact_match": "5", "must_include": ["5"]}, "5", True),
     ({"exact_match": "5", "must_include": ["6"]}, "5", False)])
def test_every_reference_of_every_kind_must_hold(reference, answer, passes):
    assert string_match(answer, reference) is passes


@pytest.mark.parametrize(
    "reference", [{"exact_match": "N/A"}, {"must_include": ["N/A"]}, {"must_exclude": ["red"]}, {"one_of": [""]}])
def test_no_answer_earns_nothing_not_even_where_nothing_is_asked(reference):
    """The released trainer grades an episode that never exits as "N/A": its 25 unachievable tasks pay for giving up."""
    assert string_match(None, reference) is False


def test_a_language_models_verdict_is_never_guessed():
    with pytest.raises(ValueError, match="language model"):
        string_match("anything", {"fuzzy_match": ["something"]})
    fuzzy_page = {"url": "last", "locator": "", "required_contents": {"fuzzy_match": ["x"]}}
    assert needs_judge(make_task(eval_types=["string_match"], reference_answers={"fuzzy_match": "N/A"}))
    assert needs_judge(make_task(eval_types=["program_html"], program_html=[fuzzy_page]))
    assert not needs_judge(
        make_task(eval_types=["url_match"], reference_url="x", reference_answers=None, program_html=[fuzzy_page]))


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


# -------------------------------------------------------------------------------------------------- pages


def judge(start_url, *judgements):
    """[(task, answer)] -> their checks, each judged on start_url in a context of its own, or the exception."""
    async def play():
        out = []
        async with Browser(Settings(timeout=10)) as browser:
            for task, answer in judgements:
                session = await browser.open({"start_url": start_url})
                try:
                    out.append(await checks(task, answer, session.page))
                except (PlaywrightError, EnvError, ValueError) as error:
                    out.append(error)
                await session.close()
        return out

    return asyncio.run(play())


def target(url, locator, prep_actions=(), **contents):
    return make_task(eval_types=["program_html"],
                     program_html=[{
                         "url": url, "locator": locator, "required_contents": contents,
                         "prep_actions": list(prep_actions)
                     }])


PAGE = """<title>cart</title><h1 id=t>Red Lamp</h1><p class=n>3</p><p class=n>5</p><input value="size m">
          <b>fish &amp; chips</b><button onclick="late.textContent = 'unfolded'">more</button><i id=late></i>"""
TEXT = "document.querySelector('#t').innerText"


def test_program_html_reads_pages_as_the_benchmark_does(site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    table = [(target("last", TEXT, exact_match="red lamp"), True), (target("last", TEXT, exact_match="red"), False),
             (target("last", TEXT, must_include=["red", "lamp"]), True),
             (target("last", TEXT, must_include=["re"]), False), (target("last", TEXT, must_exclude=["blue"]), True),
             (target("last", TEXT, must_include=["blue |OR| red"]), True),
             (target("last", "document.querySelector('input').value", exact_match="size m"), True),
             (target("last",
                     "[...document.querySelectorAll('.n')].map(e => e.innerText).join(', ')",
                     exact_match="3, 5"), True),
             (target("last", "document.querySelectorAll('.n').length", required_values=["== 2"]), True),
             (target("last", "", must_include=["red lamp"]), True),
             (target("last", "", must_include=["fish & chips"]), False),
             (target("last", "", must_include=["fish &amp; chips"]), True),
             (target(f"{base}/other", TEXT, exact_match="blue lamp"), True),
             (target(f"{base}/other", TEXT, exact_match="red lamp"), False),
             (target("last", "document.querySelector('#late').textContent", exact_match="unfolded"), False),
             (target("last",
                     "document.querySelector('#late').textContent", ["document.querySelector('button').click()"],
                     exact_match="unfolded"), True)]
    for (task, wanted), made in zip(table, judge(f"{base}/", *[(task, None) for task, _ in table])):
        assert [passed for _, passed, _ in made] == [wanted] * len(made), (task["eval"], made)


def test_what_the_episode_left_open_is_judged_before_other_pages(site):
    base = site({"/": PAGE, "/other": "<p id=t>Blue Lamp</p>"})
    both = [target(f"{base}/other", TEXT, exact_match="blue lamp"), target("last", TEXT, exact_match="red lamp")]
    task = make_task(eval_types=["program_html"], program_html=[t["eval"]["program_html"][0] for t in both])
    (made,) = judge(f"{base}/", (task, None))
    assert [passed for _, passed, _ in made] == [True, True]


def test_a_missing_element_fails_every_check(site):
    locators = ("document.querySelector('#no').innerText", "document.querySelector('#no')",
                "document.querySelector('['", "document.(")
    contents = ({"must_include": ["x"]}, {"must_exclude": ["x"]}, {"exact_match": ""}, {"exact_match": "None"})
    made = judge(
        site({"/": PAGE}) + "/", *[(target("last", locator, **c), "done") for locator in locators for c in contents])
    assert all(not passed and "there is no" in why for (_, passed, why), in made)


def test_a_site_that_does_not_answer_is_no_verdict(site):
    def broken(handler):
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}/"
        base = site({"/": PAGE, "/503": broken})
        refused, failing, absent = judge(
            f"{base}/", *[(target(url, "", must_include=["x y"]), None) for url in (dead, f"{base}/503", f"{base}/no")])
    assert isinstance(refused, PlaywrightError) and isinstance(failing, EnvError)
    assert absent[0][1] is False  # a page that does not exist is an honest failure


def test_the_judge_sees_the_episodes_own_world_and_waits_for_scripts(site):
    def whoami(handler):
        body = f"<p id=t>{handler.headers.get('Cookie', 'nobody')} {handler.headers.get('X-World', '')[:2]}</p>".encode(
        )
        handler.send_response(200)
        handler.send_header("Set-Cookie", "user=ada")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    slow = "<script>fetch('/who').then(r => r.text()).then(t => document.body.innerHTML = '<p id=t>built</p>')</script>"
    base = site({"/": PAGE, "/who": whoami, "/slow": slow})
    visits = [target(f"{base}/who", TEXT, must_include=[who])["eval"]["program_html"][0] for who in ("nobody", "user=ada")]
    twice, built = judge(f"{base}/", (make_task(eval_types=["program_html"], program_html=visits), None),
                         (target(f"{base}/slow", TEXT, exact_match="built"), None))
    assert twice[0][1] and twice[1][1] and built[0][1]


def test_helpers_are_looked_up_by_name_and_never_run_as_python(site, tmp_path):
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
        (target("func:shopping_get_latest_order_url()", TEXT, exact_match="0"), None))
    assert post[0][1] and bob[0][1] and not nobody[0][1]
    assert all(isinstance(error, ValueError) for error in refused) and not (tmp_path / "evil").exists()


def test_the_reward_is_the_product_and_why_tells_which_factor_was_0(site):
    base = site({"/": PAGE})
    task = make_task(eval_types=["string_match", "url_match", "program_html"],
                     reference_answers={"must_include": ["3"]},
                     reference_url=base,
                     program_html=[{"url": "last", "locator": TEXT, "required_contents": {"exact_match": "red lamp"}}])

    async def play():
        async with Browser(Settings()) as browser:
            session, why = await browser.open({"start_url": f"{base}/"}), []
            rewards = [await score(task, answer, session.page) for answer in ("it is 3", "it is 4", None)]
            await score(task, "it is 4", session.page, why)
            await session.close()
            return rewards, why

    rewards, why = asyncio.run(play())
    assert rewards == [1.0, 0.0, 0.0]
    assert [passed for _, passed, _ in why] == [False, True, True
                                                ] and why[0][0] == "must_include “3”" and "it is 4" in why[0][2]


# --------------------------------------------------------------------------------------------- task files

GOOD = make_task(eval_types=["string_match"], reference_answers={"must_include": ["x"]})


def changed(**changes):
    return [GOOD, {k: v for k, v in (GOOD | changes).items() if v is not ...}]


@pytest.mark.parametrize(
    "content, words",
    [("{not json", ["not JSON"]), ({"a": 1}, ["no list of tasks"]), ([], ["no list of tasks"]),
     ([GOOD, 3], ["row 1", "int", "object"]), (changed(intent=...), ["row 1 (task_id 7)", "intent is missing"]),
     (changed(intent=5), ["row 1", "intent is 5", "str"]), (changed(sites="shopping"), ["sites", "list"]),
     (changed(eval=[]), ["eval", "dict"]), (changed(start_url=""), ["start_url"]),
     (changed(eval={"eval_types": []}), ["eval.eval_types"]),
     (changed(eval={"eval_types": ["vibes"]}), ["eval.eval_types", "vibes"]),
     (changed(eval={"eval_types": ["string_match"], "reference_answers": None}),
      ["eval.reference_answers", "nothing to check"]),
     (changed(eval={"eval_types": ["string_match"], "reference_answers": {"must_include": []}}),
      ["must_include", "non-empty"]),
     (changed(eval={"eval_types": ["string_match"], "reference_answers": {"exact": "x"}}),
      ["eval.reference_answers.exact", "unknown"]),
     (changed(eval={"eval_types": ["string_match"], "reference_answers": {"required_values": ["7"]}}),
      ["required_values", "operator"]),
     (changed(eval={"eval_types": ["url_match"], "reference_url": ""}), ["eval.reference_url"]),
     (changed(eval={"eval_types": ["url_match"], "reference_url": "x", "url_note": "PRED in GOLD"}),
      ["eval.url_note", "GOLD in PRED"]),
     (changed(eval={"eval_types": ["program_html"], "program_html": []}), ["eval.program_html"]),
     (changed(
         eval={
             "eval_types": ["program_html"],
             "program_html": [{"url": "last", "locator": "alert(1)", "required_contents": {"exact_match": "x"}}]
         }), ["eval.program_html[0].locator", "alert(1)"])])
def test_a_malformed_task_file_gives_one_sentence_with_file_row_field_and_remedy(content, words, tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        load_tasks(str(path), {})
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in [str(path), *words]), error.value


def test_a_bare_string_is_wrapped_and_its_row_named(tmp_path):
    """WebArena-Lite's task 349: iterated letter by letter, its bare string made the task unpassable."""
    path = tmp_path / "tasks.json"
    path.write_text(
        json.dumps([
            GOOD,
            make_task(eval_types=["string_match"], reference_answers={"must_include": "abishek"})
            | {"old_task_id": 349}
        ]))
    tasks, remarks, faults = read_tasks(str(path))
    assert tasks[1]["eval"]["reference_answers"] == {"must_include": ["abishek"]} and not faults
    assert len(remarks) == 1 and "row 1" in remarks[0] and "old_task_id 349" in remarks[0]


def test_tasks_that_we_cannot_judge_are_left_out_and_counted(tmp_path, capsys):
    fuzzy = make_task(eval_types=["string_match"], reference_answers={"fuzzy_match": ["x"]})
    helped = target("func:shopping_get_latest_order_url()", "", must_include=["x"])
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([GOOD, fuzzy, helped, fuzzy]))
    assert load_tasks(str(path), {}, reach=False) == [GOOD]
    assert "left out 2 tasks that need a language model as judge and 1" in capsys.readouterr().out


def test_placeholders_become_addresses_everywhere_but_in_the_intent():
    task = make_task(eval_types=["url_match", "program_html"],
                     reference_url="__REDDIT__/f |OR| __SHOPPING_ADMIN__/x",
                     program_html=[{
                         "url": "__SHOPPING__/cart", "locator": "",
                         "required_contents": {"must_include": ["__SHOPPING__"]}
                     }])
    task |= {"start_url": "__SHOPPING__ |AND| __REDDIT__/f", "intent": "explain __SHOPPING__"}
    filled, = site_urls([task], {"SHOPPING": "http://s:1/", "SHOPPING_ADMIN": "http://s:2/admin", "REDDIT": "http://r"})
    assert filled["start_url"] == "http://s:1 |AND| http://r/f" and filled["intent"] == "explain __SHOPPING__"
    assert filled["eval"]["reference_url"] == "http://r/f |OR| http://s:2/admin/x"
    assert filled["eval"]["program_html"][0]["url"] == "http://s:1/cart" and task["start_url"].startswith("__")
    with pytest.raises(ValueError, match="export REDDIT="):
        site_urls([task], {"SHOPPING": "http://s:1", "SHOPPING_ADMIN": "http://s:2"})


def test_a_world_that_is_not_there_is_said_before_anything_runs(tmp_path, site):
    path = tmp_path / "tasks.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        path.write_text(json.dumps([GOOD | {"start_url": f"http://127.0.0.1:{free.getsockname()[1]}/x"}]))
        with pytest.raises(ValueError, match="cannot reach .*task 7 starts"):
            load_tasks(str(path), {})
    path.write_text(
        json.dumps([GOOD | {"start_url": site({"/": PAGE}) + "/x", "storage_state": "./.auth/shopping_state.json"}]))
    with pytest.raises(ValueError, match="shopping_state.json, which does not exist"):
        load_tasks(str(path), {})


def test_the_sandbox_is_a_task_source_like_any_other():
    with open_sites("sandbox:test:5,sandbox:train") as sites:
        tasks = load_tasks("sandbox:test:5,sandbox:test-unseen:3", sites)
    assert len(tasks) == 8 and all(task["start_url"].startswith("http://127.0.0.1") for task in tasks)
    assert not any(check_row(task)[2] for task in tasks)
    for spec in ("sandbox", "sandbox:test:x", "sandbox:nowhere"):
        with pytest.raises(ValueError):
            load_tasks(spec, sites, reach=False)


# -------------------------------------------------------------------------------------- figures and tables


@pytest.mark.parametrize("successes, n, low, high", [(0, 10, 0, .2775), (1, 10, .0179, .4042), (5, 10, .2366, .7634),
                                                     (10, 10, .7225, 1), (56, 165, .2716, .4146), (0, 0, 0, 1)])
def test_wilson_against_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-3)


def played(reward, site="shopping", status="ok", answer="x", **turn):
    made = Turn(
        **{
            "url": "http://h/", "observation": "page", "observation_ids": [1], "action_ids": [5, 6],
            "logps": [-.1, -2.], "response": "ab", "action": "exit()"
        } | turn)
    return Trajectory(GOOD | {"sites": [site], "intent_template_id": site},
                      turns=[made],
                      answer=answer,
                      reward=reward,
                      status=status)


def test_an_environment_error_is_not_a_failure_in_the_summary():
    s = summarize([
        played(1.0),
        played(0.0, answer=None),
        played(1.0, "reddit", ended=False, action="", error="no action"),
        played(0.0, "reddit", "env_error")
    ])
    assert (s["n"], s["env_errors"], s["episodes"]) == (3, 1, 4) and s["success_rate"] == pytest.approx(2 / 3)
    assert s["per_site"]["reddit"]["success_rate"] == 1 and s["per_site"]["reddit"]["n"] == 1 and s["per_template"][
        "shopping"]["n"] == 2
    assert (s["turns"], s["response_tokens"], s["truncated"],
            s["invalid_actions"]) == (1, 2, 1, 1) and s["exited"] == pytest.approx(2 / 3)
    assert summarize([])["n"] == 0 and json.dumps(s)
    lines = table([("sandbox:test", s), ("  reddit", s["per_site"]["reddit"])]).splitlines()
    assert "66.7%" in lines[1] and "100.0%" in lines[2] and len({line.index("%") for line in lines[1:]}) == 1


# ------------------------------------------------------------------------------------------------- the report

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">&lt;b&gt;"


def write_run(path, n=5):
    """A finished run's files, with text in every place that tries to break out."""
    run = start_run(evaluate.Config(out=str(path)), "cpu")
    for step in range(30):
        run.write({
            "step": step, "reward": step / 30, "trajectory_tokens": 900 + step, "turns": 5 - step / 30, "kl": 0.0,
            "entropy": .5, "logp_gap": 1e-6, "env_errors": 0, "seconds_rollout": 3.0, "seconds_train": 2.0
        })
    records = []
    for i in range(n):
        records.append({
            "step": i, "split": "test" if i % 2 else "train", "task_id": i, "sites": [
                "reddit" if i % 2 else "shopping"
            ], "template": 1, "intent": f"task number {i} {HOSTILE}", "member": 0, "reward": float(
                i % 2), "advantage": .5, "status": "env_error" if i == 0 else "ok", "answer": HOSTILE,
            "checks": [["exact_match " + HOSTILE, bool(i % 2), HOSTILE]], "turns": [{
                "url": "http://h/" + HOSTILE, "observation": HOSTILE, "response": "ab" + HOSTILE, "action": HOSTILE,
                "error": HOSTILE, "tokens": ["a", "b" + HOSTILE], "logps": [-.1, -2.], "context_tokens": 9,
                "truncated": False
            }]
        })
    run.write_trajectories(records)
    summary = {
        "success_rate": .5, "ci95": [.2, .8], "n": 4, "turns": 2.0, "env_errors": 1,
        "per_site": {HOSTILE: {"success_rate": .5, "ci95": [.2, .8], "n": 4}}
    }
    (path / "summary.json").write_text(json.dumps({"splits": {HOSTILE: summary}}))


def look_at(path, script, *arguments):
    """Opens a report; returns (result of script, complaints of the browser, addresses it asked for)."""
    async def play():
        complaints, asked = [], []
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page()
            page.on("console", lambda m: complaints.append(m.text))
            page.on("pageerror", lambda e: complaints.append(str(e)))
            page.on("request", lambda r: asked.append(r.url))
            await page.goto(path.absolute().as_uri())
            return await page.evaluate(script, *arguments), complaints, asked

    return asyncio.run(play())


def test_the_report_opens_without_a_network_and_hostile_text_in_it_is_inert(tmp_path):
    write_run(tmp_path)
    seen, complaints, asked = look_at(
        report(tmp_path), """() => ({title: document.title, images: document.images.length,
        charts: document.querySelectorAll('.chart').length, said: document.querySelector('.said').textContent,
        page: document.querySelector('.page').textContent, scripts: document.scripts.length,
        cells: document.querySelectorAll('td').length})"""
    )
    assert complaints == [] and len(asked) == 1
    assert seen["title"] == tmp_path.name and seen["images"] == 0 and seen["scripts"] == 2
    assert seen["charts"] == 8 and seen["cells"] == 14 and seen["page"] == HOSTILE and seen["said"] == "ab" + HOSTILE


def test_the_report_filters_and_opens_episodes(tmp_path):
    write_run(tmp_path)
    seen, complaints, _ = look_at(
        report(tmp_path), """() => {
        const set = (id, value) => { const e = document.getElementById(id);
                                     e.value = value; e.dispatchEvent(new Event('input')); };
        const listed = () => document.querySelectorAll('#list button').length, out = [listed()];
        set('split', 'test'); out.push(listed()); set('split', '');
        set('site', 'shopping'); out.push(listed()); set('site', '');
        set('outcome', 'success'); out.push(listed());
        set('outcome', 'environment error'); out.push(listed()); set('outcome', '');
        set('text', 'NUMBER 3'); out.push(listed());
        document.querySelector('#list button').click();
        return [out, document.querySelector('.intent').textContent.slice(0, 13),
                document.querySelectorAll('.checks li.ok').length];
    }""")
    assert seen == [[5, 2, 3, 2, 1, 1], "task number 3", 1] and complaints == []


def test_the_report_takes_the_newest_episodes_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    write_run(tmp_path, n=2100)
    with open(tmp_path / "trajectories.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "spl')  # a run that is being written
    (count, first), _, _ = look_at(
        report(tmp_path),
        "() => [document.getElementById('count').textContent, document.querySelector('.intent').textContent]")
    assert "1999 episodes" in count and "102 older ones" in count and first.startswith("task number 2099")


def test_a_report_needs_nothing_but_a_directory(tmp_path):
    _, complaints, _ = look_at(report(tmp_path), "() => 0")
    assert complaints == []
    with pytest.raises(ValueError, match="no run at"):
        report(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------- the script


def run_script(*arguments, timeout=120):
    return subprocess.run([sys.executable, "evaluate.py", *map(str, arguments)],
                          cwd=ROOT,
                          capture_output=True,
                          text=True,
                          timeout=timeout,
                          check=False)


def test_validate_counts_what_a_file_holds_and_names_what_is_broken(tmp_path):
    fuzzy = make_task(eval_types=["string_match"], reference_answers={"fuzzy_match": ["x"]
                                                                      }) | {"sites": ["reddit", "gitlab"]}
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([GOOD, fuzzy, GOOD | {"intent": None}]))
    done = run_script("--validate", path)
    assert done.returncode == 1 and done.stderr == ""
    for text in ("2 usable tasks, 1 broken", "string_match 2", "shopping 1, reddit + gitlab 1",
                 "1 tasks need an LLM judge", "BROKEN  row 2 (task_id 7): intent"):
        assert text in done.stdout, done.stdout


@pytest.mark.parametrize("arguments, words", [(["--model", "no/such/checkpoint"], ["no/such/checkpoint"]),
                                              (["--validate", "nowhere.json"], ["nowhere.json"]),
                                              (["--report", "--out", "nowhere"], ["nowhere", "--out"])])
def test_bad_input_gives_one_sentence_and_a_status(arguments, words):
    done = run_script(*arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words)


def test_a_checkpoint_is_evaluated_end_to_end(checkpoint, tmp_path):
    """A random policy on the sandbox: no success, but every file, and a second evaluation replaces the first."""
    arguments = ("--model", checkpoint, "--tasks", "sandbox:test:3,sandbox:test-unseen:2", "--out", tmp_path / "run",
                 "--max-turns", 2, "--max-new-tokens", 8, "--max-context", 2000)
    for _ in range(2):
        done = run_script(*arguments)
        assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert summary["n"] == 5 and summary["splits"]["sandbox:test:3"]["n"] == 3 and len(records) == 5
    assert "sandbox:test-unseen:2" in done.stdout and (tmp_path / "run" / "report.html").exists()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run"]["max_turns"] == 2
