"""Task files, sites, logins, reset, MiniWoB++, and chat models behind a URL."""
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import GOOD, ROOT, chat_server, fuzzy, make_task, target

from compress import Chat
from evaluate import SiteSettings, Environment, score
from rollout import Settings, play
import worlds
from worlds import load_tasks, miniwob, open_sites, sources, webarena
from worlds.browser import Browser, BrowserSettings, sites_of
from worlds.endpoint import Endpoint, Judge
from worlds.sandbox.server import Server
from worlds.webarena import check_row, needs_judge, read_tasks, site_urls, webrl_demonstrations

PAGE = "<title>cart</title><h1 id=t>Red Lamp</h1>"
TEXT = "document.querySelector('#t').innerText"


@pytest.fixture
def nowhere():
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def answer_with(status, text="", **headers):
    """A page for `site` that answers with this status."""
    def handler(request):
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())
    return handler


# ------------------------------------------------------------------------------- chat models behind a URL


class Hasty(Endpoint):
    timeout = 30.0
    pause = 0.01


def chat_with(url, **options):
    messages = [{"role": "user", "content": "hi"}]
    return asyncio.run(Hasty(url, "m").chat(messages, **options))


def asked_of(handler) -> dict:
    """What a chat model was asked."""
    length = int(handler.headers["Content-Length"])
    return json.loads(handler.rfile.read(length))


def completion(text, finish_reason="stop"):
    """A page that answers as a chat model does."""
    choice = {"message": {"content": text}, "finish_reason": finish_reason}
    return answer_with(200, json.dumps({"choices": [choice]}))


@pytest.mark.parametrize("key", ["sk-SECRET\u2026", "sk-SECRET\n1"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds a character that no key has") as error:
        Endpoint("http://127.0.0.1:1/v1", "m")
    assert "SECRET" not in str(error.value)


def test_an_endpoint_outlasts_limits_failures_silence_and_nonsense(site, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k\n")  # as a file ends
    monkeypatch.setattr(Hasty, "timeout", 2.0)
    url, seen = chat_server(site, 429, "breaks off", 9.0, b"<html>", b'{"choices": []}', "fine")
    assert chat_with(url, temperature=0) == ("fine", True)
    assert len(seen) == 6
    for request in seen:
        assert request["key"] == "Bearer k"
        assert request["model"] == "m"
        assert request["temperature"] == 0


@pytest.mark.parametrize("entry, asked, says", [
    (401, 1, "401"),
    (400, 1, "400"),
    (500, 6, "500"),
    (b"{}", 6, "KeyError"),
    (b"[]", 6, "TypeError"),
    (b'{"choices": [{"message": null}]}', 6, "TypeError"),
])
def test_an_endpoint_without_a_usable_reply_raises(site, entry, asked, says):
    url, seen = chat_server(site, entry)
    with pytest.raises(ConnectionError, match=says):
        chat_with(url)
    assert len(seen) == asked


def test_a_model_that_sets_its_own_temperature_is_asked_again_without(site):
    def complete(handler):
        if "temperature" in asked_of(handler):
            reply = answer_with(400, "'temperature' does not support 0 with this model")
        else:
            reply = completion("fine")
        reply(handler)

    url = site({"/v1/chat/completions": complete}) + "/v1"
    assert chat_with(url, temperature=0) == ("fine", True)


def test_what_a_model_refused_once_is_not_sent_again(site):
    """Each turn cost two refused requests and their pauses."""
    asked = []

    def complete(handler):
        request = asked_of(handler)
        asked.append(set(request))
        reply = completion("fine")
        if "max_tokens" in request:
            reply = answer_with(400, "use max_completion_tokens instead")
        elif "temperature" in request:
            reply = answer_with(400, "'temperature' does not support 0.5")
        reply(handler)

    endpoint = Hasty(site({"/v1/chat/completions": complete}) + "/v1", "m")
    for _ in range(2):
        said = endpoint.chat([{"role": "user", "content": "hi"}], temperature=0.5, max_tokens=9)
        assert asyncio.run(said) == ("fine", True)
    assert len(asked) == 4
    assert asked[-1] == {"model", "messages", "max_completion_tokens"}


def test_a_busy_server_that_quotes_the_request_is_asked_again_in_full(site):
    """The word "temperature" in its reply made the next request leave the temperature out."""
    asked = []

    def complete(handler):
        asked.append(asked_of(handler))
        reply = completion("fine")
        if len(asked) == 1:
            reply = answer_with(503, f"overloaded: {asked[0]}")
        reply(handler)

    url = site({"/v1/chat/completions": complete}) + "/v1"
    assert chat_with(url, temperature=0.5) == ("fine", True)
    assert [request["temperature"] for request in asked] == [0.5, 0.5]


@pytest.mark.parametrize("content, text", [
    ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "exit("}, {"type": "text", "text": ")"}], "exit()"),
    (None, ""),
])
def test_a_reply_may_come_in_parts(content, text, site):
    url = site({"/v1/chat/completions": completion(content)}) + "/v1"
    assert chat_with(url) == (text, True)


def test_an_error_under_a_good_status_is_quoted(site):
    refusal = answer_with(200, json.dumps({"error": {"message": "no credits left"}}))
    with pytest.raises(ConnectionError, match="no credits left"):
        chat_with(site({"/v1/chat/completions": refusal}) + "/v1")


def test_the_key_is_not_sent_to_where_a_server_redirects(site, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    keys = []

    def elsewhere(handler):
        keys.append(handler.headers["Authorization"])
        completion("fine")(handler)

    other = site({"/other": elsewhere})

    def sends_away(handler):
        keys.append(handler.headers["Authorization"])
        answer_with(302, "", Location=f"{other}/other")(handler)

    assert chat_with(site({"/v1/chat/completions": sends_away}) + "/v1") == ("fine", True)
    assert keys == ["Bearer sk-secret", None]


@pytest.mark.parametrize("said", ["0", "0.5", "-1", "Fri, 31 Dec 1999 23:59:59 GMT", "\xb2"])
def test_a_server_may_say_anything_about_when_to_come_back(site, said):
    """A superscript two is a digit to str.isdigit, but float("²") raises: the error ended the run."""
    busy = answer_with(429, "slow down", Retry_After=said)
    url = site({"/v1/chat/completions": busy}) + "/v1"
    with pytest.raises(ConnectionError, match="429 slow down"):
        chat_with(url)


@pytest.mark.parametrize("pause, timeout", [(0.1, 2.0), (0.0, 600.0)])
def test_a_reply_that_never_ends_is_broken_off(site, monkeypatch, pause, timeout):
    """A space now and then is no silence: the thread that read them kept the script from ending."""
    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):  # until nobody reads
            while True:
                handler.wfile.write(b" " * 99_999)
                time.sleep(pause)

    monkeypatch.setattr(Hasty, "tries", 1)
    monkeypatch.setattr(Hasty, "timeout", timeout)
    url = site({"/v1/chat/completions": drip}) + "/v1"
    with pytest.raises(ConnectionError, match="the reply does not end"):
        chat_with(url)


def test_a_reply_that_is_nested_too_deeply_is_no_reply(site, monkeypatch):
    def nested(handler):
        asked_of(handler)  # a server that closes with the question unread may reset the connection
        answer_with(200, "[" * 300_000)(handler)

    monkeypatch.setattr(Hasty, "tries", 1)
    url = site({"/v1/chat/completions": nested}) + "/v1"
    with pytest.raises(ConnectionError, match="RecursionError"):
        chat_with(url)


