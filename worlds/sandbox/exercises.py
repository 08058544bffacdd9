"""The exercises that pre-train the small base model: reading a page, and finding the way around a website.

There are two kinds of exercise. One asks about a single page of random content: find these
elements, write this text into that field, quote what is next to a name, say whether it is there at
all. The other is a visit to a small made-up website with sections, entries, labels and buttons:
read a fact, fill in a form, press a button, recover from a mistake. Pages follow the observations
of rollout.py and responses its action grammar, so what is learned is reading, copying and finding
the way. None of the sandbox's sites, tasks or demonstrations occurs. Rows are trajectory records,
which bc.py trains on as they are:

    python -m worlds.sandbox.exercises --rows 14000 --size 4 --words 1 --visits 0 --seed 1 > small.jsonl
    python -m worlds.sandbox.exercises --rows 24000 > rows.jsonl

Responses come in three manners, which the system prompt names (vocabulary.MANNERS): a short
thought, none, a long chain of thought. Histories come compressed and whole. A row says under
"agent" how it is written, as agent.json says it for a checkpoint, so `--agent long` prints the
agent.json that makes a checkpoint think at length.

Six choices make look-up learnable for a model of this size, from plain random weights. Names on a
page share their words, so that no single word identifies one. Queries are drawn with replacement,
so that "not answered yet" is no clue. Ids often are random numbers, so that counting elements does
not replace reading. Text and id stand side by side in observation and response. The first pages are
small, and their names are one token. Thoughts follow from task and page, and quote what the action
needs right before it, so that acting is copying.
"""
import argparse
import json
from pathlib import Path
from random import Random

from .vocabulary import (BUTTONS, FACTS, FIELDS, FILLERS, LINKS, MANNERS, MARKS, MENUS,
                         STATES, agent, write_base)
from .websites import visit
from .words import ADJECTIVES, CATEGORIES, FORUMS, NAMES
from .writing import (Element, Moment, Voice, act, click, draw, element_line, maybe, name_maker,
                      number, phrase, quoted, say, some_value, written)

SHORT_NAMES = NAMES + FORUMS + list(CATEGORIES)


# ---- one page


