"""The exercises that pre-train the small base model: reading a page, and finding the way around a website.

There are two kinds of exercise. One asks about a single page of random content: find these elements, write this text into
that field, quote what is next to a name, say whether it is there at all. The other is a visit to a small made-up website
with sections, entries, labels and buttons: read a fact, fill in a form, press a button, recover from a mistake. Pages
follow the observations of rollout.py and responses its action grammar, so what is learned is reading, copying and finding
the way. None of the sandbox's sites, tasks or demonstrations occurs. Rows are trajectory records, which bc.py
trains on as they are:

    python -m worlds.sandbox.exercises --rows 14000 --size 4 --words 1 --visits 0 --seed 1 > small.jsonl
    python -m worlds.sandbox.exercises --rows 24000 > rows.jsonl

Responses come in three manners, which the system prompt names (vocabulary.MANNERS): a short thought, none, a long chain of
thought. Histories come compressed and whole. A row says under "agent" how it is written, as agent.json says it for a
checkpoint, so `--agent long` prints the agent.json that makes a checkpoint think at length.

Six choices make look-up learnable for a model of this size, from plain random weights. Names on a page share their words,
so that no single word identifies one. Queries are drawn with replacement, so that "not answered yet" is no clue. Ids often
are random numbers, so that counting elements does not replace reading. Text and id stand side by side in observation and
response. The first pages are small, and their names are one token. Thoughts follow from task and page, and quote what the
action needs right before it, so that acting is copying.
"""
import argparse
import json
from pathlib import Path
from random import Random

from .vocabulary import BUTTONS, FACTS, FIELDS, FILLERS, LINKS, MANNERS, MARKS, MENUS, STATES, agent, write_base
from .websites import visit
from .words import ADJECTIVES, CATEGORIES, FORUMS, NAMES
from .writing import (Element, Moment, Voice, act, click, draw, element_line, maybe, name_maker, number, phrase, quoted, say,
                      some_value, written)


# ---- one page


