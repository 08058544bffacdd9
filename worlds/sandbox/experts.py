"""Scripted experts: a short generator for each template (similar ones share one), which sees only observations and
emits only actions.

A script reads the page of the moment (`page`), yields (thought, action), and finds the next page there when it goes on.
Scripts look before they act, so they work from any page a task starts on. Answers are read off the pages.
"""

import re
from functools import partial
from random import Random

from .vocabulary import ID, with_id
from .writing import Moment, Voice, named_in, step_of

ANY_ID = ID.format("[0-9]+")
ELEMENT = re.compile(rf"<(a|button|input|textarea|select|checkbox)>([^<]*?) ?{ID.format('([0-9]+)')}(?: =([^<]*))?</\1>")


class Lost(Exception):
    """The page does not hold what a script looks for."""


class Page:
    """The observation of the moment, and the actions on it."""

    text = ""

    def find(self, name: str) -> str | None:
        """The id of the first element of that name."""
        for _, found, number, _ in ELEMENT.findall(self.text):
            if found == name:
                return number
        return None

    def names(self, beginning: str) -> list[str]:
        """The names of the elements that begin so."""
        return [name for _, name, _, _ in ELEMENT.findall(self.text) if name.startswith(beginning)]

    def at(self, heading: str) -> bool:
        return f"# {heading}" in self.text.splitlines()

    def read(self, pattern: str) -> re.Match:
        match = re.search(pattern, self.text, re.MULTILINE)
        if match is None:
            raise Lost(f"nothing like {pattern!r} on this page:\n{self.text}")
        return match

    def answer(self, pattern: str) -> tuple[str, str]:
        """Ends with the part in parentheses. The thought quotes the page up to it: then reading is copying."""
        match = self.read(pattern)
        return re.sub("</?a>", "", match[0]).strip(), f'exit(message="{match[1]}")'

    def do(self, action: str, name: str, thought: str, argument: str | None = None) -> tuple[str, str]:
        number = self.find(name)
        if number is None:
            raise Lost(f"no element {name!r} to {action.lower()} on this page:\n{self.text}")
        words = f'argument="{argument}", ' if argument is not None else ""
        return thought, f'# Element: {with_id(name, number)}\ndo(action="{action}", {words}element="{number}")'

    def click(self, name: str, thought: str = ""):
        return self.do("Click", name, thought or f"click {name}")

    def type(self, name: str, text: str):
        return self.do("Type", name, f"type {text} into {name}", text)

    def search(self, text: str):
        return self.do("Search", "search", f"search for {text}", text)

    def switch(self, tab: int, thought: str = ""):
        return thought or f"go to tab {tab}", f'do(action="Switch Tab", argument="{tab}")'

    def choose(self, name: str, option: str):
        return self.do("Select Dropdown Option", name, f"choose {option} as {name}", option)


def done() -> tuple[str, str]:
    return "all is done", 'exit(message="done")'


# ---- ways through the sites
def to_listing(page, name, section):
    """Until the page lists `name`: from the home page to its section, there from page to page."""
    if not page.find(name) and not page.find(section) and not page.at(section):
        yield page.click("home", f"{section} is not here so click home")
    if not page.find(name) and not page.at(section):
        yield page.click(section, f"{name} is in {section} so click {section}")
    while not page.find(name):
        yield page.click("next page", f"{name} is not here so click next page")


def to_page(page, name, section):
    if not page.at(name):
        yield from to_listing(page, name, section)
        yield page.click(name)


def to_section(page, section):
    if not page.at(section):
        if not page.find(section):
            yield page.click("home")
        yield page.click(section)


def visit(page, heading):
    if not page.at(heading):
        yield page.click(heading)


def add(page, name, section, size=None):
    yield from to_page(page, name, section)
    if size:
        yield page.choose("size", size)
    yield page.click("add to cart")


def save_account(page, **fields):
    yield from visit(page, "account")
    yield page.click("edit account")
    for name, value in fields.items():
        yield page.type(name, value)
    yield page.click("save")


def send_post(page, title, section):
    yield page.click("new post")
    yield page.choose("forum", section)
    yield page.type("title", title)
    yield page.click("create post")


def save_bio(page, bio):
    if not page.find("edit profile"):
        yield page.click("profile")
    yield page.click("edit profile")
    yield page.type("bio", bio)
    yield page.click("save")