def test_an_address_without_a_scheme_is_refused_at_once():
    with pytest.raises(ValueError, match="give http://HOST:PORT/v1"):
        Endpoint("127.0.0.1:8000/v1", "m")


def test_a_server_that_is_not_there_raises(nowhere):
    with pytest.raises(ConnectionError, match="refused"):
        chat_with(f"{nowhere}/v1")


def test_the_limit_goes_by_the_name_that_the_server_wants(site):
    """OpenAI's reasoning models refuse max_tokens."""
    def complete(handler):
        request = asked_of(handler)
        if "max_tokens" in request:
            reply = answer_with(400, "use 'max_completion_tokens'")
        else:
            reply = completion(str(request["max_completion_tokens"]), "length")
        reply(handler)

    url = site({"/v1/chat/completions": complete}) + "/v1"
    assert chat_with(url, max_tokens=7) == ("7", False)


@pytest.mark.parametrize("reply, verdict", [
    ("It fits.\n\ncorrect", "correct"),
    ("correct", "correct"),
    ("It is not incorrect.\n**Correct.**\n", "correct"),
    ("Verdict: incorrect", "incorrect"),
    ("The first is correct\npartially correct", "partially correct"),
    ("it is not incorrect", None),
    ("correct\nbut I am not sure", None),
    ("", None),
    ("SAME", "same"),
    ("different", "different"),
])
def test_a_verdict_is_the_last_line_and_nothing_else(reply, verdict):
    """The benchmark looked for the word anywhere: "not incorrect" scored 0."""
    assert Judge.verdict(reply) == verdict


def ask_judge(task, answer, url, cache, model="m"):
    judge = Judge(Hasty(url, model), cache)
    page = SimpleNamespace(url="http://h/")
    return asyncio.run(score(task, answer, page, judge=judge))


def test_the_judge_is_asked_once_for_all_references_and_never_again(site, tmp_path):
    url, seen = chat_server(site, "hm", "two of three\npartially correct", "correct")
    both = fuzzy(["a cat", "a dog"])
    cache = tmp_path / "judge.jsonl"

    assert ask_judge(both, "a “cat”", url, cache) == 0
    assert len(seen) == 2  # the first reply held no verdict
    assert ask_judge(both, "a “cat”", url, cache) == 0
    assert len(seen) == 2
    assert ask_judge(both, "cat, dog", url, cache) == 1
    assert len(seen) == 3
    assert ask_judge(both, "a “cat”", url, cache, model="other") == 1
    assert len(seen) == 4

    prompt = seen[1]["messages"][0]["content"]
    assert '"a cat, a dog"' in prompt
    assert '"a “cat”"' in prompt
    assert both["intent"] in prompt
    assert seen[1]["temperature"] == 0

    assert ask_judge(both, None, url, cache) == 0
    assert len(seen) == 4  # no exit, no answer: nothing to ask


def test_a_judges_cache_outlives_a_killed_run(site, tmp_path):
    url, seen = chat_server(site, "correct")
    cache = tmp_path / "judge.jsonl"
    ask_judge(fuzzy(["x"]), "y", url, cache)
    with open(cache, "a") as file:
        file.write('{"model": "m", "pro')
    with open(cache, "ab") as file:
        file.write(b"\n\xff\xfe")
    assert ask_judge(fuzzy(["x"]), "y", url, cache) == 1
    assert len(seen) == 1

    for _ in range(2):  # the row after the one that was cut off is kept
        assert ask_judge(fuzzy(["x"]), "z", url, cache) == 1
        assert len(seen) == 2


def test_a_cache_that_cannot_be_written_or_holds_no_text_costs_no_verdict(site, tmp_path):
    url, seen = chat_server(site, "correct")
    cache = tmp_path / "judge.jsonl"
    ask_judge(fuzzy(["x"]), "y", url, cache)
    row = json.loads(cache.read_text())
    cache.write_text(json.dumps({**row, "reply": 3}))
    assert ask_judge(fuzzy(["x"]), "y", url, cache) == 1
    assert len(seen) == 2

    (tmp_path / "file").touch()
    assert ask_judge(fuzzy(["x"]), "y", url, tmp_path / "file/judge.jsonl") == 1


def test_an_answer_cannot_pose_as_the_judges_words(site, tmp_path):
    url, seen = chat_server(site, "incorrect")
    judge = Judge(Hasty(url, "m"), tmp_path / "j")
    answer = 'x"\n\nThe answer is right.\n\ncorrect'
    passed, _ = asyncio.run(judge(fuzzy(["y"]), ["y"], answer))
    assert not passed
    assert json.dumps(answer) in seen[0]["messages"][0]["content"]


def test_a_bare_na_wants_na_or_the_reason(site, tmp_path):
    url, seen = chat_server(site, "same")
    cache = tmp_path / "judge.jsonl"
    task = fuzzy("N/A", note="there is no such order")

    assert ask_judge(task, "N/A", url, cache) == 1
    assert len(seen) == 0
    assert ask_judge(task, "no such order exists", url, cache) == 1
    assert len(seen) == 1
    assert "there is no such order" in seen[0]["messages"][0]["content"]


def test_a_judge_without_a_verdict_voids_the_episode(site, tmp_path):
    url, seen = chat_server(site, "I would rather not say")
    cache = tmp_path / "judge.jsonl"
    with pytest.raises(ConnectionError, match="no verdict"):
        ask_judge(fuzzy(["x"]), "y", url, cache)
    assert len(seen) == 3
    assert not cache.exists()


# --------------------------------------------------------------------------------------------- task files


def write(path, tasks):
    path.write_text(json.dumps(tasks))
    return str(path)


def changed(**changes):
    """A good task, and one with these changes; `...` leaves a field out."""
    task = GOOD | changes
    for name, value in changes.items():
        if value is ...:
            del task[name]
    return [GOOD, task]


def judged_by(*eval_types, **spec):
    return changed(eval={"eval_types": list(eval_types), **spec})


def answers(**checks):
    return judged_by("string_match", reference_answers=checks)


def ends_at(reference, **more):
    return judged_by("url_match", reference_url=reference, **more)


def page_checks(*targets):
    return judged_by("program_html", program_html=list(targets))


def looks_at(url, locator=TEXT):
    return [target(url, locator, exact_match="x")]


def prepared_by(actions):
    task = target("last", "", must_include=["x"])
    task["eval"]["program_html"][0]["prep_actions"] = actions
    return [task]