class Sheet:
    """A page of random blocks.

    Element names are unique, so that an instruction can mean one thing only.
    """

    def __init__(self, rng: Random, size: int, words: int = 2):
        self.rng = rng
        self.size = size
        self.name = name_maker(rng, size, words)
        self.elements: list[Element] = []
        self.facts: dict[str, str] = {}
        self.names: set[str] = set()

        if rng.random() < 0.6:
            ids = list(range(100))
        else:
            ids = rng.sample(range(100), 100)
        first = rng.choice((0, 0, 3, 20))
        self.numbers = iter(ids[first:])

        if words == 1:
            self.lines = self.bare_names()
        else:
            self.lines = self.blocks()

    def bare_names(self) -> list[str]:
        """Links and buttons whose names are one token, and nothing else."""
        lines = []
        while len(self.elements) < self.size:
            kind = self.rng.choice(("a", "button"))
            line = self.element(kind, self.name())
            if line:
                lines.append(line)
        return lines

    def blocks(self) -> list[str]:
        """A title, a navigation, a heading, and blocks until the page has its size."""
        rng = self.rng
        titles = (self.name(), rng.choice(LINKS), rng.choice(SHORT_NAMES))
        title = rng.choice(titles)
        lines = [f"title: {title}"]
        lines += self.navigation()
        heading = rng.choice((title, title, self.name()))
        lines.append(f"# {heading}")

        makers = [
            self.links,
            self.links,
            self.table,
            self.fields,
            self.facts_block,
            self.prose,
            self.buttons,
        ]
        while len(self.elements) < self.size:
            make = rng.choice(makers)
            lines += make()
        if rng.random() < 0.5:
            lines += self.facts_block()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def element(self, kind: str, name: str, value="",
                options: tuple = (), beside="") -> str:
        """Adds an element and returns its text, or "" if its name is taken."""
        if name in self.names:
            return ""
        self.names.add(name)
        if kind in ("a", "button") and self.rng.random() < 0.05:
            value = self.rng.choice(MARKS)

        added = Element(kind, name, value, options, beside, number=next(self.numbers))
        self.elements.append(added)
        return added.html()

    def navigation(self) -> list[str]:
        rng = self.rng
        count = rng.randint(0, 5)
        links = [self.element("a", label) for label in rng.sample(LINKS, count)]
        lines = [" ".join(links)]
        if rng.random() < 0.4:
            search = self.element("input", "search")
            go = self.element("button", "go")
            lines.append(f"{search} {go}")
        return [line for line in lines if line]

    def links(self) -> list[str]:
        """A list, plain or with something beside each entry."""
        rng = self.rng
        kind = rng.choice(("a", "a", "a", "button"))
        style = rng.choice(("plain", "beside", "beside", "short", "number"))

        lines = []
        for _ in range(rng.randint(2, 8)):
            beside = ""
            if style in ("beside", "number"):
                beside = some_value(rng)
            line = self.element(kind, self.entry_name(style), beside=beside)
            if line:
                lines.append(line)

        in_one_line = style == "short" and rng.random() < 0.5
        if in_one_line and lines:
            return [" ".join(lines)]
        return lines

    def entry_name(self, style: str) -> str:
        """A name for an entry of a list in this style."""
        if style == "short":
            return self.rng.choice(SHORT_NAMES)
        if style == "number":
            thing = self.rng.choice(("order", "issue", "ticket", "room"))
            return f"{thing} {number(self.rng)}"
        return self.name()

    def table(self) -> list[str]:
        """Rows whose last cell names the row's name again.

        'remove red lamp' is another element than 'red lamp'.
        """
        rng = self.rng
        verb = rng.choice(("remove", "edit", "delete", "view", "buy"))
        kind = rng.choice(("a", "input"))
        count = rng.randint(1, 4)
        names = [self.name() for _ in range(count)]

        lines = []
        for name in dict.fromkeys(names):
            if name in self.names:
                continue
            value = ""
            if kind == "input":
                value = str(rng.randint(1, 9))
            first = self.element(kind, name, value)

            if rng.random() < 0.7:
                last = self.element("button", f"{verb} {name}")
            else:
                last = rng.choice(STATES)

            state = rng.choice(STATES)
            detail = some_value(rng)
            lines.append(" | ".join((first, state, detail, last)))
        return lines

    def fields(self) -> list[str]:
        """A form: text fields, sometimes a menu and a checkbox, and a button."""
        rng = self.rng
        lines = []
        count = rng.randint(1, 3)
        for name in rng.sample(FIELDS, count):
            kind = rng.choice(("input", "input", "textarea"))
            value = maybe(rng, 0.5, phrase(rng))
            lines.append(self.element(kind, name, value))

        if rng.random() < 0.5:
            name = rng.choice(sorted(MENUS))
            words = MENUS[name].split()
            count = rng.randint(2, min(6, len(words)))
            options = rng.sample(words, count)
            value = rng.choice(options)
            lines.append(self.element("select", name, value, tuple(options)))

        if rng.random() < 0.2:
            name = rng.choice(("gift wrap", "newsletter", self.name()))
            value = rng.choice(("on", "off"))
            lines.append(self.element("checkbox", name, value))

        label = rng.choice(BUTTONS)
        lines.append(self.element("button", label))
        return [line for line in lines if line]

    def facts_block(self) -> list[str]:
        """Lines of a label and its value, which are no elements."""
        lines = []
        count = self.rng.randint(1, 4)
        for label in self.rng.sample(FACTS, count):
            if label in self.facts or label in self.names:
                continue
            value = some_value(self.rng)
            self.facts[label] = value
            lines.append(f"{label} {value}")
        return lines

    def prose(self) -> list[str]:
        """Text that mentions names without being their element."""
        rng = self.rng
        lines = (
            f"the {self.name()} and the {self.name()}",
            f"## {rng.choice(LINKS)}",
            f"{rng.choice(NAMES)} : too {rng.choice(ADJECTIVES)} for me",
            f"{rng.randint(0, 20)} found for {self.name()}",
        )
        return [rng.choice(lines)]

    def buttons(self) -> list[str]:
        """One line with one or two buttons."""
        count = self.rng.randint(1, 2)
        texts = [self.element("button", label) for label in self.rng.sample(BUTTONS, count)]
        shown = [text for text in texts if text]
        if not shown:
            return []
        return [" ".join(shown)]


