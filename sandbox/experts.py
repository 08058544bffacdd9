"""Scripted experts: one short generator a template, seeing nothing but observations and saying nothing but actions.

A script reads the page of the moment (`page`), yields (thought, action), and finds the next page there when it goes on. Scripts
look before they act, so they work from whichever page a task starts on. Gold answers are read off the pages, never passed in.
"""

import re
from random import Random

ELEMENT = re.compile(r"<(a|button|input|textarea|select|checkbox)>([^<]*?) ?([0-9]+)(?: =([^<]*))?</\1>")


class Lost(Exception):
    """The page does not hold what a script looks for."""


class Page:
    """The observation of the moment, and the actions on it."""

    text = ""

    def ids(self, name: str) -> list[str]:
        return [number for _, found, number, _ in ELEMENT.findall(self.text) if found == name]

    def has(self, name: str) -> bool:
        return bool(self.ids(name))

    def do(self, action: str, name: str, thought: str, argument: str | None = None):
        if not self.has(name):
            raise Lost(f"no element named {name!r} to {action.lower()} on this page:\n{self.text}")
        number = self.ids(name)[0]
        words = f'argument="{argument}", ' if argument is not None else ""
        return thought, f'# Element: {name} {number}\ndo(action="{action}", {words}element="{number}")'

    def click(self, name: str, thought: str = ""):
        return self.do("Click", name, thought or f"click {name}")

    def type(self, name: str, text: object):
        return self.do("Type", name, f"type {text} into {name}", str(text))

    def search(self, text: str):
        return self.do("Search", "search", f"search for {text}", text)

    def choose(self, name: str, option: str):
        return self.do("Select Dropdown Option", name, f"choose {option} as {name}", option)

    def read(self, pattern: str) -> str:
        """The part in parentheses, read off the page."""
        match = re.search(pattern, self.text)
        if match is None:
            raise Lost(f"nothing like {pattern!r} on this page:\n{self.text}")
        return match[1]


def done(answer: str = "done"):
    return ("the task is done" if answer == "done" else f"the answer is {answer}"), f'exit(message="{answer}")'


# ---- ways through the sites
def to_listing(page, name: str, section: str):
    """Until the page lists `name`: through the home page to its section, then from page to page."""
    if not page.has(name) and not page.has(section) and page.has("home") and f"<h1>{section}</h1>" not in page.text:
        yield page.click("home", f"go home to find {section}")
    if not page.has(name) and page.has(section):
        yield page.click(section, f"open {section} to find {name}")
    while not page.has(name):
        yield page.click("next page", f"look for {name} on the next page")


def to_page(page, name: str, section: str):
    if f"<h1>{name}</h1>" not in page.text:
        yield from to_listing(page, name, section)
        yield page.click(name)


def add(page, product, category, size=None):
    yield from to_page(page, product, category)
    if size:
        yield page.choose("size", size)
    yield page.click("add to cart", f"put {product} into the cart")


def visit(page, heading: str, by: str):
    if f"<h1>{heading}</h1>" not in page.text:
        yield page.click(by)


# ---- one script a template
def price(page, product, category):
    yield from to_listing(page, product, category)
    yield done(page.read(rf"{product} [0-9]+</a> (\$[0-9]+)"))


def stock(page, product, category):
    yield from to_page(page, product, category)
    yield done(page.read(r"stock ([0-9]+)"))


def open_page(page, product=None, category=None, post=None, forum=None):
    yield from to_page(page, product or post, category or forum)
    yield done()


def search_product(page, product):
    yield page.search(product)
    yield page.click(product)
    yield done()


def count_search(page, word):
    yield page.search(word)
    yield done(page.read(r"([0-9]+) found"))


def add_to_cart(page, product, category, size=None):
    yield from add(page, product, category, size)
    yield done()


def add_two(page, product, other, category):
    yield from add(page, product, category)
    yield from add(page, other, category)
    yield done()


def remove_from_cart(page, product):
    yield from visit(page, "cart", "cart")
    yield page.click(f"remove {product}")
    yield done()