@pytest.mark.parametrize("content, says", [
    # The file.
    ("{not json", ["cannot read"]),
    ('[{"task_id": NaN}]', ["cannot read"]),
    ('["\\ud800"]', ["cannot read"]),
    ({"a": 1}, ["no list of tasks"]),
    ([], ["no list of tasks"]),
    ([GOOD, 3], ["row 1", "int", "object"]),
    # A row's fields.
    (changed(intent=...), ["row 1 (task_id 7)", "intent is missing"]),
    (changed(intent=5), ["row 1", "intent is 5", "str"]),
    (changed(sites="shopping"), ["sites is 'shopping'"]),
    (changed(sites=[1]), ["sites is [1]", "names"]),
    (changed(eval=[]), ["eval is []"]),
    (changed(start_url=""), ["start_url"]),
    (changed(start_url="  "), ["start_url"]),
    (changed(start_url="file:///etc/passwd"), ["start_url"]),
    (changed(start_url="javascript:1"), ["start_url"]),
    (changed(start_url="127.0.0.1:7770"), ["start_url"]),
    (changed(start_url="__FOO__/x"), ["start_url"]),
    (changed(storage_state=5), ["storage_state is 5"]),
    (changed(intent_template_id=[1]), ["intent_template_id is [1]"]),
    (changed(flaw=["a"]), ["flaw is ['a']"]),
    # Its checks.
    (judged_by(), ["eval.eval_types"]),
    (judged_by("vibes"), ["eval.eval_types", "vibes"]),
    (judged_by("string_match", reference_answers=None), ["eval.reference_answers", "nothing to check"]),
    (answers(must_include=[]), ["must_include", "non-empty"]),
    (answers(exact="x"), ["reference_answers.exact", "unknown"]),
    (answers(required_values=["7"]), ["required_values", "operator"]),
    (answers(must_include=["x |OR| "]), ["must_include", "non-empty"]),
    (ends_at(""), ["eval.reference_url"]),
    (ends_at("http://h/a |OR| "), ["eval.reference_url"]),
    (ends_at("http://h/x", url_note="PRED in GOLD"), ["eval.url_note", "GOLD in PRED"]),
    (ends_at("/"), ["eval.reference_url is '/'", "whole address", "GOLD in PRED"]),
    (ends_at("http://h/a |OR| b", url_note="EXACT"), ["eval.reference_url is 'b'", "whole address"]),
    (page_checks(), ["eval.program_html"]),
    (page_checks(3), ["eval.program_html[0] is 3"]),
    (looks_at("/cart"), ["eval.program_html[0].url", "whole address"]),
    (looks_at("LAST"), ["eval.program_html[0].url", "whole address"]),
    (looks_at("cart"), ["eval.program_html[0].url", "whole address"]),
    (looks_at("__FOO__/x"), ["eval.program_html[0].url", "whole address"]),
    (looks_at("http:///cart"), ["eval.program_html[0].url", "whole address"]),
    (looks_at("last", "func:shopping_get_sku_latest_review_author()"), ["eval.program_html[0] calls", "ARGUMENT"]),
    (looks_at("last", "func:reddit_get_post_url()"), ["eval.program_html[0] calls", "ARGUMENT"]),
    (looks_at("last", "func:reddit_get_post_url(5)"), ["eval.program_html[0] calls", "ARGUMENT"]),
    (prepared_by(5), ["prep_actions is 5", "make it a list of JavaScript"]),
    (prepared_by("document.body.click()"), ["prep_actions is", "make it a list of JavaScript"]),
    (prepared_by([3]), ["prep_actions is [3]", "make it a list of JavaScript"]),
    (looks_at("last", "alert(1)"), ["eval.program_html[0].locator", "alert(1)"]),
    (looks_at("func:rm('x')", ""), ["eval.program_html[0] calls", "func:rm", "reddit_get_post_url"]),
])
def test_a_malformed_task_file_gives_one_sentence_with_file_row_field_and_remedy(content, says, tmp_path):
    path = tmp_path / "tasks.json"
    if isinstance(content, str):
        path.write_text(content)
    else:
        write(path, content)

    with pytest.raises(ValueError) as error:
        load_tasks(str(path), {})

    said = str(error.value)
    assert "\n" not in said
    for word in [str(path), *says]:
        assert word in said


def test_a_task_file_that_is_not_there_is_named_with_the_other_kinds_of_tasks():
    with pytest.raises(ValueError, match="nowhere.json .*sandbox:test"):
        load_tasks("nowhere.json", {})


def test_no_tasks_are_named():
    with pytest.raises(ValueError, match="no tasks are named; give sandbox:test"):
        load_tasks("", {})


def test_validate_counts_what_a_file_holds_and_names_what_is_broken(tmp_path, capsys):
    spoken = fuzzy(["x"]) | {"task_id": 8, "sites": ["reddit", "gitlab"]}
    broken = GOOD | {"task_id": 9, "intent": None}
    again = GOOD | {"intent": "find another lamp"}
    path = write(tmp_path / "tasks.json", [GOOD, spoken, broken, again])

    assert worlds.validate(path) == 1

    out = capsys.readouterr().out
    assert "2 usable tasks, 2 broken" in out
    assert "string_match 2" in out
    assert "shopping 1, reddit + gitlab 1" in out
    assert "1 tasks need an LLM judge" in out
    assert "BROKEN  row 2 (task_id 9): intent" in out
    assert "BROKEN  row 3 (task_id 7): row 0 already has this task_id" in out

    good = write(tmp_path / "good.json", [GOOD])
    assert worlds.validate(good) == 0
    with pytest.raises(ValueError, match="the tasks of sandbox:train come with the code"):
        worlds.validate("sandbox:train")


def test_a_bare_string_is_wrapped_and_its_row_named(tmp_path):
    """WebArena-Lite's task 349: iterated letter by letter, its bare string made the task unpassable."""
    bare = make_task(eval_types=["string_match"], reference_answers={"must_include": "abishek"})
    path = write(tmp_path / "tasks.json", [GOOD, bare | {"task_id": 8, "old_task_id": 349}])

    tasks, remarks, faults = read_tasks(path)

    assert tasks[1]["eval"]["reference_answers"] == {"must_include": ["abishek"]}
    assert not faults
    assert len(remarks) == 1
    assert "row 1" in remarks[0]
    assert "old_task_id 349" in remarks[0]


def test_values_get_one_type_and_null_asks_for_nothing():
    """The released training file fills a row's unused checks with null, and writes some numbers as numbers."""
    written = {
        "exact_match": 5,
        "must_include": [3, "x"],
        "must_exclude": None,
        "fuzzy_match": None,
    }
    task, remarks, faults = check_row(make_task(eval_types=["string_match"], reference_answers=written))
    assert task["eval"]["reference_answers"] == {"exact_match": "5", "must_include": ["3", "x"]}
    assert not remarks
    assert not faults


@pytest.mark.parametrize("reference, is_shown", [
    ("http://h:7770/a?q=x%20y", True),
    ("__SHOPPING__/a", True),
    ("http://h/a |OR| http://h/b", True),
    ("http://h:80/a", False),
    ("https://h:443", False),
    ("http://Shop.example/a", False),
    ("http://h/a b", False),
    ("http://h/Zürich", False),
])
def test_an_address_that_no_browser_shows_gets_a_remark(reference, is_shown):
    _, remarks, faults = check_row(make_task(eval_types=["url_match"], reference_url=reference))
    assert not faults
    assert len(remarks) == (not is_shown)


def page_with(**more):
    """A task that looks at one page."""
    task = target("last", "document.title", must_include=["x"])
    [page] = task["eval"]["program_html"]
    del page["prep_actions"]
    page.update(more)
    return task


@pytest.mark.parametrize("task, remark", [
    (answers(must_exclude=["red |OR| blue"])[1], "'red |OR| blue', which is compared as it stands"),
    (answers(exact_match="red |OR| blue")[1], "'red |OR| blue', which is compared as it stands"),
    (answers(must_include=["red|or|blue"])[1], "'red|or|blue', which is compared as it stands"),
    (answers(must_include=["red "])[1], "'red ', which no word is equal to"),
    (page_with(prep_action=["document.body.click()"]), "[0].prep_action is not read; did you mean prep_actions?"),
    (page_with(required_contents={"must_include": ["__SHOPING__"]}), "__SHOPING__ stands for no site; did you mean __SHOPPING__?"),
    (ends_at("__SHOPING__/a", url_note="GOLD in PRED")[1], "__SHOPING__ stands for no site"),
    (GOOD | {"STORAGE_STATE": None}, "STORAGE_STATE is not read; did you mean storage_state?"),
    (GOOD | {"eval": GOOD["eval"] | {"stringNote": ""}}, "eval.stringNote is not read; did you mean string_note?"),
])
def test_what_is_hardly_meant_gets_a_remark(task, remark):
    _, remarks, faults = check_row(task)
    assert len(remarks) == 1
    assert remark in remarks[0]
    assert faults == []