def has_value(e: Element) -> bool:
    return bool(e.value)


def has_something_beside(e: Element) -> bool:
    return bool(e.beside)


def starts_with_adjective(name: str) -> bool:
    """As two-word names do, and labels do not."""
    return name.split()[0] in ADJECTIVES


def all_names(elements: list[Element]) -> str:
    return " and ".join(e.name for e in elements)


class Exercise:
    """One instruction about one page, and its response.

    Lists ask about several things at once, one comment line each: a page is long and an answer
    short, so they carry most of the signal. The others answer in full, in the form that actions have.

    Each kind of exercise is a method. It returns the task, what the task names, and the response,
    which is (thought, action).
    """

    def __init__(self, rng: Random, size: int, kind: str, words: int = 2):
        self.rng = rng
        self.size = size
        self.words = words
        self.new_sheet()

        make = getattr(self, kind)
        self.task, self.wanted, response = make()
        self.thought, self.action = response

    def new_sheet(self):
        smallest = min(3, self.size)
        size = self.rng.randint(smallest, self.size)
        self.sheet = Sheet(self.rng, size, self.words)

    @property
    def moment(self) -> Moment:
        return Moment(self.sheet.text, self.thought, self.action, self.task, self.wanted)

    def fitting(self, kinds="a button input textarea select checkbox", test=None) -> list[Element]:
        """The elements that an exercise can be about; draws pages until there are some.

        Two-word names outweigh labels.
        """
        fit = self.matching(kinds, test)
        while not fit:
            self.new_sheet()
            fit = self.matching(kinds, test)

        names = [e for e in fit if starts_with_adjective(e.name)]
        if names and self.rng.random() < 0.6:
            return names
        return fit

    def matching(self, kinds: str, test) -> list[Element]:
        """The page's elements of these kinds that pass the test."""
        found = [e for e in self.sheet.elements if e.kind in kinds.split()]
        if test:
            found = [e for e in found if test(e)]
        return found

    def element(self, *args, **kw) -> Element:
        fit = self.fitting(*args, **kw)
        return self.rng.choice(fit)

    def several(self, *args, **kw) -> list[Element]:
        """Three to eight elements, drawn with replacement; fewer on a page with few of them."""
        fit = self.fitting(*args, **kw)
        count = self.rng.randint(3, 8)
        if self.words > 1:
            count = min(count, 1 + len(fit))
        return self.rng.choices(fit, k=count)

    def absent(self) -> str:
        """A name that shares its words with those on the page, more often than not."""
        makers = (self.sheet.name, self.sheet.name, name_maker(self.rng, 4))
        while True:
            make = self.rng.choice(makers)
            name = make()
            if name not in self.sheet.names:
                return name

    def name_or_absent(self, e: Element) -> str:
        """The element's name, or as often one that is not on the page."""
        if self.rng.random() < 0.5:
            return e.name
        return self.absent()

    def labels(self) -> list[str]:
        """The labels of the page's facts; draws pages until there are some."""
        while not self.sheet.facts:
            self.new_sheet()
        return sorted(self.sheet.facts)

    def filler(self, most: int) -> str:
        """Up to this many filler words, each with a space after it."""
        count = self.rng.randint(0, most)
        words = self.rng.choices(FILLERS, k=count)
        return "".join(f"{word} " for word in words)

    def tail(self) -> str:
        """What follows the last word of an instruction.

        With it, names come with and without a space after them.
        """
        words = " " + self.filler(4)
        return maybe(self.rng, 0.7, words.rstrip())

    def call(self, name: str) -> str:
        """A two-word name in an instruction, mostly with words before it.

        What marks a name must be that it is one, and that it stands in the task, not which word it
        follows.
        """
        if starts_with_adjective(name) and self.rng.random() < 0.8:
            return f"{self.filler(3)}{name}"
        return name

    # lists
    def find_all(self, task: str, found: list[Element]):
        lines = [element_line(e) for e in found]
        lines.append(f'do(action="Click", element="{found[-1].number}")')
        response = "\n".join(lines)
        return f"find {task}", [], ("find all", response)

    def note_all(self, task: str, notes: list[str]):
        lines = [f"# Note: {each}" for each in notes]
        lines.append('exit(message="done")')
        response = "\n".join(lines)
        return f"note {task}", [], ("note all", response)

    def find(self):
        chosen = self.several()
        return self.find_all(all_names(chosen), chosen)

    def find_else(self):
        """Is it there? If not, the other one."""
        chosen = self.several()
        names = [self.name_or_absent(e) for e in chosen]
        others = [self.element() for _ in chosen]

        tasks = []
        found = []
        for e, name, other in zip(chosen, names, others):
            tasks.append(f"{name} else {other.name}")
            found.append(e if name == e.name else other)
        return self.find_all(" and ".join(tasks), found)

    def notes_beside(self):
        chosen = self.several(test=has_something_beside)
        task = f"what stands beside {all_names(chosen)}"
        notes = [f"{e.title} {e.beside}" for e in chosen]
        return self.note_all(task, notes)

    def notes_values(self):
        chosen = self.several(test=has_value)
        task = f"the value of {all_names(chosen)}"
        notes = [f"{e.title} = {e.value}" for e in chosen]
        return self.note_all(task, notes)

    def notes_facts(self):
        chosen = self.rng.choices(self.labels(), k=4)
        task = "the " + " and ".join(chosen)
        notes = [f"{label} {self.sheet.facts[label]}" for label in chosen]
        return self.note_all(task, notes)

    def notes_present(self):
        names = [self.name_or_absent(e) for e in self.several()]
        task = "whether " + " and ".join(names) + " are here"
        notes = [f"{name} {self.yes_or_no(name)}" for name in names]
        return self.note_all(task, notes)

    def yes_or_no(self, name: str) -> str:
        """Whether an element of this name is on the page."""
        return "yes" if name in self.sheet.names else "no"

    # in full
    def point(self):
        e = self.element()
        task = f"point at {self.call(e.name)}{self.tail()}"
        return task, [e.name], click(e)

    def point_else(self):
        e = self.element()
        other = self.element()
        name = self.name_or_absent(e)
        task = f"point at {self.call(name)} else at {self.call(other.name)}{self.tail()}"
        target = e if name == e.name else other
        return task, [name, other.name], click(target)

    def type(self):
        e = self.element("input textarea")
        text = phrase(self.rng)
        words = quoted(self.rng, text)
        into = f"{self.call(e.name)}{self.tail()}"
        if self.rng.random() < 0.3:
            task = f"look up {words} in {into}"
            response = act(f"search for {text}", "Search", e, text)
        else:
            task = f"write {words} into {into}"
            response = act(f"type {text} into {e.name}", "Type", e, text)
        return task, [text, e.name], response

    def choose(self):
        e = self.element("select")
        option = self.rng.choice(e.options)
        task = f"pick {quoted(self.rng, option)} as {e.name}{self.tail()}"
        response = act(f"choose {option} as {e.name}", "Select Dropdown Option", e, option)
        return task, [option, e.name], response

    def fact(self):
        label = self.rng.choice(self.labels())
        value = self.sheet.facts[label]
        task = f"say the {label}{self.tail()}"
        return task, [label], say(value, f"{label} {value}")

    def beside(self):
        e = self.element(test=has_something_beside)
        task = f"say what stands beside {self.call(e.name)}{self.tail()}"
        return task, [e.name], say(e.beside, f"{e.title} {e.beside}")

    def value(self):
        e = self.element(test=has_value)
        task = f"say the value of {self.call(e.name)}{self.tail()}"
        return task, [e.name], say(e.value, f"{e.title} = {e.value}")

    def present(self):
        if self.rng.random() < 0.5:
            name = self.element().name
        else:
            name = self.absent()
        task = f"say whether {self.call(name)} is here"
        return task, [name], say(self.yes_or_no(name))

    def repeat(self):
        text = phrase(self.rng)
        task = f'say "{text}"{self.tail()}'
        return task, [text], say(text)


