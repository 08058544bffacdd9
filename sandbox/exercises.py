"""What the small base model learns before it meets a task: a vocabulary, and to read a page.

An exercise is a page of random content, an instruction, and the response: find these elements, write this text into that
field, say what stands beside a name, say whether it is there at all. Pages follow the compact observation of rollout.py and
responses its action grammar, so what is learned is reading and copying; none of the sandbox's sites, tasks or demonstrations
occurs, and the instructions' verbs (point at, write, pick, say) are not the tasks'. Rows are trajectory records, which bc.py trains on as they are:

    python -m sandbox.exercises --tokenizer sandbox/base             # tokenizer.json, tokenizer_config.json, agent.json
    python -m sandbox.exercises --rows 40000 --seed 0 > rows.jsonl   # exercises of 1 to 4 rounds each

Three choices make look-up learnable for a model of this size. Names on a page share their words, so that no single
word identifies one. Queries are drawn with replacement, so that "not answered yet" is no clue. Ids often are random
numbers, so that counting elements does not replace reading.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

from .words import ADJECTIVES, CATEGORIES, CITIES, FORUMS, MONTHS, NAMES, NOUNS, SCENERY, TOPICS

SYSTEM = "You browse the web."

# Labels of controls and facts as they occur on websites in general.
LINKS = """home|cart|orders|account|profile|log in|log out|new post|next page|previous page|edit account|edit profile|checkout|help|
about|settings|messages|users|projects|issues|new issue|wiki|map|search|posts|comments|reviews|products|customers|reports|
stores|sales|wishlist|compare|sign in|sign out|contact|back|details|view order|show all""".replace("\n", "").split("|")
BUTTONS = """go|save|send|continue|cancel|delete|submit|add to cart|update cart|place order|upvote|downvote|create post|edit|close|
reopen|assign|follow|subscribe|reset|apply|sort|filter|add comment|create issue|find route|write review|add to wishlist|merge|reply|confirm""".replace("\n", "").split("|")
FIELDS = """search|name|city|title|body|bio|comment|username|password|email|phone|street|country|message|note|subject|quantity|
description|from|to|label|address|url|tag|review|nickname|summary""".replace("\n", "").split("|")
FACTS = """price|stock|status|total|date|author|votes|rating|city|name|bio|shipping|number|items|owner|weight|
distance|color|points|views|size|answers|comments|followers|version""".replace("\n", "").split("|")
CHOICES = {"size": "small medium large", "shipping": "standard express pickup", "color": "red blue green black white",
           "sort": "newest oldest cheapest best", "status": "pending paid shipped delivered returned", "state": "open closed merged",
           "priority": "low normal high urgent", "forum": " ".join(FORUMS), "category": " ".join(CATEGORIES), "month": " ".join(MONTHS),
           "rating": "1 2 3 4 5", "country": " ".join(CITIES[:12])}
STATES = sorted({word for words in CHOICES.values() for word in words.split() if word.isalpha()})
# Words that no exercise needs but an instruction or a page may hold: each gets its tokens, an embedding can be learned later.
OTHER = """a add after all amount an and any are as ask at available be before begin best bought bought buy by can change cheapest
check choose chosen click costs did dollars does done down each else email empty error every exist exit false first for found get give
goes has have he her here his how i if in into is it item items know last least less list log look make many me more most much must my
need new newest no none not now of off oldest on one only open option or order other our out over page paid part pay people post posts
product put question read remove said say score see set she shop so step still store sum task than that the their them then there
these they thing think this those time today tomorrow too top true type under until up upvotes use user was way we were what when where
which who whose why will with within without word write wrong wrote yes yesterday you your nothing between most characters must again
department departments forum wanted write answer result results found vote voted sold person member owner times once twice both left right
commit branch file files repository request merge route walk drive car bike place near hotel station museum bridge minutes hours km
invoice customer guest admin revenue stock report catalog error failed success warning element note simplified html round web browse
system assistant""".split()


class Element(NamedTuple):
    kind: str
    name: str
    number: int
    value: str = ""      # what a control holds
    options: tuple = ()  # of a select
    beside: str = ""     # what stands behind it on its line

    def html(self) -> str:
        shown = f"{self.value} ({' | '.join(self.options)})" if self.options else self.value
        text = f"<{self.kind}>{self.name} {self.number}{shown and ' = ' + shown}</{self.kind}>"
        return f"{text} {self.beside}" if self.beside else text


# ---- content


def name_maker(rng: Random, size: int):
    """Draws two-word names from so few words that both words of a name occur in others."""
    firsts = rng.sample(ADJECTIVES, max(2, size // 2))
    seconds = rng.sample(NOUNS + TOPICS, max(2, size // 2 + 1))
    return lambda: f"{rng.choice(firsts)} {rng.choice(seconds)}"


def phrase(rng: Random) -> str:
    """A text to type: one to three words, or a number."""
    return rng.choice((lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}", lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS + TOPICS)}",
                       lambda: rng.choice(NAMES + CITIES + ADJECTIVES + SCENERY), lambda: str(rng.randint(1, 99)),
                       lambda: " ".join(rng.sample(ADJECTIVES + SCENERY + TOPICS + OTHER, 3))))()


def some_value(rng: Random) -> str:
    """What stands beside a name or behind a label."""
    return rng.choice((lambda: f"${rng.randint(1, 199)}", lambda: f"${rng.randint(1, 99)}", lambda: str(rng.randint(0, 99)),
                       lambda: rng.choice(STATES), lambda: f"{rng.randint(1, 31)} {rng.choice(MONTHS)}",
                       lambda: rng.choice(NAMES + CITIES), lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}"))()


class Sheet:
    """A page under construction. Element names are unique, so that an instruction can mean one thing only."""

    def __init__(self, rng: Random, size: int):
        self.rng, self.size, self.name = rng, size, name_maker(rng, size)
        self.elements: list[Element] = []
        self.facts: dict[str, str] = {}
        self.names: set[str] = set()
        numbers = list(range(100)) if rng.random() < 0.6 else rng.sample(range(100), 100)
        self.numbers = iter(numbers[rng.choice((0, 0, 3, 20)):])
        self.title = rng.choice((self.name(), rng.choice(LINKS), rng.choice(NAMES + FORUMS + list(CATEGORIES))))
        self.lines = [f"<title>{self.title}</title>", *self.navigation(), f"<h1>{rng.choice((self.title, self.title, self.name()))}</h1>"]
        blocks = [self.links, self.links, self.table, self.fields, self.facts_block, self.prose, self.buttons]
        while len(self.elements) < size:
            self.lines += rng.choice(blocks)()
        if rng.random() < 0.5:
            self.lines += self.facts_block()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def element(self, kind: str, name: str, value: str = "", options: tuple = (), beside: str = "") -> str:
        if name in self.names:
            return ""
        self.names.add(name)
        self.elements.append(Element(kind, name, next(self.numbers), value, options, beside))
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
        kind = rng.choice(("a", "a", "a", "button"))
        style = rng.choice(("plain", "beside", "beside", "short", "number"))
        lines = []
        for _ in range(rng.randint(2, 8)):
            name = {"short": lambda: rng.choice(NAMES + FORUMS + list(CATEGORIES)),
                    "number": lambda: f"{rng.choice(('order', 'issue'))} {rng.randint(10, 99)}"}.get(style, self.name)()
            lines.append(self.element(kind, name, beside="" if style in ("plain", "short") else some_value(rng)))
        lines = [line for line in lines if line]
        return [" ".join(lines)] if style == "short" and rng.random() < 0.5 and lines else lines

    def table(self) -> list[str]:
        """Rows whose last cell names the row's name again: 'remove red lamp' is another element than 'red lamp'."""
        rng, lines = self.rng, []
        verb, kind = rng.choice(("remove", "edit", "delete", "view", "buy")), rng.choice(("a", "input"))
        for _ in range(rng.randint(1, 4)):
            name = self.name()
            if name in self.names:
                continue
            first = self.element(kind, name, str(rng.randint(1, 9)) if kind == "input" else "")
            last = self.element("button", f"{verb} {name}") if rng.random() < 0.7 else rng.choice(STATES)
            lines.append(" | ".join([first, rng.choice(STATES), some_value(rng), last]))
        return lines

    def fields(self) -> list[str]:
        rng, lines = self.rng, []
        for name in rng.sample(FIELDS, rng.randint(1, 3)):
            lines.append(self.element(rng.choice(("input", "input", "textarea")), name, rng.choice(("", phrase(rng)))))
        if rng.random() < 0.5:
            name = rng.choice(sorted(CHOICES))
            options = CHOICES[name].split()
            options = rng.sample(options, rng.randint(2, min(6, len(options))))
            lines.append(self.element("select", name, rng.choice(options), tuple(options)))
        if rng.random() < 0.2:
            lines.append(self.element("checkbox", rng.choice(("gift wrap", "newsletter", self.name())), rng.choice(("on", "off"))))
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
        return [rng.choice((f"the {self.name()} and the {self.name()}", f"<h2>{rng.choice(LINKS)}</h2>",
                            f"{rng.choice(NAMES)} : too {rng.choice(ADJECTIVES)} for me", f"{rng.randint(0, 20)} found for {self.name()}"))]

    def buttons(self) -> list[str]:
        shown = [self.element("button", each) for each in self.rng.sample(BUTTONS, self.rng.randint(1, 2))]
        return [" ".join(each for each in shown if each)] if any(shown) else []