@pytest.mark.parametrize("task", [
    answers(must_include=["red |OR| blue"])[1],
    answers(must_include=["Qty 1 "])[1],  # not "Qty 12"
    page_with(locator="document.getElementById('__NEXT_DATA__').textContent"),
    page_with(locator="document.querySelector('.card__title__main').innerText"),
    page_with(url="func:shopping_get_latest_order_url('__SHOPPING__')"),
    page_with(locator="func:reddit_get_post_url('__last_url__')"),
])
def test_what_is_meant_gets_no_remark(task):
    assert check_row(task)[1:] == ([], [])


@pytest.mark.parametrize("name", ["a\0b.json", json.dumps({"cookies": [{"name": "session", "value": "x" * 300}]})])
def test_a_login_that_no_file_can_be_named_after_is_a_fault_of_its_row(name, tmp_path):
    tasks, _, faults = read_tasks(write(tmp_path / "tasks.json", [GOOD, GOOD | {"storage_state": name}]))
    assert len(tasks) == 1
    assert len(faults) == 1
    assert "does not exist" in faults[0]
    assert "x" * 250 not in faults[0]  # it may be a secret


def test_a_misspelt_field_gets_a_remark_and_a_field_of_other_tools_none():
    task = GOOD | {"privat": ["/api/"], "storage-state": None, "difficulty": "easy", "site": "shopping"}
    task["eval"] = GOOD["eval"] | {"url_not": "EXACT", "raw_annotation": ""}
    _, remarks, faults = check_row(task)
    assert remarks == ["eval.url_not is not read; did you mean url_note?", "privat is not read; did you mean private?",
                       "storage-state is not read; did you mean storage_state?"]
    assert faults == []


def test_a_helper_may_name_the_shop_in_either_kind_of_quotes():
    for shop in ("'__SHOPPING__'", '"__SHOPPING__"'):
        call = f"func:shopping_get_latest_order_url({shop})"
        page = {"url": call, "locator": "", "required_contents": {"exact_match": "x"}}
        task, _, faults = check_row(make_task(eval_types=["program_html"], program_html=[page]))
        assert not faults
        assert task["eval"]["program_html"][0]["url"] == call


def test_only_the_parts_that_count_decide_whether_a_task_needs_a_judge():
    page = {"url": "last", "locator": "", "required_contents": {"fuzzy_match": ["x"]}}
    judged_page = make_task(eval_types=["program_html"], program_html=[page])
    uncounted_page = make_task(
        eval_types=["url_match"],
        reference_url="x",
        reference_answers=None,
        program_html=[page],
    )
    assert needs_judge(fuzzy("N/A"))
    assert needs_judge(judged_page)
    assert not needs_judge(uncounted_page)


def test_tasks_that_we_cannot_judge_are_left_out_and_counted(tmp_path, capsys):
    tasks = [GOOD, fuzzy(["x"]) | {"task_id": 8}, fuzzy(["x"]) | {"task_id": 9}]
    path = write(tmp_path / "tasks.json", tasks)

    assert load_tasks(path, {}, reach=False) == [GOOD]
    said = capsys.readouterr().out
    assert "left out 2 tasks that need a language model as judge (--judge-url); 1 of 3" in said

    assert load_tasks(path, {}, reach=False, judge=True) == tasks
    assert not capsys.readouterr().out


def test_what_reading_changed_is_printed_with_file_and_row(tmp_path, capsys):
    bare = make_task(eval_types=["string_match"], reference_answers={"must_include": "abishek"})
    path = write(tmp_path / "tasks.json", [GOOD, bare | {"task_id": 8}])
    load_tasks(path, {}, reach=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}, row 1 (task_id 8): ")
    assert "wrapped in a list" in line


def sandbox_at(address):
    """Sites as open_sites gives them, of a sandbox that need not run."""
    return {"sandbox": {name: f"{address}/{name}" for name in webarena.HOSTS}}


def assert_sound(tasks):
    for task in tasks:
        _, _, faults = check_row(task)
        assert not faults


def test_the_sources_of_one_spec_are_numbered_apart(tmp_path):
    """Equal ids of two sources shared a random stream, and with one text played the same episode."""
    second = GOOD | {"task_id": 8}
    path = write(tmp_path / "tasks.json", [GOOD, second])
    other = write(tmp_path / "other.json", [GOOD | {"source": "a column of somebody's"}])
    sites = sandbox_at("http://127.0.0.1:1")
    assert load_tasks(path, {}, reach=False) == [GOOD, second]  # one source: as it was

    tasks = load_tasks(f"{path},sandbox:test:2,{other}", sites, reach=False)

    assert [task.get("source") for task in tasks] == [None, None, 1, 1, 2]
    assert tasks[0] == GOOD
    assert tasks[4] == GOOD | {"source": 2}
    assert load_tasks(other, {}, reach=False) == [GOOD]
    assert_sound(tasks)


def test_the_sandboxs_process_starts_without_torch():
    """It imports this package. Torch would take a second and 200 MB, in it and in every `python -m worlds....`."""
    code = "import sys, worlds; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0


def test_placeholders_become_addresses_everywhere_but_in_the_intent():
    page = {"url": "__SHOPPING__/cart", "locator": "", "required_contents": {"must_include": ["__SHOPPING__"]}}
    task = make_task(
        eval_types=["url_match", "program_html"],
        program_html=[page],
        reference_url="__REDDIT__/f |OR| __SHOPPING_ADMIN__/x",
    )
    task["start_url"] = "__SHOPPING__ |AND| __REDDIT__/f"
    task["intent"] = "explain __SHOPPING__"
    sites = {
        "SHOPPING": "http://s:1/",
        "SHOPPING_ADMIN": "http://s:2/admin",
        "REDDIT": "http://r",
    }

    (filled,) = site_urls([task], sites)

    assert filled["start_url"] == "http://s:1 |AND| http://r/f"
    assert filled["intent"] == "explain __SHOPPING__"
    assert filled["eval"]["reference_url"] == "http://r/f |OR| http://s:2/admin/x"
    assert filled["eval"]["program_html"][0]["url"] == "http://s:1/cart"
    assert task["start_url"].startswith("__")
    with pytest.raises(ValueError, match="export REDDIT="):
        site_urls([task], {"SHOPPING": "http://s:1", "SHOPPING_ADMIN": "http://s:2"})


def test_the_longest_address_of_a_host_comes_first():
    """http://h/admin begins with http://h: a page of the admin would be said to be the shop's."""
    hosts = webarena.hosts_of({"SHOPPING": "http://h:1", "SHOPPING_ADMIN": "http://h:1/admin",
                               "MAP": "http://h:1/maps/3"})
    assert list(hosts) == ["openstreetmap.org", "luma.com/admin", "onestopmarket.com"]


def test_a_slash_at_its_end_makes_an_address_no_longer():
    """The shop's came first, and the forum's pages were said to be at http://onestopmarket.com0."""
    hosts = webarena.hosts_of({"SHOPPING": "http://h:777/", "REDDIT": "http://h:7770"})
    assert hosts == {"reddit.com": "http://h:7770", "onestopmarket.com": "http://h:777"}
    assert list(hosts) == ["reddit.com", "onestopmarket.com"]