class Sheet:
    """A page of random blocks. Element names are unique, so that an instruction can mean one thing only."""

    def __init__(self, rng: Random, size: int, words: int = 2):
        self.rng, self.size, self.name = rng, size, name_maker(rng, size, words)
        self.elements: list[Element] = []
        self.facts: dict[str, str] = {}
        self.names: set[str] = set()
        numbers = list(range(100)) if rng.random() < 0.6 else rng.sample(range(100), 100)
        self.numbers = iter(numbers[rng.choice((0, 0, 3, 20)):])
        if words == 1:
            self.lines = []  # names of one token and nothing else
            while len(self.elements) < size:
                self.lines += [line for line in [self.element(rng.choice(("a", "button")), self.name())] if line]
            return
        title = rng.choice((self.name(), rng.choice(LINKS), rng.choice(NAMES + FORUMS + list(CATEGORIES))))
        self.lines = [f"title: {title}", *self.navigation(), f"# {rng.choice((title, title, self.name()))}"]
        blocks = [self.links, self.links, self.table, self.fields, self.facts_block, self.prose, self.buttons]
        while len(self.elements) < size:
            self.lines += rng.choice(blocks)()
        if rng.random() < 0.5:
            self.lines += self.facts_block()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def element(self, kind: str, name: str, value="", options: tuple = (), beside="") -> str:
        if name in self.names:
            return ""
        self.names.add(name)
        if kind in ("a", "button") and self.rng.random() < 0.05:
            value = self.rng.choice(MARKS)
        self.elements.append(Element(kind, name, value, options, beside, number=next(self.numbers)))
        return self.elements[-1].html()

    def navigation(self) -> list[str]:
        rng = self.rng
        lines = [" ".join(self.element("a", each) for each in rng.sample(LINKS, rng.randint(0, 5)))]
        if rng.random() < 0.4:
            lines.append(f'{self.element("input", "search")} {self.element("button", "go")}')
        return [line for line in lines if line]

    def links(self) -> list[str]:
        """A list, plain or with something beside each entry."""
        rng = self.rng
        kind, style = rng.choice("aaab").replace("b", "button"), rng.choice("plain beside beside short number".split())
        makers = {"short": lambda: rng.choice(NAMES + FORUMS + list(CATEGORIES)),
                  "number": lambda: f"{rng.choice('order issue ticket room'.split())} {number(rng)}"}
        lines = []
        for _ in range(rng.randint(2, 8)):
            beside = "" if style in ("plain", "short") else some_value(rng)
            lines.append(self.element(kind, makers.get(style, self.name)(), beside=beside))
        lines = [line for line in lines if line]
        return [" ".join(lines)] if style == "short" and rng.random() < 0.5 and lines else lines

    def table(self) -> list[str]:
        """Rows whose last cell names the row's name again: 'remove red lamp' is another element than 'red lamp'."""
        rng, lines = self.rng, []
        verb, kind = rng.choice(("remove", "edit", "delete", "view", "buy")), rng.choice(("a", "input"))
        for name in {self.name(): None for _ in range(rng.randint(1, 4))}:
            if name in self.names:
                continue
            first = self.element(kind, name, str(rng.randint(1, 9)) if kind == "input" else "")
            last = self.element("button", f"{verb} {name}") if rng.random() < 0.7 else rng.choice(STATES)
            lines.append(" | ".join([first, rng.choice(STATES), some_value(rng), last]))
        return lines

    def fields(self) -> list[str]:
        rng, lines = self.rng, []
        for name in rng.sample(FIELDS, rng.randint(1, 3)):
            lines.append(self.element(rng.choice(("input", "input", "textarea")), name, maybe(rng, 0.5, phrase(rng))))
        if rng.random() < 0.5:
            name = rng.choice(sorted(MENUS))
            words = MENUS[name].split()
            words = rng.sample(words, rng.randint(2, min(6, len(words))))
            lines.append(self.element("select", name, rng.choice(words), tuple(words)))
        if rng.random() < 0.2:
            name = rng.choice(("gift wrap", "newsletter", self.name()))
            lines.append(self.element("checkbox", name, rng.choice(("on", "off"))))
        return [line for line in lines + [self.element("button", rng.choice(BUTTONS))] if line]

    def facts_block(self) -> list[str]:
        lines = []
        for label in self.rng.sample(FACTS, self.rng.randint(1, 4)):
            if label not in self.facts and label not in self.names:
                self.facts[label] = some_value(self.rng)
                lines.append(f"{label} {self.facts[label]}")
        return lines

    def prose(self) -> list[str]:
        """Text that mentions names without being their element."""
        rng = self.rng
        return [rng.choice((f"the {self.name()} and the {self.name()}", f"## {rng.choice(LINKS)}",
                            f"{rng.choice(NAMES)} : too {rng.choice(ADJECTIVES)} for me",
                            f"{rng.randint(0, 20)} found for {self.name()}"))]

    def buttons(self) -> list[str]:
        shown = [self.element("button", each) for each in self.rng.sample(BUTTONS, self.rng.randint(1, 2))]
        return [" ".join(each for each in shown if each)] if any(shown) else []