def set_quantity(page, product, quantity):
    yield from visit(page, "cart", "cart")
    yield page.type(product, quantity)
    yield page.click("update cart")
    yield done()


def buy(page, product, category, shipping):
    yield from add(page, product, category)
    yield page.click("checkout")
    yield page.choose("shipping", shipping)
    yield page.click("continue")
    yield page.click("place order")
    yield done()


def to_order(page, number):
    yield from visit(page, "orders", "orders")
    yield page.click(f"order {number}")


def order_status(page, number):
    yield from to_order(page, number)
    yield done(page.read(r"status ([a-z]+)"))


def order_total(page, number):
    yield from to_order(page, number)
    yield done(page.read(r"total (\$[0-9]+)"))


def set_account(page, **fields):
    yield from visit(page, "account", "account")
    yield page.click("edit account")
    for name, value in fields.items():
        yield page.type(name, value)
    yield page.click("save")
    yield done()


def who_wrote(page, post, forum):
    yield from to_page(page, post, forum)
    yield done(page.read(r"author <a>([a-z]+) "))


def count_votes(page, post, forum):
    yield from to_page(page, post, forum)
    yield done(page.read(r"votes ([0-9]+)"))


def upvote(page, post, forum):
    yield from to_page(page, post, forum)
    yield page.click("upvote")
    yield done()


def downvote(page, post, forum):
    yield from to_page(page, post, forum)
    yield page.click("downvote")
    yield done()


def comment(page, text, post, forum):
    yield from to_page(page, post, forum)
    yield page.type("comment", text)
    yield page.click("send")
    yield done()


def save_bio(page, bio):
    if not page.has("edit profile"):
        yield page.click("profile")
    yield page.click("edit profile")
    yield page.type("bio", bio)
    yield page.click("save")


def set_bio(page, bio):
    yield from save_bio(page, bio)
    yield done()


def log_out(page):
    yield page.click("log out")
    yield done()


def log_out_and_set_bio(page, bio):
    yield from save_bio(page, bio)  # first: logged out, nobody can edit
    yield page.click("log out", "the bio is saved so log out")
    yield done()


def create_post(page, title, forum):
    yield page.click("new post")
    yield page.choose("forum", forum)
    yield page.type("title", title)
    yield page.click("create post")
    yield done()


SCRIPTS = {1: price, 2: open_page, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_to_cart, 7: remove_from_cart,
           8: set_quantity, 9: buy, 10: order_status, 11: set_account, 20: open_page, 21: who_wrote, 22: upvote, 23: comment,
           24: set_bio, 25: log_out, 26: log_out_and_set_bio, 27: create_post,
           101: stock, 102: order_total, 103: set_account, 104: add_two, 120: count_votes, 121: downvote}


def expert(task: dict):
    """A callable for one episode: observation -> (thought, action)."""
    page = Page()
    script = SCRIPTS[task["intent_template_id"]](page, **task["instantiation_dict"])

    def act(observation: str) -> tuple[str, str]:
        page.text = observation
        return next(script, done())
    return act


def random_policy(seed):
    """A callable that acts at random on whatever it sees, and answers with a random word of the page now and then."""
    rng = Random(seed)

    def act(observation: str) -> tuple[str, str]:
        elements = ELEMENT.findall(observation)
        words = re.findall(r"\$?\w+", re.sub("<[^>]*>", " ", observation)) or ["done"]
        if not elements or rng.random() < 0.1:
            return done(rng.choice(words))
        tag, name, number, value = rng.choice(elements)
        head, tail = f"# Element: {name} {number}\ndo(", f'element="{number}")'
        if tag == "select":
            options = re.findall(r"[^(|)]+", value.partition("(")[2]) or words
            return "", f'{head}action="Select Dropdown Option", argument="{rng.choice(options).strip()}", {tail}'
        if tag in ("input", "textarea"):
            return "", f'{head}action="{rng.choice(("Type", "Search"))}", argument="{rng.choice(words)}", {tail}'
        return "", f'{head}action="Click", {tail}'
    return act