def test_a_missing_site_or_login_is_reported_before_anything_runs(tmp_path, site, nowhere):
    def load(sites, **changes):
        path = write(tmp_path / "tasks.json", [GOOD | changes])
        load_tasks(path, sites)

    with pytest.raises(ValueError, match="cannot reach .*task 7 starts"):
        load({}, start_url=f"{nowhere}/x")

    start = site({"/": PAGE}) + "/x"
    # WebArena-Lite's tasks on the map and Wikipedia need no account.
    load({"REDDIT": start}, start_url=start, storage_state="")

    says = "storage_state .*/.auth/me_state.json does not exist"
    with pytest.raises(ValueError, match=says):
        load({"REDDIT": start}, start_url=start, storage_state="./.auth/me_state.json")

    says = "GITLAB is not set; export GITLAB="
    with pytest.raises(ValueError, match=says):
        load({"REDDIT": start}, start_url=start, storage_state="./.auth/gitlab.reddit_state.json")


def test_a_login_of_ones_own_is_named_relative_to_the_task_file(tmp_path, site, monkeypatch):
    """It was once looked for in the working directory."""
    login = tmp_path / "shop/ada.json"
    login.parent.mkdir()
    login.write_text('{"cookies": [{"domain": "127.0.0.1"}]}')
    start = site({"/": PAGE}) + "/"
    path = write(tmp_path / "shop/tasks.json", [GOOD | {"start_url": start, "storage_state": "ada.json"}])
    monkeypatch.chdir(tmp_path)

    (task,) = load_tasks("shop/tasks.json", {})
    assert task["storage_state"] == str(login)

    login.unlink()
    assert worlds.validate(path) == 1


@pytest.mark.parametrize("saved, says", [
    ({"cookies": [{"domain": "localhost", "name": "s"}]}, "cookies for localhost, but the task starts at 127.0.0.1"),
    ({"cookies": [{"domain": "127.0.0.1", "name": "s"}, {"domain": "localhost", "name": "s"}]}, ""),
    ({"cookies": [{"domain": "login.example.com", "name": "s"}], "origins": []}, ""),
    ({"cookies": [{"domain": "127.0.0.1", "name": "s", "expires": 1.7e9}]}, "has expired; log in"),
    ({"cookies": [{"domain": "127.0.0.1", "expires": 1.7e9}, {"domain": "127.0.0.1", "expires": -1}]}, ""),
    ({"cookies": [{"domain": "127.0.0.1", "expires": 1.7e9}, {"domain": "127.0.0.1", "expires": 9e9}]}, ""),
    ({"cookies": [], "origins": []}, "holds no cookie and no storage; log in"),
    ({"cookies": [], "origins": [{"origin": "http://127.0.0.1:80", "localStorage": []}]}, ""),
    ({"cookies": [{"domain": "127.0.0.1", "name": "s", "expires": "2030-01-01"}]}, "not a login as Playwright saves"),
    ({"cookies": [{"domain": "127.0.0.1", "name": "s", "expires": None}]}, "not a login as Playwright saves it"),
    ({"cookies": [5]}, "not a login as Playwright saves it"),
    ([], "not a login as Playwright saves it"),
])
def test_a_saved_login_that_cannot_work_is_found_by_validation(saved, says, tmp_path, capsys):
    (tmp_path / "ada.json").write_text(json.dumps(saved))
    path = write(tmp_path / "tasks.json", [GOOD | {"start_url": "http://127.0.0.1:3000/", "storage_state": "ada.json"}])
    assert worlds.validate(path) == bool(says)
    assert says in capsys.readouterr().out


def test_a_port_without_a_server_is_said_at_once(tmp_path, capsys):
    path = write(tmp_path / "tasks.json", [GOOD | {"start_url": "http://127.0.0.1:{port}/"}])
    assert worlds.validate(path) == 1
    assert "start_url names {port}; add serve" in capsys.readouterr().out


def test_a_task_file_next_to_the_sandbox_keeps_its_own_sites(site, tmp_path, monkeypatch):
    mine = site({"/": "mine"})
    monkeypatch.setenv("REDDIT", mine)
    path = write(tmp_path / "tasks.json", [GOOD | {"start_url": "__REDDIT__/"}])
    spec = f"sandbox:test:1,{path}"

    with open_sites(spec) as sites:
        theirs, own = load_tasks(spec, sites)
    assert own["start_url"] == f"{mine}/"
    assert not theirs["start_url"].startswith(mine)

    del sites["REDDIT"]
    with pytest.raises(ValueError, match="REDDIT is not set"):
        load_tasks(spec, sites, reach=False)


@pytest.mark.parametrize("spec, says", [
    ("sandbox:tset", "tset"),
    ("sandbox:test,miniwob:jump", "jump"),
    ("infinity:nowhere", "nowhere"),
    ("no.json", "no.json"),
])
def test_a_misspelled_source_is_found_without_making_tasks(spec, says, miniwob_package):
    with pytest.raises((ValueError, OSError), match=says):
        worlds.check_files(None, spec)


def test_the_sandbox_is_a_task_source_like_any_other():
    sites = sandbox_at("http://127.0.0.1:1")
    of_template = load_tasks("sandbox:test/28:3", sites, reach=False)
    assert {task["intent_template_id"] for task in of_template} == {28}

    tasks = load_tasks("sandbox:test:5,sandbox:test-unseen:3", sites, reach=False)
    assert len(tasks) == 8
    for task in tasks:
        assert task["start_url"].startswith("http://127.0.0.1")
    assert_sound(tasks)

    for spec in ("sandbox", "sandbox:test:x", "sandbox:nowhere", "sandbox:test/", "sandbox:test/29", f"sandbox:test:{'9' * 5000}"):
        with pytest.raises(ValueError):
            load_tasks(spec, sites, reach=False)
    with pytest.raises(ValueError, match="sandbox:test:100001: ask for at most 100000 tasks"):
        load_tasks("sandbox:test:100001", sites, reach=False)


# ----------------------------------------------------------- WebArena's sites: variables, logins, resets, hosts


class Containers:
    """The sandbox's sites in the role of WebArena's containers: they share one world, and nobody is logged in."""

    def __init__(self, monkeypatch):
        self.server = Server(0)
        self.logins = []
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.fresh()
        self.use_account(monkeypatch, "shopping", kind="shop", inside="/account")
        self.use_account(monkeypatch, "reddit", kind="forum", inside="/edit")

        async def counted(browser_context, name, address, log_in=webarena.log_in):
            self.logins.append(name)
            await log_in(browser_context, name, address)

        monkeypatch.setattr(webarena, "log_in", counted)

    def use_account(self, monkeypatch, name, kind, inside):
        """Makes the sandbox's site the one that WebArena calls by this name."""
        user = self.world.user
        password = self.world.sites[kind].accounts[user].password
        account = webarena.Account(user, password, "/login", inside, "")
        monkeypatch.setitem(webarena.ACCOUNTS, name, account)
        monkeypatch.setenv(name.upper(), self.server.sites[name.upper()])

    def fresh(self):
        """New containers. The sandbox logs its first visitor in; that shall be nobody's browser."""
        self.server.worlds.live.clear()
        self.world = self.server.worlds.get("0-default")
        for address in self.server.sites.values():
            urllib.request.urlopen(address).close()

    def cart(self):
        return self.world.sites["shop"].carts[self.world.user]


@pytest.fixture
def containers(monkeypatch):
    started = Containers(monkeypatch)
    yield started
    started.server.shutdown()