def to_project(page, project):
    if not page.at(project):
        if not page.find(project) and not page.at("projects"):
            yield page.click("home", f"{project} is not here so click home")
        while not page.find(project):
            yield page.click("next page", f"{project} is not here so click next page")
        yield page.click(project)


def to_row(page, name, project, listing):
    """To an issue or a merge request."""
    if not page.at(name):
        if not page.find(name):
            yield from to_tab(page, project, listing)
        while not page.find(name):
            yield page.click("next page", f"{name} is not here so click next page")
        yield page.click(name)


def to_tab(page, project, listing):
    if not page.at(listing):
        yield from to_project(page, project)
        yield page.click(listing)


def to_found(page, name):
    """What a search finds by its name."""
    if not page.at(name):
        yield page.search(name)
        yield page.click(name)


def report(page, month, kind=None):
    yield from visit(page, "reports")
    if kind:
        yield page.choose("report", kind)
    yield page.choose("month", month)
    yield page.click("show report")


def route(page, start, end, by=None):
    yield from visit(page, "directions")
    yield page.type("from", start)
    yield page.type("to", end)
    if by:
        yield page.choose("by", by)
    yield page.click("find route")


def unless_refused(page, because="not allowed"):
    """Ends the episode with "N/A" where the page says so."""
    if because in page.text:
        yield f"{because} so it cannot be done", 'exit(message="N/A")'


# ---- scripts
def price_beside(name):
    return rf"{name} {ANY_ID}</a> (\$[0-9]+)"


def price(page, name, section):
    yield from to_listing(page, name, section)
    yield page.answer(price_beside(name))


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
    yield page.answer("([0-9]+) found.*")


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
    yield from check_out(page, shipping)


def check_out(page, shipping):
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
    yield from save_account(page, **fields)
    yield done()


def comment(page, text, name, section):
    yield from to_page(page, name, section)
    yield page.type("comment", text)
    yield page.click("send")
    yield done()


def create_post(page, title, section):
    yield from send_post(page, title, section)
    yield done()


def set_bio(page, bio):
    yield from save_bio(page, bio)
    yield done()


def log_out_and_open(page, name, section):
    yield page.click("log out")  # first: logging out leads away from the post
    yield from to_page(page, name, section)
    yield done()


def log_out_and_set_bio(page, bio):
    yield from save_bio(page, bio)  # first: nobody can edit once logged out
    yield page.click("log out")
    yield done()


def top_products(page, month):
    yield from report(page, month)
    best = re.findall(r"^([a-z ]+) \| [0-9]+$", page.text, re.MULTILINE)[:3]
    yield f"sold most : {', '.join(best)}", f'exit(message="{", ".join(best)}")'


def open_report(page, **choices):
    yield from report(page, choices["month"], choices["report"])
    yield done()


def best_customer(page, month):
    yield from report(page, month, "customers")
    yield page.answer(r"customer \| spent\n([a-z]+) ")


def newest_order(page, customer):
    yield from visit(page, "orders")
    yield page.type("customer", customer)
    yield page.click("filter")
    yield page.answer(rf"\| {customer} \| ([a-z]+) ")


def count_orders(page, status):
    yield from visit(page, "orders")
    yield page.choose("status", status)
    yield page.click("filter")
    yield page.answer("([0-9]+) found.*")


def set_stock(page, name, stock):
    yield from to_found(page, name)
    yield page.click("edit product")
    yield from unless_refused(page)
    yield page.type("stock", stock)
    yield page.click("save")
    yield done()


def press_on_order(button, page, number):
    yield page.search(str(number))
    yield page.click(f"order {number}")
    yield page.click(button)
    yield from unless_refused(page)
    yield done()


def new_product(page, name, department, price, stock):
    yield page.click("new product")
    yield from unless_refused(page)
    yield page.type("name", name)
    yield page.choose("department", department)
    yield page.click("continue")
    yield page.type("price", price)
    yield page.type("stock", stock)
    yield page.click("continue")
    yield page.click("publish product")
    yield done()


def promote(page, user):
    yield from visit(page, "staff")
    yield page.click(user)
    yield page.choose("role", "manager")
    yield page.click("save")
    yield from unless_refused(page)
    yield done()


