"""The long tier: experts solve it in at most twenty turns, and a check wants every part of its task.

Most episodes are played without Chromium, by `PaperBrowser`, which reads the sandbox's HTML and sends its forms.
"""
import json
import re
from collections import Counter
from html.parser import HTMLParser
from random import Random
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest

from compress import Chat, format_response
from conftest import ROOT
from evaluate import contents_checks, string_match, url_match
from model import load_tokenizer
from rollout import parse
from worlds import sandbox
from worlds.sandbox import long
from worlds.sandbox.experts import Lost, done
from worlds.sandbox.page import Request
from worlds.sandbox.server import World
from worlds.sandbox.vocabulary import with_id

TRAIN, DEV, TEST, UNSEEN = "long-train", "long-dev", "long-test", "long-test-unseen"
MOST_TURNS = 20
BASE = ROOT / "worlds/base"


# ---- a browser without scripts
class Node:
    def __init__(self, tag: str, attributes: dict, parent):
        self.tag, self.attributes, self.parent, self.children = tag, attributes, parent, []

    def all(self, *tags: str) -> list:
        """The elements inside, in the page's order; of these tags or of any."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                found += [child] * (not tags or child.tag in tags) + child.all(*tags)
        return found

    @property
    def text(self) -> str:
        parts = [child.text if isinstance(child, Node) else child for child in self.children]
        return " ".join(" ".join(parts).split())

    def one(self, name: str, value: str):
        """The first element inside with that attribute, or None."""
        return next((node for node in self.all() if value is not None and node.attributes.get(name) == value), None)

    def around(self, tag: str):
        return self if self.tag == tag else self.parent and self.parent.around(tag)


class Tree(HTMLParser):
    """The elements of a page; `root` holds them."""
    def __init__(self, html: str):
        super().__init__()
        self.root = self.open = Node("page", {}, None)
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        node = Node(tag, dict(attributes), self.open)
        self.open.children.append(node)
        if tag not in ("meta", "link", "input"):
            self.open = node

    def handle_endtag(self, tag):
        self.open = self.open.around(tag).parent

    def handle_data(self, data):
        self.open.children.append(data)


def name_of(control: Node, root: Node) -> str:
    label = root.one("for", control.attributes.get("id"))
    return label.text if label else control.attributes.get("aria-label") or control.text


def value_of(control: Node) -> str:
    if control.tag == "select":
        options = control.all("option")
        return next((each.text for each in options if "selected" in each.attributes), options[0].text)
    return control.text if control.tag == "textarea" else control.attributes.get("value") or ""


class PaperBrowser:
    """Tabs on one world, as an agent sees and uses them."""

    def __init__(self, world: World, start: str):
        self.world, self.tokens, self.tabs, self.current = world, {}, [], 0
        for address in start.split(" |AND| "):
            self.tabs.append(None)
            self.current = len(self.tabs) - 1
            self.request("GET", address)
        self.current = 0

    @property
    def root(self) -> Node:
        return self.tabs[self.current][1]

    @property
    def address(self) -> str:
        return self.tabs[self.current][0]

    def request(self, method: str, address: str, form=None):
        parts = urlsplit(address)
        _, name, *rest = parts.path.split("/")
        path = "/".join(["", *rest])
        query = dict(parse_qsl(parts.query))
        status, headers, html = self.world.respond(name, method, path, Request(None, query, form or {}),
                                                   self.tokens.get(name))
        if "Set-Cookie" in headers:
            self.tokens[name] = re.match(r"\w+=(\w*)", headers["Set-Cookie"])[1]
        if status == 303:
            return self.request("GET", headers["Location"])
        self.tabs[self.current] = (address, Tree(html).root)

    def observe(self) -> str:
        self.elements, self.lines, self.line = [], [], []
        self.write(self.root)
        self.flush()
        return "\n".join(self.lines)

    def flush(self, prefix: str = ""):
        if self.line:
            self.lines.append(prefix + " ".join(self.line))
        self.line = []

    def write(self, node):
        if isinstance(node, str):
            self.line += [node.strip()] * bool(node.strip())
        elif node.tag in ("a", "button", "input", "textarea", "select"):
            shown = value_of(node) if node.tag in ("input", "textarea", "select") else ""
            name = name_of(node, self.root)
            named = with_id(name, len(self.elements))
            self.line.append(f"<{node.tag}>{named}{' = ' * bool(shown)}{shown}</{node.tag}>")
            self.elements.append(node)
        elif node.tag not in ("style", "label", "title"):
            block = node.tag not in ("span", "td")
            prefix = "#" * int(node.tag[1]) + " " if node.tag in ("h1", "h2") else ""
            if block:
                self.flush()
            for child in node.children:
                self.write(child)
            if block:
                self.flush(prefix)

    def execute(self, call):
        if call.name == "Switch Tab":
            self.current = int(call.argument)
            return
        node = self.elements[int(call.element)]
        if call.name == "Select Dropdown Option":
            for option in node.all("option"):
                option.attributes.pop("selected", None)
                if option.text == call.argument:
                    option.attributes["selected"] = ""
        elif call.name in ("Type", "Search"):
            node.attributes["value"], node.children = call.argument, [call.argument]
            if call.name == "Search":
                self.send(node)
        elif node.tag == "a":
            self.request("GET", node.attributes["href"])
        else:
            self.send(node)

    def send(self, control: Node):
        form = self.form_of(control)
        fields = {each.attributes["name"]: value_of(each) for each in self.root.all("input", "textarea", "select")
                  if self.form_of(each) is form}
        if control.tag == "button" and "name" in control.attributes:
            fields[control.attributes["name"]] = control.attributes["value"]
        address = form.attributes.get("action") or self.address.partition("?")[0]
        if form.attributes.get("method") == "post":
            self.request("POST", address, fields)
        else:
            self.request("GET", f"{address}?{urlencode(fields)}")

    def form_of(self, control: Node):
        return self.root.one("id", control.attributes.get("form")) or control.around("form")


# What the locators of long.py read. Chromium runs the locators themselves in the tests further below.
def cart_lines(root: Node) -> str:
    rows = root.one("id", "cart").all("tr")
    return ", ".join(sorted(" ".join([value_of(row.all("input")[0]), row.one("class", "size").text,
                                      row.one("class", "name").text]) for row in rows))


def order_lines(root: Node) -> str:
    return ", ".join(sorted(line.text for line in root.one("id", "order").all("li")))


def last_comment(root: Node) -> str:
    return root.all("main")[0].all("li")[-1].text


READERS = {long.CART_LINES: cart_lines, long.ORDER_LINES: order_lines, long.LAST_COMMENT: last_comment}


def read(locator: str, root: Node) -> str | None:
    try:
        if locator in READERS:
            return READERS[locator](root)
        return root.one("id", re.fullmatch(r"document\.querySelector\('#(\w+)'\)\.innerText", locator)[1]).text
    except (AttributeError, IndexError):  # there is no such element
        return None


def judge(task: dict, answer: str | None, browser: PaperBrowser) -> bool:
    spec = task["eval"]
    verdicts = []
    if "string_match" in spec["eval_types"]:
        verdicts.append(string_match(answer, spec["reference_answers"]))
    if "url_match" in spec["eval_types"]:
        verdicts.append(url_match(browser.address, spec["reference_url"], spec["url_note"]))
    for target in sorted(spec["program_html"], key=lambda target: target["url"] != "last"):
        if target["url"] != "last":
            browser.request("GET", target["url"])
        made = contents_checks(target["required_contents"], read(target["locator"], browser.root), "page")
        verdicts += [check.passed for check in made]
    assert verdicts
    return all(verdicts)


def local(task: dict) -> dict:
    return json.loads(json.dumps(task).replace("__SHOPPING__", "/shop").replace("__REDDIT__", "/forum"))


def play_on_paper(task: dict, policy, most: int = MOST_TURNS):
    """(success, [(thought, call)] of each turn) of one episode."""
    task = local(task)
    browser, turns, answer = PaperBrowser(World(task["world"]), task["start_url"]), [], None
    while len(turns) < most and answer is None:
        thought, action = policy(browser.observe())
        call = parse(action)
        turns.append((thought, call))
        if call.name == "exit":
            answer = call.argument
        else:
            browser.execute(call)
    return judge(task, answer, browser), turns


def each_template(n: int = 1) -> list[dict]:
    """n tasks of every template of the tier."""
    return sandbox.tasks(TEST, n * len(long.SEEN)) + sandbox.tasks(UNSEEN, n * len(long.UNSEEN))


def number(task: dict) -> int:
    return task["intent_template_id"]


# ---- splits
def test_the_splits_are_balanced_and_share_neither_world_nor_unseen_template():
    splits = {split: sandbox.tasks(split) for split in (TRAIN, DEV, TEST, UNSEEN)}
    worlds = [task["world"] for tasks in splits.values() for task in tasks]
    assert len(set(worlds)) == len(worlds)
    assert max(worlds) < 10 ** 9  # the server's longest seed
    assert len(long.SEEN) >= 10 and len(long.UNSEEN) >= 3
    for split in (TRAIN, DEV, TEST):
        assert {number(task) for task in splits[split]} == long.SEEN.keys()
    for split in (DEV, TEST, UNSEEN):
        assert len(set(Counter(map(number, splits[split])).values())) == 1
    assert {number(task) for task in splits[UNSEEN]} == long.UNSEEN.keys()
    assert not long.SEEN.keys() & long.UNSEEN.keys()
    assert sandbox.tasks(TRAIN, 30) == splits[TRAIN][:30] == json.loads(json.dumps(splits[TRAIN][:30]))


# ---- what a check wants
def test_experts_solve_every_template_in_eight_to_twenty_turns():
    for task in each_template(20):
        success, turns = play_on_paper(task, sandbox.expert(task))
        assert success and 8 <= len(turns) <= MOST_TURNS, (task["intent"], task["start_url"], turns)


def test_doing_nothing_scores_nothing():
    for task in each_template(20):
        for message in ("", "done", "N/A"):
            success, _ = play_on_paper(task, lambda page: ("", f'exit(message="{message}")'))
            assert not success, task["intent"]


class Forgetful:
    """An expert that leaves out one of its actions, counted from 0. If it then finds no way on, it says it is done."""

    def __init__(self, task: dict, left_out: int):
        self.act, self.left_out, self.count, self.excused = sandbox.expert(task), left_out, 0, False

    def __call__(self, page: str):
        try:
            thought, action = self.act(page)
            if self.count == self.left_out:
                gone = parse(action)
                link = re.search(rf"<a>[^<]* <{gone.element}></a>", page)
                thought, action = self.act(page)
                self.excused = bool(link) or parse(action) == gone
        except Lost:
            return done()
        self.count += 1
        return thought, action


def test_a_task_with_any_one_action_left_out_fails():
    """But for a link, where a script finds another way to its page (the forum's home page lists all posts), and for
    a click that a script makes up for at once, as the one that empties the cart does.
    """
    played, detours = Counter(), 0
    for task in each_template(3):
        _, turns = play_on_paper(task, sandbox.expert(task))
        for left_out in range(len(turns) - 1):  # the last one is the answer
            forgetful = Forgetful(task, left_out)
            success, forgotten = play_on_paper(task, forgetful)
            played[number(task)] += 1
            if forgetful.excused:
                detours += success
            else:
                assert not success, (task["intent"], task["start_url"], turns[left_out], forgotten)
    assert played.keys() == long.SEEN.keys() | long.UNSEEN.keys() and min(played.values()) >= 3 * 7
    assert detours < 0.1 * played.total()


def test_a_task_that_stops_early_fails():
    for task in each_template(3):
        _, turns = play_on_paper(task, sandbox.expert(task))
        for most in range(len(turns) - 1):
            success, _ = play_on_paper(task, sandbox.expert(task), most)
            assert not success, (task["intent"], turns[most:])


def test_a_task_that_asks_for_an_answer_is_not_done_without_it():
    for task in each_template(3):
        _, turns = play_on_paper(task, sandbox.expert(task))
        success, _ = play_on_paper(task, sandbox.expert(task), len(turns) - 1)
        assert success == ("string_match" not in task["eval"]["eval_types"])


def test_the_order_in_which_things_are_bought_does_not_matter():
    for task in sandbox.tasks(TEST, 5, 81):
        slots = task["instantiation_dict"]
        turned = slots | {"one": slots["three"], "size_one": slots["size_three"],
                          "three": slots["one"], "size_three": slots["size_one"]}
        success, turns = play_on_paper(task, sandbox.expert(task | {"instantiation_dict": turned}))
        assert success and turns[0][1].argument == slots["three"]


@pytest.mark.parametrize("template, slot, change", [
    (81, "size_two", lambda old: "medium" if old == "large" else "large"),
    (82, "quantity", lambda old: str(int(old) + 1)),
    (83, "shipping", lambda old: "pickup" if old != "pickup" else "express"),
    (87, "city", lambda old: "rome" if old != "rome" else "oslo"), (88, "text", lambda old: old + " sky"),
    (90, "status", lambda old: "nothing"), (91, "bio", lambda old: old + " sky")])
def test_a_part_done_wrong_fails(template, slot, change):
    failed = 0
    for task in sandbox.tasks(TEST, 6, template):
        slots = task["instantiation_dict"]
        wrong = task | {"instantiation_dict": slots | {slot: change(slots[slot])}}
        success, _ = play_on_paper(task, sandbox.expert(wrong))
        failed += not success
    assert failed == 6 or template == 90 and 0 < failed < 6  # the condition holds for some of them and not for others


def test_something_else_in_the_cart_spoils_a_purchase():
    for task in sandbox.tasks(TEST, 3, 81):
        slots = task["instantiation_dict"]
        fourth = next(p.name for p in long.fresh_products(World(task["world"])) if p.name not in slots.values())
        first, then = sandbox.expert(task | {"intent_template_id": 3, "instantiation_dict": {"name": fourth}}), None
        steps = []

        def policy(page):
            nonlocal then
            steps.append(page)
            if len(steps) <= 2:
                return first(page)
            if len(steps) == 3:
                return "", f'do(action="Click", element="{re.search("<button>add to cart <([0-9]+)>", page)[1]}")'
            then = then or sandbox.expert(task)
            return then(page)
        success, turns = play_on_paper(task, policy, 30)
        assert not success and turns[-1][1].name == "exit" and len(turns) > 10


def test_both_outcomes_of_a_condition_occur_and_no_slot_gives_the_answer_away():
    held, best = Counter(), Counter()
    for task in sandbox.tasks(TRAIN, 100, 90):
        slots = task["instantiation_dict"]
        held[World(task["world"]).sites["shop"].orders[slots["number"]].status == slots["status"]] += 1
    for task in sandbox.tasks(TRAIN, 100, 84):
        names = list(task["instantiation_dict"].values())
        text = task["eval"]["program_html"][0]["required_contents"]["exact_match"]
        best[next(i for i, name in enumerate(names) if name in text)] += 1
    assert min(held.values()) >= 30 and min(best.values()) >= 20


def test_no_count_and_no_total_can_be_guessed_well():
    for split, template in ((TRAIN, 86), (UNSEEN, 181)):
        specs = [task["eval"] for task in sandbox.tasks(split, 300, template)]
        answers = Counter(spec["reference_answers"]["exact_match"] for spec in specs)
        assert max(answers.values()) < 0.3 * 300


def test_no_old_order_passes_for_buying():
    for template in (81, 83, 89, 90):
        for task in sandbox.tasks(TRAIN, 40, template):
            spec = local(task)["eval"]
            for order in World(task["world"]).sites["shop"].orders:
                browser = PaperBrowser(World(task["world"]), f"/shop/orders/{order}")
                assert not judge(task | {"eval": spec}, "done", browser)


# ---- for the small base
@pytest.fixture(scope="module")
def base() -> Chat:
    return Chat(load_tokenizer(BASE), "You browse the web.")


def broken(chat: Chat, text: str) -> set[str]:
    """The words of a text that the tokenizer cuts into pieces."""
    return {word for word in re.findall("[a-z]+", text) for form in (word, word + " ") if len(chat.encode(form)) > 1}


def test_every_word_of_every_instruction_and_thought_is_one_token(base):
    words = set()
    for split in (TRAIN, DEV, TEST, UNSEEN):
        for task in sandbox.tasks(split):
            words |= broken(base, task["intent"])
    for task in each_template(5):
        _, turns = play_on_paper(task, sandbox.expert(task))
        for thought, _ in turns:
            words |= broken(base, thought)
    assert words == set(), "say it in words of worlds/sandbox/vocabulary.py"


def test_responses_fit_the_default_length(base):
    """Demonstrations must be what the policy can write: bc.py's --max-new-tokens is 64."""
    for task in each_template(5):
        act = sandbox.expert(task)
        longest = []

        def policy(page):
            thought, action = act(page)
            longest.append(len(base.encode(format_response(thought, action, think=True))) + 1)
            return thought, action
        play_on_paper(task, policy)
        assert max(longest) <= 64


def test_long_thoughts_lead_to_the_same_actions():
    for task in each_template():
        _, short = play_on_paper(task, sandbox.expert(task))
        success, full = play_on_paper(task, sandbox.expert(task, cot=True))
        assert success and [call for _, call in full] == [call for _, call in short]
        assert task["intent"] in full[-1][0] and short[-1][0] in full[-1][0]


# ---- in Chromium
def outcomes(played) -> list[float]:
    assert [tau.checks for tau in played if tau.status != "ok"] == []
    return [tau.success for tau in played]


def test_in_chromium_experts_solve_every_template_and_a_part_left_out_fails(solve):
    tasks = each_template()
    played = solve(tasks, sandbox.expert)
    assert outcomes(played) == [1.0] * len(tasks)
    assert not any(turn.error for tau in played for turn in tau.turns)
    on_paper = [len(play_on_paper(task, sandbox.expert(task))[1]) for task in tasks]
    assert [len(tau.turns) for tau in played] == on_paper
    rng = Random(0)
    forgotten = solve(tasks[::3], lambda task: Forgetful(task, rng.randrange(7)))
    assert outcomes(forgotten) == [0.0] * len(tasks[::3])


@pytest.mark.slow
@pytest.mark.parametrize("split", [TRAIN, TEST, UNSEEN])
def test_in_chromium_every_action_counts(solve, split):
    tasks = sandbox.tasks(split, 44)  # 4 of each of 11 templates, 11 of each of 4
    assert all(outcomes(solve(tasks, sandbox.expert)))
    assert not any(outcomes(solve(tasks, lambda task: lambda page: done())))
    rng, policies = Random(split), {}

    def forgetful(task):
        policies[task["task_id"]] = Forgetful(task, rng.randrange(7))  # the shortest task is 7 actions and the answer
        return policies[task["task_id"]]
    played = solve(tasks, forgetful)
    solved = [tau.task["task_id"] for tau, success in zip(played, outcomes(played)) if success]
    assert all(policies[task_id].excused for task_id in solved)