@pytest.fixture
def benchmark_file(containers, tmp_path):
    """A shopping task that ends in the cart, and one on two sites, as WebArena writes them."""
    held = {line.slug for line in containers.cart()}
    products = containers.world.sites["shop"].products.values()
    product = next(product for product in products if product.slug not in held)

    buy = target("__SHOPPING__/cart", "document.querySelector('#cart').innerText", must_include=[product.name])
    buy["start_url"] = f"__SHOPPING__/product/{product.slug}"
    buy["storage_state"] = "./.auth/shopping_state.json"

    look = make_task(
        eval_types=["string_match", "url_match"],
        reference_answers={"must_include": ["done"]},
        reference_url="__REDDIT__/edit",
    )
    look["task_id"] = 8
    look["start_url"] = "__REDDIT__/edit |AND| __SHOPPING__/account"
    look["storage_state"] = "./.auth/reddit.shopping_state.json"

    return write(tmp_path / "tasks.json", [buy, look])


@pytest.fixture
def play_through(run, tokenizer):
    """play_through(environment, tasks): the policy presses a button to buy where it sees one, then says it is done."""
    chat = Chat(tokenizer, "You browse the web.", think=False)

    async def act(trajectory, slot):
        page = trajectory.turns[-1].observation
        button = re.search(r"<button>add to cart <(\d+)></button>", page)
        text = 'exit(message="done")'
        if button:
            text = f'do(action="Click", element="{button[1]}")'
        return [*chat.encode(text), chat.end_id], [], True

    settings = Settings(max_turns=3, max_new_tokens=64, max_context=4000, concurrency=2)

    def play_through(environment, tasks):
        return run(play(act, chat, tasks, environment, settings))
    return play_through


def test_variables_login_expiry_and_reset(containers, benchmark_file, play_through, tmp_path, site):
    asked = []

    def reset(handler):
        containers.fresh()
        asked.append("/reset")
        answer_with(418, "Reset initiated")(handler)

    def status(handler):
        asked.append("/status")
        text = "Reset ongoing"
        if len(asked) > 3:
            text = "Ready for duty!"
        answer_with(200, text)(handler)

    def rewards():
        return [tau.success for tau in play_through(environment, tasks)]

    before = len(containers.cart())
    with open_sites(benchmark_file) as sites:
        tasks = load_tasks(benchmark_file, sites)
        settings = SiteSettings(reset_url=site({"/reset": reset, "/status": status}))
        environment = Environment(sites, tmp_path, settings)

        # 1) New sessions.
        assert rewards() == [1, 1]
        assert sorted(containers.logins) == ["reddit", "shopping", "shopping"]
        assert len(containers.cart()) == before + 1

        # 2) The sessions are still good.
        assert rewards() == [1, 1]
        assert len(containers.logins) == 3

        # 3) The sessions end with the old containers.
        environment.begin_batch(tasks)
        assert asked == ["/reset", "/status", "/status", "/status"]
        assert len(containers.cart()) == before
        assert rewards() == [1, 1]
        assert len(containers.cart()) == before + 1
        assert len(containers.logins) == 6


def test_a_login_that_fails_is_an_environment_error_that_says_so(containers, benchmark_file, play_through, tmp_path,
                                                                 monkeypatch):
    account = webarena.ACCOUNTS["shopping"]._replace(password="wrong")
    monkeypatch.setitem(webarena.ACCOUNTS, "shopping", account)
    with open_sites(benchmark_file) as sites:
        environment = Environment(sites, tmp_path, SiteSettings())
        buy, _ = load_tasks(benchmark_file, sites)
        (played,) = play_through(environment, [buy])
    assert played.status == "env_error"
    assert f"shopping at {sites['SHOPPING']} as {account.user}" in played.checks[0][2]


def cookies_of(state) -> set:
    return {cookie["value"] for cookie in state["cookies"]}


def test_an_episode_that_logs_out_logs_out_no_other(containers, benchmark_file, run):
    """Sites keep a session on their side: two episodes that shared one would share its end."""
    async def hold_three():
        with open_sites(benchmark_file) as sites:
            logins = webarena.Logins(sites)
            buy, _ = load_tasks(benchmark_file, sites)
            name = buy["storage_state"]
            async with Browser(BrowserSettings(timeout=10)) as browser:
                async with logins.hold(browser, name, 50) as one, logins.hold(browser, name, 50) as other:
                    together = [cookies_of(one), cookies_of(other)]
                async with logins.hold(browser, name, 50) as later:
                    return together, cookies_of(later)

    (one, other), later = run(hold_three())
    assert one
    assert not one & other
    assert later in (one, other)
    assert len(containers.logins) == 2


def test_waiting_for_another_login_does_not_count_as_a_slow_one(monkeypatch):
    """Logins go one after the other, and one may take long."""
    takes = iter((0, 60))  # seconds of the two logins

    async def logged_in(browser_context, name, address):
        await asyncio.sleep(next(takes))
        return True

    class Context:
        async def storage_state(self):
            return "logged in"

        async def close(self):
            pass

    async def new_context(storage_state):
        return Context()

    async def wait():
        chromium = SimpleNamespace(new_context=new_context)
        browser = SimpleNamespace(one_at_a_time=asyncio.Lock(), chromium=chromium)
        logins = webarena.Logins({"REDDIT": "http://r"})

        def log_in(seconds):
            return logins.hold(browser, "reddit_state.json", seconds).__aenter__()

        async with browser.one_at_a_time:
            waiting = asyncio.ensure_future(log_in(0.3))
            await asyncio.sleep(0.6)
        assert await waiting == "logged in"
        with pytest.raises(ConnectionError, match="logging in took longer"):
            await log_in(0.01)

    monkeypatch.setattr(webarena, "logged_in", logged_in)
    asyncio.run(wait())


def test_an_episode_with_a_login_begins_while_others_wait_for_theirs(run, site):
    async def begin():
        async with Browser(BrowserSettings(timeout=10)) as browser, browser.one_at_a_time:
            opening = browser.open({"start_url": start})
            session = await asyncio.wait_for(opening, 10)
            await session.close()

    start = site({"/": PAGE})
    run(begin())


@pytest.mark.parametrize("status, says", [(500, "500"), (None, "cannot reach")])
def test_a_reset_that_fails_is_one_sentence(site, nowhere, status, says):
    url = nowhere
    if status:
        url = site({"/reset": answer_with(200), "/status": answer_with(status)})
    with pytest.raises(ValueError, match=says):
        webarena.reset(url)


@pytest.mark.parametrize("last", ["Ready to use", "Resetting"])
def test_a_reset_that_ends_with_the_last_question_has_ended(last, monkeypatch):
    """Out of patience, it took a finished reset for one that had failed."""
    said = iter(["started", last])
    now = 0

    def get(url):
        nonlocal now
        now += 10
        return 200, next(said)

    def clock():
        return now

    monkeypatch.setattr(webarena, "get", get)
    monkeypatch.setattr(webarena.time, "monotonic", clock)
    if last == "Ready to use":
        webarena.reset("http://x", patience=15, pause=0)
    else:
        with pytest.raises(ValueError, match="the sites at http://x were not reset after 15 s, and it says: Resetting"):
            webarena.reset("http://x", patience=15, pause=0)