# ---- exercises: (sheet's needs, instruction, response)


def named(e: Element) -> str:
    return f"# Element: {e.name} {e.number}"


def act(thought: str, action: str, e: Element, argument: str | None = None) -> str:
    words = "" if argument is None else f'argument="{argument}", '
    return f'<think>{thought}</think><answer>{named(e)}\ndo(action="{action}", {words}element="{e.number}")</answer>'


def say(text: str) -> str:
    return f'<think>the answer is {text}</think><answer>exit(message="{text}")</answer>'


def click(e: Element) -> str:
    return act(f"click {e.name}", "Click", e)


def quoted(rng: Random, text: str) -> str:
    return f'"{text}"' if rng.random() < 0.7 else text


class Exercise:
    """What to do, said once; then `page` draws a page it can be done on and `response` does it, as often as there are rounds."""

    def __init__(self, rng: Random, size: int, kind: str):
        self.rng, self.size, self.kind = rng, size, kind
        self.sheet = Sheet(rng, size)
        getattr(self, kind)()

    def targets(self, kinds=("a", "button", "input", "textarea", "select", "checkbox"), test=lambda e: True) -> list[Element]:
        """Elements of the sheet that fit; draws sheets until there are some. Rarer names count as much as labels do."""
        while not (fit := [e for e in self.sheet.elements if e.kind in kinds and test(e)]):
            self.sheet = Sheet(self.rng, self.size)
        names = [e for e in fit if e.name.split()[0] in ADJECTIVES]
        return names if names and self.rng.random() < 0.6 else fit

    def element(self, *args, **kw) -> Element:
        return self.rng.choice(self.targets(*args, **kw))

    def find(self):
        fit = self.targets()
        chosen = [self.rng.choice(fit) for _ in range(self.rng.randint(2, 6))]
        self.task, self.response = "find " + " and ".join(e.name for e in chosen), "\n".join(named(e) for e in chosen)

    def point(self):
        e = self.element()
        self.task, self.response = f"point at {e.name}{self.tail()}", click(e)

    def tail(self) -> str:
        """Behind the last word of an instruction, so that names come with and without a space after them."""
        return self.rng.choice(("", " please", " on this page", " now"))

    def either(self):
        """Is it there? Half of the time it is, else a name that shares its words with others must be recognised as absent."""
        e, other = self.element(), self.element()
        if self.rng.random() < 0.5:
            self.task, self.response = f"point at {e.name} else at {other.name}", click(e)
        else:
            self.task, self.response = f"point at {self.absent()} else at {other.name}", click(other)

    def absent(self) -> str:
        while (name := self.rng.choice((self.sheet.name, self.sheet.name, name_maker(self.rng, 4)))()) in self.sheet.names:
            pass
        return name

    def type(self):
        e, text = self.element(("input", "textarea")), phrase(self.rng)
        if self.rng.random() < 0.3:
            self.task, self.response = f"look up {quoted(self.rng, text)} in {e.name}", act(f"search for {text}", "Search", e, text)
        else:
            self.task = f"write {quoted(self.rng, text)} into {e.name}{self.tail()}"
            self.response = act(f"type {text} into {e.name}", "Type", e, text)

    def choose(self):
        e = self.element(("select",))
        option = self.rng.choice(e.options)
        self.task = f"pick {quoted(self.rng, option)} as {e.name}{self.tail()}"
        self.response = act(f"choose {option} as {e.name}", "Select Dropdown Option", e, option)

    def fact(self):
        while not self.sheet.facts:
            self.sheet = Sheet(self.rng, self.size)
        label = self.rng.choice(sorted(self.sheet.facts))
        self.task, self.response = f"say the {label}{self.tail()}", say(self.sheet.facts[label])

    def beside(self):
        e = self.element(test=lambda e: e.beside)
        self.task, self.response = f"say what stands beside {e.name}{self.tail()}", say(e.beside)

    def value(self):
        e = self.element(test=lambda e: e.value)
        self.task, self.response = f"say the value of {e.name}{self.tail()}", say(e.value)

    def present(self):
        here = self.rng.random() < 0.5
        name = self.element().name if here else self.absent()
        self.task, self.response = f"say whether {name} is here", say("yes" if here else "no")

    def titled(self):
        self.task, self.response = "say the title", say(self.sheet.title)

    def repeat(self):
        text = phrase(self.rng)
        self.task, self.response = f"say {quoted(self.rng, text)}{self.tail()}", say(text)