def count_issues(page, project, priority):
    yield from to_tab(page, project, "issues")
    yield page.choose("priority", priority)
    yield page.click("filter")
    yield page.answer("([0-9]+) found.*")


def open_issue(page, project, name):
    yield from to_row(page, name, project, "issues")
    yield done()


def assignee(page, project, name):
    yield from to_row(page, name, project, "issues")
    yield page.answer("assignee ([a-z]+)")


def press_on_issue(button, page, project, name):
    yield from to_row(page, name, project, "issues")
    yield page.click(button)
    yield from unless_refused(page)
    yield done()


def create_issue(page, project, title, priority=None):
    yield from to_tab(page, project, "issues")
    yield page.click("new issue")
    yield page.type("title", title)
    if priority:
        yield page.choose("priority", priority)
    yield page.click("create issue")
    yield done()


def assign_issue(page, project, name, user):
    yield from to_row(page, name, project, "issues")
    yield page.click("edit issue")
    yield page.choose("assignee", user)
    yield page.click("save")
    yield done()


def merge(page, project, name):
    yield from to_row(page, name, project, "merge requests")
    if "approved by nobody" in page.text:
        yield page.click("approve", "nobody has approved it so approve it first")
    yield from unless_refused(page)
    yield page.click("merge")
    yield from unless_refused(page)
    yield done()


def follow(page, project):
    yield from to_project(page, project)
    yield page.click("follow")
    yield done()


def invite(page, project, user, role):
    yield from to_tab(page, project, "members")
    yield page.type("username", user)
    yield page.choose("role", role)
    yield page.click("invite")
    yield done()


def member_role(page, project, user):
    yield from to_tab(page, project, "members")
    yield page.answer(rf"{user}(?: {ANY_ID}</a>)? \| ([a-z]+)")


def change_role(page, project, user, role):
    yield from to_tab(page, project, "members")
    yield page.click(user)
    yield page.choose("role", role)
    yield page.click("save")
    yield done()


def approve_as(page, project, name, user, password):
    yield page.click("log out", f"log out to become {user}")
    yield page.click("log in")
    yield page.type("username", user)
    yield page.do("Search", "password", f"type {password} into password and press enter", password)
    yield from to_row(page, name, project, "merge requests")
    yield page.click("approve")
    yield done()


def phone(page, name):
    yield from to_found(page, name)
    yield page.answer("phone ([0-9]+)")


def route_answer(pattern, page, **slots):
    yield from route(page, **slots)
    yield from unless_refused(page, "there is no route")
    yield page.answer(pattern)


def show_route(page, **slots):
    yield from route(page, **slots)
    yield from unless_refused(page, "there is no route")
    yield done()


def save_place(page, name, note):
    yield from to_found(page, name)
    yield page.type("note", note)
    yield page.click("save place")
    yield done()


def nearest(page, name, kind):
    yield from to_found(page, name)
    yield page.click("nearby")
    yield page.choose("kind", kind)
    yield page.click("filter")
    yield page.answer(r"\| distance\n<a>([a-z ]+) ")


def nearer(page, name, one, two):
    """The nearest come first."""
    yield page.click("nearby")
    while not page.find(one) and not page.find(two):
        yield page.click("next page", f"{one} and {two} are not here so click next page")
    yield page.answer(f"<a>({one}|{two}) ")


def best_rated(page, kind):
    if not page.at(kind):
        yield page.click(kind)
    yield page.choose("sort", "best")
    yield page.click("apply")
    yield page.answer(r"\| rating\n<a>([a-z ]+) ")


def remove_saved(page, name):
    yield from visit(page, "saved places")
    yield page.click(f"remove {name}")
    yield done()


def plan_trip(page, title, start, end, by):
    yield from visit(page, "trips")
    yield page.click("new trip")
    yield page.type("name", title)
    yield page.click("continue")
    for stop in (start, end):
        yield page.type("stop", stop)
        yield page.click("add stop")
    yield page.click("continue")
    yield page.choose("by", by)
    yield page.click("save trip")
    yield done()


def buy_bestseller(page, month, shipping):
    yield from report(page, month)
    name = page.read(r"^([a-z ]+) \| [0-9]+$")[1]
    yield page.switch(1)
    yield from to_found(page, name)
    yield page.click("add to cart")
    yield from check_out(page, shipping)