# How often each kind of exercise is drawn.
LISTS = {
    "find": 20,
    "find_else": 12,
    "notes_beside": 7,
    "notes_values": 4,
    "notes_facts": 4,
    "notes_present": 4,
}
FULL = {
    "point": 8,
    "point_else": 6,
    "type": 14,
    "choose": 6,
    "fact": 5,
    "beside": 5,
    "value": 2,
    "present": 4,
    "repeat": 4,
}
FIRST = {  # what is asked about pages whose names are one token
    "find": 3,
    "point": 1,
}

SHARES = {  # of the manners
    "short": 50,
    "none": 25,
    "long": 25,
}
WHOLE = 0.3  # share of whole histories among those of several turns


# ---- records


def exercise(rng: Random, size: int = 18,
             kind: str | None = None,
             visits: float = 0.5, words: int = 2,
             manner: str | None = None,
             compress: bool | None = None) -> dict:
    """One record: a visit, or one to four pages with an instruction each.

    All instructions stand in the task, and the history tells whose turn it is. That history holds
    names with stale ids.
    """
    if not manner:
        manner = draw_manner(rng, words)

    if kind is None and rng.random() < visits:
        kind = "visit"
    if kind == "visit":
        visited = visit(rng)
        return record(rng, "visit", visited.task, visited.moments, manner, compress)

    kinds = [kind]
    if kind is None:
        kinds = draw_kinds(rng, words, manner)
    done = [Exercise(rng, size, each, words) for each in kinds]

    template = "+".join(kinds)
    intent = " , then ".join(one.task for one in done)
    moments = [one.moment for one in done]
    return record(rng, template, intent, moments, manner, compress)