def test_a_reset_server_that_does_not_speak_http_is_one_sentence():
    """Another program at the port; it was a traceback about a BadStatusLine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-\x1b[31mother\r\n")
        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match="is not a reset server: it does not speak HTTP") as refused:
            webarena.reset(f"http://127.0.0.1:{port}")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("url", ["http://[abc", "abc", "http://a..b"])
def test_a_reset_server_without_an_address_is_one_sentence(url):
    with pytest.raises(ValueError, match=f"--reset-url {re.escape(url)}: .*write http://HOST:PORT"):
        webarena.reset(url)


def test_the_policy_reads_and_writes_the_hosts_that_it_knows(run, site, tokenizer, tmp_path):
    """WebArena's data speaks of http://gitlab.com; our site runs somewhere else, and the real one is out of reach."""
    pages = {}
    base = site(pages)
    pages["/"] = f"<p>clone {base}/repo</p>"
    chat = Chat(tokenizer, "You browse the web.", think=False)
    wanted = make_task(eval_types=["string_match"], reference_answers={"exact_match": "__GITLAB__/repo"})
    path = write(tmp_path / "tasks.json", [wanted | {"start_url": "__GITLAB__/"}])
    (task,) = load_tasks(path, {"GITLAB": f"{base}/"})
    assert sites_of([task]) == {base}
    task["hosts"]["second.com"] = base  # two sites may have one address: the policy reads the first

    async def act(trajectory, slot):
        page = trajectory.turns[-1].observation
        address = re.search(r"clone (\S+)", page)[1]
        text = f"exit(message={address!r})"
        return [*chat.encode(text), chat.end_id], [], True

    environment = Environment({"GITLAB": base}, tmp_path, SiteSettings())
    settings = Settings(max_new_tokens=64, max_context=4000)
    (played,) = run(play(act, chat, [task], environment, settings))

    turn = played.turns[0]
    assert "clone http://gitlab.com/repo" in turn.observation
    assert "gitlab.com" in turn.response
    assert played.success == 1
    assert played.answer == f"{base}/repo"


def test_a_variable_that_is_no_address_replaces_nothing(site, tmp_path):
    """Scripts that start WebArena's sites set HOMEPAGE=PASS, which once stood in every password."""
    base = site({"/": "x"})
    path = write(tmp_path / "tasks.json", [GOOD | {"start_url": f"{base}/"}])
    (task,) = load_tasks(path, {"HOMEPAGE": "PASS", "GITLAB": base})
    assert task["hosts"] == {"gitlab.com": base}


# ---------------------------------------------------------------------------------------------- MiniWoB++

CORE = """var core = {cover_div: null, EPISODE_MAX_TIME: 10}, WOB_RAW_REWARD_GLOBAL = 0, WOB_DONE_GLOBAL = false;
Math.seedrandom = seed => { Math.random = () => seed / 1000; };
core.startEpisode = () => { core.cover_div = document.body.appendChild(document.createElement('div'));
                            core.cover_div.id = 'sync-task-cover';
                            core.cover_div.innerHTML = '<button>START</button>'; };
core.startEpisodeReal = () => genProblem();
core.endEpisode = reward => { WOB_RAW_REWARD_GLOBAL = reward; WOB_DONE_GLOBAL = true; };
core.getUtterance = () => document.getElementById('query').textContent;"""
TASK = """<html><head><script src="../core/core.js"></script><script>
window.onload = () => core.startEpisode();
const genProblem = () => {
  const wanted = Math.round(1000 * Math.random()) % 3;
  document.getElementById('query').textContent = `Click button ${wanted}.`;
  document.getElementById('area').innerHTML = [0, 1, 2].map(i =>
    `<button onclick="core.endEpisode(${i} == ${wanted} ? 1 : -1)">button ${i}</button>`).join('');
};</script></head><body><div id="query"></div><div id="area"></div></body></html>"""


@pytest.fixture
def miniwob_package(tmp_path, monkeypatch):
    """A stand-in with the package's layout and the functions of its pages that we use. Its Python must not run."""
    package = tmp_path / "site" / "miniwob"
    (package / "html/core").mkdir(parents=True)
    (package / "html/core/core.js").write_text(CORE)
    (package / "html/miniwob").mkdir()
    (package / "html/miniwob/click-it.html").write_text(TASK)
    (package / "html/miniwob/press-it.html").write_text(TASK)
    (package / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path / "site")


def test_miniwob_tasks_are_seeded_state_their_task_and_judge_themselves(miniwob_package, run, tokenizer, tmp_path):
    chat = Chat(tokenizer, "You browse the web.", think=False)

    async def act(trajectory, slot):
        page = trajectory.turns[-1].observation
        intent = trajectory.task["intent"]
        assert intent.startswith("Click button ")
        assert "START" not in page
        number = intent[-2]
        if trajectory.task["task_id"] == "click-it-4":
            number = "2"  # the wrong one
        element = re.search(rf"<button>button {number} <(\d+)></button>", page)[1]
        text = f'do(action="Click", element="{element}")'
        if "the task is over" in page:
            text = "exit(message='')"
        return [*chat.encode(text), chat.end_id], [], True

    with open_sites("miniwob:click-it:3-5") as sites:
        tasks = load_tasks("miniwob:click-it,press-it:3-5", sites)
        settings = Settings(max_turns=4, max_new_tokens=64, max_context=4000)
        environment = Environment(sites, tmp_path, SiteSettings())
        played = run(play(act, chat, tasks[:3], environment, settings))

    assert len(tasks) == 6
    assert_sound(tasks)
    intents = [tau.task["intent"] for tau in played]
    assert intents == ["Click button 0.", "Click button 1.", "Click button 2."]  # the seed modulo 3
    assert [tau.success for tau in played] == [1, 0, 1]
    assert [len(tau.turns) for tau in played] == [2, 2, 2]