SHARES = {"find": 20, "point": 16, "either": 14, "type": 12, "choose": 6, "fact": 8, "beside": 8, "value": 6, "present": 5,
          "titled": 1, "repeat": 4}


def exercise(rng: Random, size: int = 18, kind: str | None = None) -> dict:
    """One record: up to four rounds, each an exercise of its own kind; all instructions stand in the task, in order.

    So a response must be the one whose turn it is, which the history tells; that history holds names with stale ids.
    """
    rounds = 1 if kind else rng.choice((1, 1, 1, 2, 3, 4))
    kinds = [kind] if kind else rng.choices(list(SHARES), list(SHARES.values()), k=rounds)
    done = [Exercise(rng, rng.randint(3, size), each) for each in kinds]
    turns = [{"url": "about:blank", "observation": e.sheet.text, "response": e.response} for e in done]
    return {"task_id": 0, "sites": ["exercise"], "template": "+".join(kinds), "intent": " , then ".join(e.task for e in done), "reward": 1.0,
            "turns": turns}


def exercises(seed: int, size: int = 18):
    """Endless and reproducible."""
    rng = Random(f"exercises {seed}")
    while True:
        yield exercise(rng, size)


# ---- the tokenizer

# A word takes its one trailing space along; numbers are cut into at most two digits; a tag takes a trailing space or newline;
# the fixed parts of a response are one piece each. Pieces that occur become tokens, everything else falls apart into bytes.
PIECES = (r'\n?do\(action="|", element="|", argument="|exit\(message="|\n?# (?:Element|Note): |Task: |\*\* Simplified html \*\*|</?[a-z0-9]+>[ \n]?'
          r'|[A-Za-z]+ ?|[0-9]{1,2}|\$|\n+|<|[^A-Za-z0-9<$\n]+')
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ACTIONS = "Click Right Type Search Select Dropdown Option Hover Scroll Up Down Press Enter Switch Tab Go Backward Forward Wait".split()
MARKUP = "<think> </think> <answer> </answer>".split() + [
    f"<{slash}{tag}>{end}" for tag in "a button input textarea select checkbox radio h1 h2 h3 title".split() for slash in ("", "/")
    for end in (("", " ", "\n") if slash else ("",))]