class Exercise:
    """One instruction about one page, and its response. Lists ask about several things at once, one comment line each: a page
    is long and an answer short, so they carry most of the signal. The others answer in full, in the form that actions have.
    """

    def __init__(self, rng: Random, size: int, kind: str, words: int = 2):
        self.rng, self.size, self.words = rng, size, words
        self.new_sheet()
        self.task, self.wanted, (self.thought, self.action) = getattr(self, kind)()

    def new_sheet(self):
        self.sheet = Sheet(self.rng, self.rng.randint(min(3, self.size), self.size), self.words)

    @property
    def moment(self) -> Moment:
        return Moment(self.sheet.text, self.thought, self.action, self.task, self.wanted)

    def fitting(self, kinds="a button input textarea select checkbox", test=lambda e: True) -> list[Element]:
        """The elements that an exercise can be about; draws pages until there are some. Two-word names outweigh labels."""
        while not (fit := [e for e in self.sheet.elements if e.kind in kinds.split() and test(e)]):
            self.new_sheet()
        names = [e for e in fit if e.name.split()[0] in ADJECTIVES]
        return names if names and self.rng.random() < 0.6 else fit

    def element(self, *args, **kw) -> Element:
        return self.rng.choice(self.fitting(*args, **kw))

    def several(self, *args, **kw) -> list[Element]:
        fit = self.fitting(*args, **kw)
        most = 1 + len(fit) if self.words > 1 else 8
        return self.rng.choices(fit, k=min(self.rng.randint(3, 8), most))

    def absent(self) -> str:
        """A name that shares its words with those on the page, more often than not."""
        makers = (self.sheet.name, self.sheet.name, name_maker(self.rng, 4))
        while (name := self.rng.choice(makers)()) in self.sheet.names:
            pass
        return name

    def labels(self) -> list[str]:
        while not self.sheet.facts:
            self.new_sheet()
        return sorted(self.sheet.facts)

    def filler(self, most: int) -> str:
        return "".join(f"{word} " for word in self.rng.choices(FILLERS, k=self.rng.randint(0, most)))

    def tail(self) -> str:
        """Behind the last word of an instruction, so that names come with and without a space after them."""
        return maybe(self.rng, 0.7, (" " + self.filler(4)).rstrip())

    def call(self, name: str) -> str:
        """A two-word name in an instruction, mostly with words around it: what marks a name must be that it is one, and
        that it stands in the task, not which word it follows."""
        return f"{self.filler(3)}{name}" if name.split()[0] in ADJECTIVES and self.rng.random() < 0.8 else name

    # lists
    def find_all(self, task: str, found: list[Element]):
        call = f'do(action="Click", element="{found[-1].number}")'
        return f"find {task}", [], ("find all", "\n".join([*map(element_line, found), call]))

    def note_all(self, task: str, notes: list[str]):
        lines = "\n".join(f"# Note: {each}" for each in notes)
        return f"note {task}", [], ("note all", f'{lines}\nexit(message="done")')

    def find(self):
        chosen = self.several()
        return self.find_all(" and ".join(e.name for e in chosen), chosen)

    def find_else(self):
        """Is it there? If not, the other one."""
        pairs = [(e.name, e) if self.rng.random() < 0.5 else (self.absent(), e) for e in self.several()]
        others = [self.element() for _ in pairs]
        tasks = [f"{name} else {other.name}" for (name, _), other in zip(pairs, others)]
        return self.find_all(" and ".join(tasks), [e if name == e.name else o for (name, e), o in zip(pairs, others)])

    def notes_beside(self):
        chosen = self.several(test=lambda e: e.beside)
        return self.note_all("what stands beside " + " and ".join(e.name for e in chosen),
                             [f"{e.title} {e.beside}" for e in chosen])

    def notes_values(self):
        chosen = self.several(test=lambda e: e.value)
        return self.note_all("the value of " + " and ".join(e.name for e in chosen),
                             [f"{e.title} = {e.value}" for e in chosen])

    def notes_facts(self):
        chosen = self.rng.choices(self.labels(), k=4)
        return self.note_all("the " + " and ".join(chosen), [f"{label} {self.sheet.facts[label]}" for label in chosen])

    def notes_present(self):
        names = [e.name if self.rng.random() < 0.5 else self.absent() for e in self.several()]
        return self.note_all("whether " + " and ".join(names) + " are here",
                             [f"{name} {'yes' if name in self.sheet.names else 'no'}" for name in names])

    # in full
    def point(self):
        e = self.element()
        return f"point at {self.call(e.name)}{self.tail()}", [e.name], click(e)

    def point_else(self):
        e, other = self.element(), self.element()
        name = e.name if self.rng.random() < 0.5 else self.absent()
        task = f"point at {self.call(name)} else at {self.call(other.name)}{self.tail()}"
        return task, [name, other.name], click(e if name == e.name else other)

    def type(self):
        e, text = self.element("input textarea"), phrase(self.rng)
        words, into = quoted(self.rng, text), f"{self.call(e.name)}{self.tail()}"
        if self.rng.random() < 0.3:
            return f"look up {words} in {into}", [text, e.name], act(f"search for {text}", "Search", e, text)
        return f"write {words} into {into}", [text, e.name], act(f"type {text} into {e.name}", "Type", e, text)

    def choose(self):
        e = self.element("select")
        option = self.rng.choice(e.options)
        task = f"pick {quoted(self.rng, option)} as {e.name}{self.tail()}"
        return task, [option, e.name], act(f"choose {option} as {e.name}", "Select Dropdown Option", e, option)

    def fact(self):
        label = self.rng.choice(self.labels())
        value = self.sheet.facts[label]
        return f"say the {label}{self.tail()}", [label], say(value, f"{label} {value}")

    def beside(self):
        e = self.element(test=lambda e: e.beside)
        return f"say what stands beside {self.call(e.name)}{self.tail()}", [e.name], say(e.beside, f"{e.title} {e.beside}")

    def value(self):
        e = self.element(test=lambda e: e.value)
        return f"say the value of {self.call(e.name)}{self.tail()}", [e.name], say(e.value, f"{e.title} = {e.value}")

    def present(self):
        name = self.element().name if self.rng.random() < 0.5 else self.absent()
        return f"say whether {self.call(name)} is here", [name], say("yes" if name in self.sheet.names else "no")

    def repeat(self):
        text = phrase(self.rng)
        return f'say "{text}"{self.tail()}', [text], say(text)


