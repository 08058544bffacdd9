"""Scripted experts: one short generator a template, seeing nothing but observations and saying nothing but actions.

A script reads the page of the moment (`page`), yields (thought, action), and finds the next page there when it goes on.
Scripts look before they act, so they work from any page a task starts on. Answers are read off the pages.
"""

import re
from functools import partial
from random import Random

ELEMENT = re.compile(r"<(a|button|input|textarea|select|checkbox)>([^<]*?) ?([0-9]+)(?: =([^<]*))?</\1>")


class Lost(Exception):
    """The page does not hold what a script looks for."""


class Page:
    """The observation of the moment, and the actions on it."""

    text = ""

    def find(self, name: str) -> str | None:
        """The id of the first element of that name."""
        return next((number for _, found, number, _ in ELEMENT.findall(self.text) if found == name), None)

    def at(self, heading: str) -> bool:
        return f"<h1>{heading}</h1>" in self.text

    def answer(self, pattern: str) -> tuple[str, str]:
        """Ends with the part in parentheses. The thought quotes the page up to it: then reading is copying what stands there."""
        match = re.search(pattern, self.text)
        if match is None:
            raise Lost(f"nothing like {pattern!r} on this page:\n{self.text}")
        return re.sub("</?a>", "", match[0]).strip(), f'exit(message="{match[1]}")'

    def do(self, action: str, name: str, thought: str, argument: str | None = None) -> tuple[str, str]:
        number = self.find(name)
        if number is None:
            raise Lost(f"no element {name!r} to {action.lower()} on this page:\n{self.text}")
        words = f'argument="{argument}", ' if argument is not None else ""
        return thought, f'# Element: {name} {number}\ndo(action="{action}", {words}element="{number}")'

    def click(self, name: str, thought: str = ""):
        return self.do("Click", name, thought or f"click {name}")

    def type(self, name: str, text: str):
        return self.do("Type", name, f"type {text} into {name}", text)

    def search(self, text: str):
        return self.do("Search", "search", f"search for {text}", text)

    def choose(self, name: str, option: str):
        return self.do("Select Dropdown Option", name, f"choose {option} as {name}", option)


def done(message: str = "done") -> tuple[str, str]:
    return "the task is done", f'exit(message="{message}")'


# ---- ways through the sites
def to_listing(page, name, section):
    """Until the page lists `name`: from the home page to its section, there from page to page."""
    if not page.find(name) and not page.find(section) and not page.at(section):
        yield page.click("home", f"go home to find {section}")
    if not page.find(name) and not page.at(section):
        yield page.click(section, f"open {section} to find {name}")
    while not page.find(name):
        yield page.click("next page", f"find {name} on the next page")


def to_page(page, name, section):
    if not page.at(name):
        yield from to_listing(page, name, section)
        yield page.click(name)


def visit(page, heading):
    if not page.at(heading):
        yield page.click(heading)


def add(page, name, section, size=None):
    yield from to_page(page, name, section)
    if size:
        yield page.choose("size", size)
    yield page.click("add to cart", f"put {name} into the cart")


def save_bio(page, bio):
    if not page.find("edit profile"):
        yield page.click("profile")
    yield page.click("edit profile")
    yield page.type("bio", bio)
    yield page.click("save")


# ---- scripts
def price(page, name, section):
    yield from to_listing(page, name, section)
    yield page.answer(rf"{name} [0-9]+</a> (\$[0-9]+)")


def look_up(pattern, page, name, section):
    yield from to_page(page, name, section)
    yield page.answer(pattern)


def open_page(page, name, section):
    yield from to_page(page, name, section)
    yield done()


def press(button, page, name, section):
    yield from to_page(page, name, section)
    yield page.click(button)
    yield done()


def search_product(page, name):
    yield page.search(name)
    yield page.click(name)
    yield done()


def count_search(page, word):
    yield page.search(word)
    yield page.answer("([0-9]+) found")


def add_to_cart(page, name, section, size=None):
    yield from add(page, name, section, size)
    yield done()


def add_two(page, name, other, section):
    yield from add(page, name, section)
    yield from add(page, other, section)
    yield done()


def remove_from_cart(page, name):
    yield from visit(page, "cart")
    yield page.click(f"remove {name}")
    yield done()


def set_quantity(page, name, quantity):
    yield from visit(page, "cart")
    yield page.type(name, quantity)
    yield page.click("update cart")
    yield done()


def buy(page, name, section, shipping):
    yield from add(page, name, section)
    yield page.click("checkout")
    yield page.choose("shipping", shipping)
    yield page.click("continue")
    yield page.click("place order")
    yield done()


def look_up_order(pattern, page, number):
    yield from visit(page, "orders")
    yield page.click(f"order {number}")
    yield page.answer(pattern)


def set_account(page, **fields):
    yield from visit(page, "account")
    yield page.click("edit account")
    for name, value in fields.items():
        yield page.type(name, value)
    yield page.click("save")
    yield done()


def comment(page, text, name, section):
    yield from to_page(page, name, section)
    yield page.type("comment", text)
    yield page.click("send")
    yield done()


def create_post(page, title, section):
    yield page.click("new post")
    yield page.choose("forum", section)
    yield page.type("title", title)
    yield page.click("create post")
    yield done()


def set_bio(page, bio):
    yield from save_bio(page, bio)
    yield done()


def log_out_and_open(page, name, section):
    yield page.click("log out", f"log out then find {name}")  # first: logging out leads away from the post
    yield from to_page(page, name, section)
    yield done()


def log_out_and_set_bio(page, bio):
    yield from save_bio(page, bio)  # first: nobody can edit once logged out
    yield page.click("log out", "the bio is saved so log out")
    yield done()


SCRIPTS = {  # by intent_template_id
    1: price, 2: open_page, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_to_cart, 7: remove_from_cart,
    8: set_quantity, 9: buy, 10: partial(look_up_order, "status ([a-z]+)"), 11: set_account,
    21: open_page, 22: partial(look_up, "author <a>([a-z]+) "), 23: partial(press, "upvote"), 24: comment,
    25: create_post, 26: set_bio, 27: log_out_and_open, 28: log_out_and_set_bio,
    101: partial(look_up, "stock ([0-9]+)"), 102: add_two, 103: partial(look_up_order, r"total (\$[0-9]+)"),
    104: set_account, 121: partial(look_up, "votes ([0-9]+)"), 122: partial(press, "downvote")}


def expert(task: dict):
    """A callable for one episode: observation -> (thought, action)."""
    page = Page()
    script = SCRIPTS[task["intent_template_id"]](page, **task["instantiation_dict"])

    def act(observation: str) -> tuple[str, str]:
        page.text = observation
        return next(script, done())
    return act


def random_policy(seed):
    """A callable that acts at random on whatever it sees and, now and then, answers with a word of the page."""
    rng = Random(seed)

    def act(observation: str) -> tuple[str, str]:
        elements = ELEMENT.findall(observation)
        words = re.findall(r"\$?\w+", re.sub("<[^>]*>", " ", observation)) or ["done"]
        if not elements or rng.random() < 0.1:
            return done(rng.choice(words))
        tag, name, number, value = rng.choice(elements)
        call = 'action="Click"'
        if tag == "select":
            option = rng.choice(re.findall(r"[^(|)]+", value.partition("(")[2]) or words).strip()
            call = f'action="Select Dropdown Option", argument="{option}"'
        elif tag in ("input", "textarea"):
            call = f'action="{rng.choice(("Type", "Search"))}", argument="{rng.choice(words)}"'
        return "", f'# Element: {name} {number}\ndo({call}, element="{number}")'
    return act