def vocabulary() -> list[str]:
    """Every piece that is a token: all words with and without their space, 0 to 99, markup, and what 2,000 exercises show often."""
    names = ADJECTIVES + NOUNS + TOPICS + SCENERY + NAMES + CITIES + MONTHS + FORUMS + list(CATEGORIES)
    labels = " ".join(LINKS + BUTTONS + FIELDS + FACTS + list(CHOICES) + STATES + ["gift wrap newsletter remove edit delete view issue point find please"])
    words = dict.fromkeys(names + labels.split() + OTHER + ACTIONS + ["You", "Round", "Note", "N", "A"])
    pieces = dict.fromkeys([*(w + end for w in words for end in ("", " ")), *map(str, range(100)), *MARKUP])
    seen, source = Counter(), exercises(0)
    for _ in range(2000):
        record = next(source)
        for k, turn in enumerate(record["turns"]):
            text = f'Task: {record["intent"]}\n\nRound {k}\n\n{turn["observation"]}\n** Simplified html **\n{turn["response"]}go_backward()go_forward()")# Note: '
            seen.update(re.findall(PIECES, text))
    return list(pieces | dict.fromkeys(sorted(p for p, n in seen.items() if n >= 20)))


def tokenizer():
    """Byte-level BPE whose merges are replaced by whole pieces (`ignore_merges`): small, exact on any text, no training."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    as_token = lambda piece: byte_level.pre_tokenize_str(piece)[0][0]
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet())) | dict.fromkeys(map(as_token, vocabulary()))
    result = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], ignore_merges=True))
    result.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level])
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return result


def write_tokenizer(path: Path) -> int:
    path.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    made.save(str(path / "tokenizer.json"))
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "model_max_length": 4096, "clean_up_tokenization_spaces": False, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "agent.json").write_text(json.dumps({"system": SYSTEM, "think": True}) + "\n")
    return made.get_vocab_size()


def main():
    parser = argparse.ArgumentParser(description="Exercises for the small base model, and its tokenizer.")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="write tokenizer files into DIR")
    parser.add_argument("--rows", type=int, default=0, help="print this many exercises, one JSON line each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=18, help="elements of the largest pages")
    args = parser.parse_args()
    if args.tokenizer:
        print(f"{args.tokenizer}/tokenizer.json: {write_tokenizer(args.tokenizer)} tokens")
    source = exercises(args.seed, args.size)
    for _ in range(args.rows):
        print(json.dumps(next(source)))


if __name__ == "__main__":
    main()