def post_to_issue(page, project, section):
    title = page.read(r"^# .*\n<a>([a-z ]+) ")[1]
    yield page.switch(1, f"the newest post is {title} so go to tab 1")
    yield from create_issue(page, project, title)


def comment_phone(page, place):
    yield from to_found(page, place)
    number = page.read("phone ([0-9]+)")[1]
    yield page.switch(1, f"the phone number is {number} so go to tab 1")
    yield page.type("comment", number)
    yield page.click("send")
    yield done()


# ---- scripts of the long tier
def because(reason, steps):
    """The steps; the thought of the first one begins with a reason. Thoughts stay in the history, pages do not."""
    if reason:
        thought, action = next(steps)
        _, _, plan = thought.rpartition(" so ")  # its own reason would be one too many
        yield f"{reason} so {plan}", action
    yield from steps


def read_each(page, pattern, ways):
    """Reads a number on several pages. Takes {what it belongs to: the steps to its page}, returns {what: number}.

    The thoughts list the numbers read so far.
    """
    seen = {}
    for name, steps in ways.items():
        yield from because(tally(seen), steps)
        seen[name] = int(page.read(pattern)[1])
    return seen


def tally(seen):
    return " , ".join(f"{name} {number}" for name, number in seen.items())


def to_forum(page, reason):
    yield page.switch(1, f"{reason} so go to the forum")


def add_found(page, name, size=None):
    """As `add`, but by the search."""
    yield from to_found(page, name)
    if size:
        yield page.choose("size", size)
    yield page.click("add to cart")


def buy_three(page, one, size_one, two, size_two, three, size_three, shipping):
    yield from add_found(page, one, size_one)
    yield from add_found(page, two, size_two)
    yield from add_found(page, three, size_three)
    yield from check_out(page, shipping)


def change_cart(page, held, quantity, gone, name, section, size):
    yield from visit(page, "cart")
    yield page.type(held, quantity)
    yield page.click("update cart")
    yield page.click(f"remove {gone}")
    yield from add_to_cart(page, name, section, size)


def buy_alone(page, name, section, size, shipping):
    yield from visit(page, "cart")
    while page.names("remove "):
        yield page.click(page.names("remove ")[0])
    yield from add(page, name, section, size)
    yield from check_out(page, shipping)


def add_most_in_stock(page, **names):
    seen = yield from read_each(page, "stock ([0-9]+)", {name: to_found(page, name) for name in names.values()})
    best = max(seen, key=seen.get)
    yield from because(tally(seen), add_found(page, best))
    yield done()


def comment_price(page, item, item_section, name, section):
    yield from to_listing(page, item, item_section)
    price = page.read(price_beside(item))[1]
    yield from to_forum(page, f"the price is {price}")
    yield from comment(page, price, name, section)


def count_items(page, **sections):
    total = 0
    said = ""
    for section in sections.values():
        yield from because(said, to_section(page, section))
        count = items_listed(page)
        while page.find("next page"):
            yield page.click("next page", f"{section} {count} so click next page")
            count += items_listed(page)
        total += count
        said = f"{section} {count} , {total} in all"
    yield said, f'exit(message="{total}")'


def items_listed(page):
    return len(re.findall(r"</a> \$[0-9]", page.text))


def set_accounts(page, name, city, bio):
    yield from save_account(page, name=name, city=city)
    yield from to_forum(page, "the shop is done")
    yield from set_bio(page, bio)


def three_posts(page, one, section_one, two, section_two, three, section_three, text):
    yield from to_page(page, one, section_one)
    yield page.click("upvote")
    yield from to_page(page, two, section_two)
    yield page.click("downvote")
    yield from comment(page, text, three, section_three)


def buy_instead(page, name, size, gone, shipping):
    yield from visit(page, "cart")
    yield page.click(f"remove {gone}")
    yield from add_found(page, name, size)
    yield from check_out(page, shipping)


def buy_if(page, number, status, name, other, shipping):
    yield from visit(page, "orders")
    yield page.click(f"order {number}")
    found = page.read("status ([a-z]+)")[1]
    wanted = name if found == status else other
    yield from because(f"the status is {found}", add_found(page, wanted))
    yield from check_out(page, shipping)