def draw_manner(rng: Random, words: int) -> str:
    """A manner of response. While names are of one word, thoughts are not yet long."""
    shares = dict(SHARES)
    if words == 1:
        del shares["long"]
    return draw(rng, shares)


def draw_kinds(rng: Random, words: int, manner: str) -> list[str]:
    """One kind of exercise, or sometimes two to four of those that are answered in full."""
    if words == 1:
        return [draw(rng, FIRST)]

    shares = LISTS | FULL
    if manner == "long":
        shares = FULL  # lists ask for much, and leave no room for a long thought
    kinds = [draw(rng, shares)]
    if rng.random() < 0.1:
        count = rng.randint(2, 4)
        kinds = [draw(rng, FULL) for _ in range(count)]
    return kinds


def record(rng: Random, template: str, intent: str,
           moments: list[Moment], manner: str = "short",
           compress: bool | None = None) -> dict:
    """Moments as a trajectory, written in one manner by one voice.

    `compress`: whether pages leave the history. If it is None, that is drawn.
    """
    if compress is None:
        whole = len(moments) > 1 and rng.random() < WHOLE
        compress = not whole
    voice = Voice(rng)
    return {
        "task_id": 0,
        "sites": ["exercise"],
        "template": template,
        "reward": 1.0,
        "intent": intent,
        "agent": agent(manner, compress),
        "turns": written(moments, manner, voice),
    }


def exercises(seed: int, size: int = 18,
              visits: float = 0.5, words: int = 2):
    """Endless and reproducible."""
    rng = Random(f"exercises {seed}")
    while True:
        yield exercise(rng, size, visits=visits, words=words)


def main():
    parser = argparse.ArgumentParser(description="Exercises for the small base model, and its tokenizer.")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path,
                        help="write tokenizer and config files into DIR")
    parser.add_argument("--agent", choices=MANNERS,
                        help="print the agent.json of a checkpoint that thinks in this manner")
    parser.add_argument("--whole", action="store_true",
                        help="in that agent.json: pages stay in the history")
    parser.add_argument("--rows", type=int, default=0,
                        help="print this many exercises, one JSON line each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=18,
                        help="elements of the largest single pages")
    parser.add_argument("--words", type=int, choices=(1, 2), default=2,
                        help="of a name; 1: pages hold names and nothing else")
    parser.add_argument("--visits", type=float, default=0.5,
                        help="share of exercises that are played on a website")
    args = parser.parse_args()

    if args.tokenizer:
        count = write_base(args.tokenizer, args.seed)
        print(f"{args.tokenizer}/tokenizer.json: {count} tokens")
    if args.agent:
        settings = agent(args.agent, not args.whole)
        print(json.dumps(settings))

    source = exercises(args.seed, args.size, args.visits, args.words)
    for _ in range(args.rows):
        print(json.dumps(next(source)))


if __name__ == "__main__":
    main()