LISTS = {"find": 20, "find_else": 12, "notes_beside": 7, "notes_values": 4, "notes_facts": 4, "notes_present": 4}
FULL = {"point": 8, "point_else": 6, "type": 14, "choose": 6, "fact": 5, "beside": 5, "value": 2, "present": 4, "repeat": 4}


FIRST = {"find": 3, "point": 1}  # what is asked about pages whose names are one token

SHARES = {"short": 50, "none": 25, "long": 25}  # of the manners
WHOLE = 0.3                                     # of the histories of several turns


# ---- records


def exercise(rng: Random, size: int = 18, kind: str | None = None, visits: float = 0.5, words: int = 2,
             manner: str | None = None, compress: bool | None = None) -> dict:
    """One record: a visit, or one to four pages with an instruction each. All instructions stand in the task, and the
    history tells whose turn it is; that history holds names with stale ids.
    """
    shares = {name: share for name, share in SHARES.items() if words > 1 or name != "long"}
    manner = manner or draw(rng, shares)
    if kind == "visit" or kind is None and rng.random() < visits:
        visited = visit(rng)
        return record(rng, "visit", visited.task, visited.moments, manner, compress)
    lists = {} if manner == "long" else LISTS  # they ask for much, and leave no room for a long thought
    kinds = [kind or draw(rng, FIRST if words == 1 else lists | FULL)]
    if kind is None and words > 1 and rng.random() < 0.1:
        kinds = [draw(rng, FULL) for _ in range(rng.randint(2, 4))]
    done = [Exercise(rng, size, each, words) for each in kinds]
    return record(rng, "+".join(kinds), " , then ".join(e.task for e in done), [e.moment for e in done], manner, compress)


def record(rng: Random, template: str, intent: str, moments: list[Moment], manner: str = "short",
           compress: bool | None = None) -> dict:
    """Moments as a trajectory, written in one manner by one voice."""
    whole = len(moments) > 1 and rng.random() < WHOLE if compress is None else not compress
    return {"task_id": 0, "sites": ["exercise"], "template": template, "reward": 1.0, "intent": intent,
            "agent": agent(manner, not whole), "turns": written(moments, manner, Voice(rng))}


def exercises(seed: int, size: int = 18, visits: float = 0.5, words: int = 2):
    """Endless and reproducible."""
    rng = Random(f"exercises {seed}")
    while True:
        yield exercise(rng, size, visits=visits, words=words)


def main():
    parser = argparse.ArgumentParser(description="Exercises for the small base model, and its tokenizer.")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="write tokenizer and config files into DIR")
    parser.add_argument("--agent", choices=MANNERS, help="print the agent.json of a checkpoint that thinks in this manner")
    parser.add_argument("--whole", action="store_true", help="in that agent.json: pages stay in the history")
    parser.add_argument("--rows", type=int, default=0, help="print this many exercises, one JSON line each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=18, help="elements of the largest single pages")
    parser.add_argument("--words", type=int, choices=(1, 2), default=2, help="of a name; 1: pages hold names and nothing else")
    parser.add_argument("--visits", type=float, default=0.5, help="share of exercises that are played on a website")
    args = parser.parse_args()
    if args.tokenizer:
        print(f"{args.tokenizer}/tokenizer.json: {write_base(args.tokenizer, args.seed)} tokens")
    if args.agent:
        print(json.dumps(agent(args.agent, not args.whole)))
    source = exercises(args.seed, args.size, args.visits, args.words)
    for _ in range(args.rows):
        print(json.dumps(next(source)))


if __name__ == "__main__":
    main()