def post_and_bio(page, title, section, text, bio):
    yield from send_post(page, title, section)
    yield page.type("comment", text)
    yield page.click("send")
    yield from set_bio(page, bio)


def dearest_order(page):
    yield from visit(page, "orders")
    most = 0
    said = ""
    for order in page.names("order "):
        if not page.find(order):
            yield from because(said, visit(page, "orders"))
        yield page.click(order)
        total = int(page.read(r"total \$([0-9]+)")[1])
        most = max(most, total)
        said = f"total ${total} and the most is ${most}"
    yield said, f'exit(message="${most}")'


def post_total(page, number, section):
    yield from visit(page, "orders")
    yield page.click(f"order {number}")
    total = page.read(r"total (\$[0-9]+)")[1]
    yield from to_forum(page, f"the total is {total}")
    yield from create_post(page, total, section)


def buy_several(page, city, quantity, name, shipping):
    yield from save_account(page, city=city)
    yield from add_found(page, name)
    yield page.type(name, quantity)
    yield page.click("update cart")
    yield from check_out(page, shipping)


def comment_on_most_votes(page, one, section_one, two, section_two, three, section_three, text):
    sections = {one: section_one, two: section_two, three: section_three}
    ways = {name: to_page(page, name, section) for name, section in sections.items()}
    seen = yield from read_each(page, "votes ([0-9]+)", ways)
    best = max(seen, key=seen.get)
    yield from because(tally(seen), comment(page, text, best, sections[best]))


SCRIPTS = {  # by intent_template_id
    1: price, 2: open_page, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_to_cart, 7: remove_from_cart,
    8: set_quantity, 9: buy, 10: partial(look_up_order, "status ([a-z]+)"), 11: set_account,
    21: open_page, 22: partial(look_up, "author <a>([a-z]+) "), 23: partial(press, "upvote"), 24: comment,
    25: create_post, 26: set_bio, 27: log_out_and_open, 28: log_out_and_set_bio,
    101: partial(look_up, "stock ([0-9]+)"), 102: add_two, 103: partial(look_up_order, r"total (\$[0-9]+)"),
    104: set_account, 121: partial(look_up, "votes ([0-9]+)"), 122: partial(press, "downvote"),
    31: top_products, 32: open_report, 33: newest_order, 34: count_orders, 35: set_stock,
    36: partial(press_on_order, "ship order"), 37: partial(press_on_order, "cancel order"), 38: new_product,
    41: count_issues, 42: open_issue, 43: assignee, 44: create_issue, 45: partial(press_on_issue, "close issue"),
    46: assign_issue, 47: partial(press_on_issue, "delete issue"), 48: merge, 49: follow, 50: invite,
    61: phone, 62: partial(route_answer, "distance ([0-9]+) km"), 63: partial(route_answer, "time ([0-9]+) minutes"),
    64: save_place, 65: nearest, 66: best_rated, 67: plan_trip, 71: buy_bestseller, 72: post_to_issue,
    131: best_customer, 132: promote, 141: member_role, 142: change_role, 143: approve_as,
    161: remove_saved, 162: show_route, 163: nearer, 171: comment_phone,
    81: buy_three, 82: change_cart, 83: buy_alone, 84: add_most_in_stock, 85: comment_price, 86: count_items,
    87: set_accounts, 88: three_posts, 89: buy_instead, 90: buy_if, 91: post_and_bio,
    181: dearest_order, 182: post_total, 183: buy_several, 184: comment_on_most_votes}


def expert(task: dict, cot: bool = False):
    """A callable for one episode: observation -> (thought, action). With cot the thought is a long chain of thought, as
    the exercises of worlds/base write it."""
    page = Page()
    told = []  # the steps so far
    voice = Voice(Random(f"voice {task['task_id']}"))
    script = SCRIPTS[task["intent_template_id"]](page, **task["instantiation_dict"])
    wanted = named_in(task["intent"], map(str, task["instantiation_dict"].values()))

    def act(observation: str) -> tuple[str, str]:
        page.text = observation
        thought, action = next(script, done())
        said = thought
        if cot:
            moment = Moment(observation, thought, action, task["intent"], wanted)
            said = voice.think(moment, told)
        told.append(step_of(thought))
        return said, action

    return act