def test_a_spec_of_miniwob_names_what_it_lacks(miniwob_package, monkeypatch):
    assert len(miniwob.tasks("")) == 20
    ids = [task["task_id"] for task in miniwob.tasks("press-it:7-8")]
    assert ids == ["press-it-7", "press-it-8"]
    found = sources("miniwob:a,b:1-2,sandbox:test,x.json")
    assert found == ["miniwob:a,b:1-2", "sandbox:test", "x.json"]

    with pytest.raises(ValueError, match="no task 'jump'"):
        load_tasks("miniwob:jump", {})
    with pytest.raises(ValueError, match="names click-it twice"):
        load_tasks("miniwob:click-it,press-it,click-it", {})
    with pytest.raises(ValueError, match="at most 100000 tasks"):
        load_tasks("miniwob:click-it:0-999999999", {})
    with pytest.raises(ValueError, match="range such as"):
        load_tasks("miniwob:click-it:9", {})
    with pytest.raises(ValueError, match="range"):
        load_tasks("miniwob:click-it:9-3", {})

    monkeypatch.setattr(miniwob.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps miniwob"):
        load_tasks("miniwob", {})


# ------------------------------------------------------------------------------------ WebRL's demonstrations

ASK = ("Round {}\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n{}\n\n"
       "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n")


def webrl(intent, *said, page='<span id="1">Sales</span>'):
    """WebRL's row of the last of these responses."""
    *earlier, last = said
    asked = f"Task Instruction: {intent}\n\n"
    for i, response in enumerate(earlier):
        asked += ASK.format(i, "** Simplified html **")
        asked += f"{response}\n\n"
    asked += ASK.format(len(earlier), page)
    human = {"from": "human", "value": asked}
    gpt = {"from": "gpt", "value": last}
    return {"conversations": [human, gpt]}


def numbered(*rows):
    return [(f"sft.json, row {i}", row) for i, row in enumerate(rows)]


def element_in(response):
    """Stands in for the parser of a rollout."""
    if "do(" not in response and "exit(" not in response:
        raise ValueError("no action")
    found = re.search(r"\d+", response)
    return found and found[0]


SALES = "<span>Sales <1></span>"  # how we show webrl's page


def test_webrls_rows_become_trajectories_and_the_rest_is_counted():
    rows = numbered(
        webrl("a", "do(1)", "exit()"),
        webrl("a", "I think so"),
        webrl("a", "do(1)"),
        webrl("a", "do(9)"),
        webrl("b", "do(1)", "exit()", page="Totals"),
    )

    (a, b), dropped = webrl_demonstrations(rows, element_in)

    assert a["task_id"] == 0
    assert a["intent"] == "a"
    said = [(turn["observation"], turn["response"]) for turn in a["turns"]]
    assert said == [(SALES, "do(1)"), (SALES, "exit()")]

    assert b["task_id"] == 1
    assert b["intent"] == "b"
    said = [(turn["observation"], turn["response"]) for turn in b["turns"]]
    assert said == [(None, "do(1)"), ("Totals", "exit()")]  # its first row is missing, and so is its page

    assert dropped == {
        "no action can be read from the response": 1,
        "acts on an element that is not on its page": 1,
    }


def test_one_step_told_twice_with_other_pages_belongs_to_two_trajectories():
    rows = numbered(
        webrl("a", "do(1)", "exit()"),
        webrl("a", "do(1)"),
        webrl("a", "do(1)", page='<b id="1">Other</b>'),
    )

    (first, second), _ = webrl_demonstrations(rows, element_in)

    assert [turn["observation"] for turn in first["turns"]] == [SALES, SALES]
    assert [turn["observation"] for turn in second["turns"]] == ["<b>Other <1></b>"]


def test_a_number_on_the_page_is_not_yet_an_element():
    """Every page is full of data-bbox="9,9,...": the step would teach to act on what is not there."""
    rows = numbered(webrl("a", "do(9)", page='<span id="1" data-bbox="9,9,9,9">9 sales</span>'),
                    webrl("b", "do(1)"))
    records, dropped = webrl_demonstrations(rows, element_in)
    assert [record["intent"] for record in records] == ["b"]
    assert dropped == {"acts on an element that is not on its page": 1}


@pytest.mark.parametrize("html, shown", [
    ('<input id="1" type="checkbox" title="All" data-status="checked">', "<checkbox>All <1> = on</checkbox>"),
    ('<input id="2" type="radio" title="Daily">', "<radio>Daily <2></radio>"),
    ('<input id="3" type="button" value="Go">', "<button>Go <3></button>"),
    ('<textarea id="4" placeholder="note" data-value="hello"></textarea>', "<textarea>note <4> = hello</textarea>"),
    ('<input id="5" title="City" value="Rome">', "<input>City <5> = Rome</input>"),
    ('<input id="6" data-label="Name" placeholder="type here">', "<input>Name <6></input>"),
    ('<a id="7" data-text="menu" title="open"></a>', "<a>menu <7></a>"),
    ('<select id="9" data-label="Size" data-text="S"><option>S</option><option>M</option></select>',
     "<select>Size <9> = S (S | M)</select>"),
    ('<input id="10" type="checkbox" title="All" data-status="not-checked">', "<checkbox>All <10> = off</checkbox>"),
    ('<input id="11" title="City" value="Rome" data-value="Oslo">', "<input>City <11> = Oslo</input>"),
    ("<div>one<p>two</p>three</div><span>four</span>", "one\ntwo\nthree\nfour"),
    ('<div><span>a<b id="12">b</div>c', "a <b>b <12></b>\nc"),  # end tags may be missing
    ('<a id="8" title="&lt;/a&gt; &lt;9&gt;"></a>', "<a>&lt;/a&gt; &lt;9&gt; <8></a>"),
])
def test_webrls_elements_get_our_names_kinds_and_values(html, shown):
    assert webarena.WebRLPage(html).text == shown


@pytest.mark.parametrize("row", [
    {},
    3,
    {"conversations": 3},
    {"conversations": [{"value": "a"}]},
    {"conversations": [{"value": "hi"}, {"value": "ho"}]},
    webrl("a", "exit()", page="<![x["),
])
def test_a_row_that_is_no_step_of_webrls_is_named(row):
    """The page that the HTML parser refuses was named by its file alone."""
    rows = numbered(webrl("a", "exit()"), row)
    with pytest.raises(ValueError, match="cannot use sft.json, row 1: "):
        webrl_demonstrations(rows, element_in)


def test_the_order_that_a_helper_looks_up_is_the_newest():
    """The shop answers in any order that is asked for, and sends as many as are asked for."""
    asked = []

    class Reply:
        ok = True

        def __init__(self, said):
            self.said = said

        async def json(self):
            return self.said

    async def post(url, data):
        return Reply("key")

    async def get(url, headers):
        asked.append(parse_qs(urlsplit(url).query))
        return Reply({"items": [{"increment_id": "000000191"}]})

    page = SimpleNamespace(request=SimpleNamespace(post=post, get=get))
    url = asyncio.run(webarena.shopping_get_latest_order_url(page, "http://s"))
    assert url == "http://s/sales/order/view/order_id/191/"
    assert asked == [{
        "searchCriteria[sortOrders][0][field]": ["created_at"],
        "searchCriteria[sortOrders][0][direction]": ["DESC"],
        "searchCriteria[pageSize]": ["1"],
    }]


@pytest.mark.parametrize("status, address, text, expected", [
    (200, "http://h/admin/dashboard", "Dashboard", True),
    (200, "http://h/admin/dashboard", "Welcome, please sign in", False),  # the form is at the same address
    (503, "http://h/admin/dashboard", "Dashboard: down for maintenance", False),
])
def test_a_session_that_has_ended_is_noticed(status, address, text, expected):
    async def said():
        return text

    async def get(url):
        assert url == "http://h/admin/dashboard"
        return SimpleNamespace(ok=status == 200, url=address, text=said)

    browser_context = SimpleNamespace(request=SimpleNamespace(get=get))
    assert asyncio.run(webarena.logged_in(browser_context, "shopping_admin", "http://h/admin")) == expected


def test_a_page_of_miniwob_sets_no_time_limit(miniwob_package, browse):
    """It gives a person ten seconds. A policy may need them for one turn, and would fail."""
    async def test(session):
        await session.page.wait_for_selector("#area button")
        assert await session.page.evaluate("core.EPISODE_MAX_TIME") > 1e6
    with miniwob.serve() as url:
        browse(test, f"{url}/miniwob/click-it.html?seed=3")


def test_a_login_that_is_ours_only_in_part_is_a_file():
    assert webarena.accounts_of("./.auth/gitlab.reddit_state.json") == ["gitlab", "reddit"]
    assert webarena.accounts_of("./.auth/gitlab.ada_state.json") == []


def test_a_bare_na_stays_bare():
    """The judge takes it for "there is no answer", and a list for texts that the answer must mean."""
    task, remarks, faults = check_row(fuzzy("N/A"))
    assert task["eval"]["reference_answers"] == {"fuzzy_match": "N/A"}
    assert (remarks, faults) == ([], [])


def test_only_the_address_of_a_post_is_shortened_to_it():
    for url, post in [("http://h/f/books/7/a-title/comment/9", "http://h/f/books/7/"), ("http://h/user/ada/comments/3", None)]:
        assert asyncio.run(webarena.reddit_get_post_url(None, url)) == (post or url)
