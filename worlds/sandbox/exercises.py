"""What the small base model learns before it meets a task: a vocabulary, and to read a page.

An exercise is a page of random content, an instruction, and the response: find these elements, write this text into that
field, quote what stands beside a name, say whether it is there at all. Pages follow the compact observation of rollout.py
and responses its action grammar, so what is learned is reading and copying. None of the sandbox's sites, tasks or
demonstrations occurs, and the instructions' verbs (point at, find, write, pick, say, note) do not open any task. Rows are
trajectory records, which bc.py trains on as they are:

    python -m worlds.sandbox.exercises --tokenizer runs/start                # a checkpoint that has learned nothing yet
    python -m worlds.sandbox.exercises --rows 40000 --seed 0 > rows.jsonl   # exercises of 1 to 4 rounds each

Three choices make look-up learnable for a model of this size. Names on a page share their words, so that no single
word identifies one. Queries are drawn with replacement, so that "not answered yet" is no clue. Ids often are random
numbers, so that counting elements does not replace reading.

`make base`: 38,000 exercises, 6.9 million tokens, 1,255 steps. Whole responses right on unseen pages of 3 to 18 elements:
point at an element 100%, choose an option 97%, read a fact 97%, type a text 53%, up to eight elements at once 30%.

What decided whether the model learns to look up an element's id by its name (running accuracy on pages of 14 to 16
two-word names, single runs) is how its first two layers start (`initial_weights`):

    W_Q = W_K orthogonal                                                     0.7 M tokens    chance, on 4 names
    + layer 0 reads the two tokens before (biases under rotary positions)    0.7 M tokens    just above chance, on 4 names
    + layer 1 compares two tokens with two tokens                            0.95 M tokens   98%

Text and id stand side by side in observation and response for the same reason: with one token between them the look-up
stayed at chance.
"""

import argparse
import json
import re
from pathlib import Path
from random import Random
from typing import NamedTuple

from .words import ADJECTIVES, CATEGORIES, CITIES, FORUMS, MONTHS, NAMES, NOUNS, SCENERY, TOPICS

SYSTEM = "You browse the web."

# Labels of controls and facts as they occur on websites in general.
LINKS = """home|cart|orders|account|profile|log in|log out|new post|next page|previous page|edit account|
edit profile|checkout|help|about|settings|messages|users|projects|issues|new issue|wiki|map|search|posts|
comments|reviews|products|customers|reports|stores|sales|wishlist|compare|sign in|sign out|contact|back|details|
view order|show all""".replace("\n", "").split("|")
BUTTONS = """go|save|send|continue|cancel|delete|submit|add to cart|update cart|place order|upvote|downvote|
create post|edit|close|reopen|assign|follow|subscribe|reset|apply|sort|filter|add comment|create issue|
find route|write review|add to wishlist|merge|reply|confirm""".replace("\n", "").split("|")
FIELDS = """search|name|city|title|body|bio|comment|username|password|email|phone|street|country|message|note|
subject|quantity|description|from|to|label|address|url|tag|review|nickname|
summary""".replace("\n", "").split("|")
FACTS = """price|stock|status|total|date|author|votes|rating|city|name|bio|shipping|number|items|owner|weight|
distance|color|points|views|size|answers|comments|followers|version""".replace("\n", "").split("|")
CHOICES = {
    "size": "small medium large", "shipping": "standard express pickup", "color": "red blue green black white",
    "sort": "newest oldest cheapest best", "status": "pending paid shipped delivered returned",
    "state": "open closed merged", "priority": "low normal high urgent", "forum": " ".join(FORUMS),
    "category": " ".join(CATEGORIES), "month": " ".join(MONTHS), "rating": "1 2 3 4 5", "country": " ".join(CITIES[:12])}
STATES = sorted({word for words in CHOICES.values() for word in words.split() if word.isalpha()})
# Words that no exercise needs but an instruction or a page may hold: each gets its tokens, an embedding can be learned later.
OTHER = """a add after all also amount an and any are as ask at available be before begin best bought bought buy
by can change cheapest check choose chosen click costs did dollars does done down each else email empty error
every exist exit false first for found get give goes has have he her here his how i if in into is it its item
items know last least less list log look make many me more most much must my need new newest no none not now of
off oldest on one only open option or order other our out over page paid part pay people post posts product put
question read remove said say score see set she shop so step still store sum task than that the their them then
there these they thing think this those time today tomorrow too top true type under until up upvotes use user
was way we were what when where which who whose why will with within without word write wrong wrote yes
yesterday you your nothing between most characters must again department departments forum wanted write answer
result results found vote voted sold person member owner titled times once twice both left right commit branch
file files repository request merge route walk drive car bike place near hotel station museum bridge minutes
hours km gift wrap newsletter pick stands beside point please whether yes value order issue browse say look
invoice customer guest admin revenue stock report catalog error failed success warning element note simplified
html round web browse system assistant""".split()


FILLERS = """the a of in on my this that with for from by to it is there one item post called please now here
shop forum page products all open add remove buy comment quantity set get into as size store not""".split()


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
    return rng.choice((lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}",
                       lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS + TOPICS)}",
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
        self.lines = [f"<title>{self.title}</title>", *self.navigation(),
                      f"<h1>{rng.choice((self.title, self.title, self.name()))}</h1>"]
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
                            f"{rng.choice(NAMES)} : too {rng.choice(ADJECTIVES)} for me",
                            f"{rng.randint(0, 20)} found for {self.name()}"))]

    def buttons(self) -> list[str]:
        shown = [self.element("button", each) for each in self.rng.sample(BUTTONS, self.rng.randint(1, 2))]
        return [" ".join(each for each in shown if each)] if any(shown) else []


# ---- exercises


def element_line(e: Element) -> str:
    return f"# Element: {e.name} {e.number}"


def note(text: str) -> str:
    return f"# Note: {text}"


def act(thought: str, action: str, e: Element, argument: str | None = None) -> str:
    words = "" if argument is None else f'argument="{argument}", '
    return f'<think>{thought}</think><answer>{element_line(e)}\ndo(action="{action}", {words}element="{e.number}")</answer>'


def say(text: str, quote: str = "") -> str:
    """Thoughts quote the page up to the answer: reading is then copying on from a name, as pointing is."""
    return f'<think>{quote or text}</think><answer>exit(message="{text}")</answer>'


def quote_beside(e: Element) -> str:
    return f"{e.name} {e.number} {e.beside}"


def quote_value(e: Element) -> str:
    return f"{e.name} {e.number} = {e.value}"


def click(e: Element) -> str:
    return act(f"click {e.name}", "Click", e)


def quoted(rng: Random, text: str) -> str:
    return f'"{text}"' if rng.random() < 0.7 else text


class Exercise:
    """One instruction about one page, and its response. Lists ask about several things at once, one line each: a page is long
    and an answer short, so they carry most of the signal. The others answer in full, in the form that actions have.
    """

    def __init__(self, rng: Random, size: int, kind: str):
        self.rng, self.size, self.kind = rng, size, kind
        self.sheet = Sheet(rng, rng.randint(3, size))
        self.task, self.response = getattr(self, kind)()

    def fitting(self, kinds=("a", "button", "input", "textarea", "select", "checkbox"), test=lambda e: True) -> list[Element]:
        """The elements that an exercise can be about; draws pages until there are some. Two-word names outweigh labels."""
        while not (fit := [e for e in self.sheet.elements if e.kind in kinds and test(e)]):
            self.sheet = Sheet(self.rng, self.rng.randint(3, self.size))
        names = [e for e in fit if e.name.split()[0] in ADJECTIVES]
        return names if names and self.rng.random() < 0.6 else fit

    def element(self, *args, **kw) -> Element:
        return self.rng.choice(self.fitting(*args, **kw))

    def several(self, *args, **kw) -> list[Element]:
        fit = self.fitting(*args, **kw)
        return self.rng.choices(fit, k=min(self.rng.randint(3, 8), 1 + len(fit)))

    def absent(self) -> str:
        """A name that shares its words with those on the page, more often than not."""
        while (name := self.rng.choice((self.sheet.name, self.sheet.name, name_maker(self.rng, 4)))()) in self.sheet.names:
            pass
        return name

    def labels(self) -> list[str]:
        while not self.sheet.facts:
            self.sheet = Sheet(self.rng, self.rng.randint(3, self.size))
        return sorted(self.sheet.facts)

    def filler(self, most: int) -> str:
        return "".join(f"{word} " for word in self.rng.choices(FILLERS, k=self.rng.randint(0, most)))

    def tail(self) -> str:
        """Behind the last word of an instruction, so that names come with and without a space after them."""
        return " " * (self.rng.random() < 0.7) and (" " + self.filler(4)).rstrip()

    def call(self, name: str) -> str:
        """A two-word name in an instruction, mostly with words around it: what marks a name must be that it is one, and that it
        stands in the task, not which word it follows."""
        return f"{self.filler(3)}{name}" if name.split()[0] in ADJECTIVES and self.rng.random() < 0.8 else name

    # lists
    def find(self):
        chosen = self.several()
        return "find " + " and ".join(e.name for e in chosen), "\n".join(map(element_line, chosen))

    def find_else(self):
        """Is it there? If not, the other one."""
        pairs = [(e.name, e) if self.rng.random() < 0.5 else (self.absent(), e) for e in self.several()]
        others = [self.element() for _ in pairs]
        tasks = [f"{name} else {other.name}" for (name, _), other in zip(pairs, others)]
        found = [e if name == e.name else other for (name, e), other in zip(pairs, others)]
        return "find " + " and ".join(tasks), "\n".join(map(element_line, found))

    def notes_beside(self):
        chosen = self.several(test=lambda e: e.beside)
        return "note what stands beside " + " and ".join(e.name for e in chosen), "\n".join(note(quote_beside(e)) for e in chosen)

    def notes_values(self):
        chosen = self.several(test=lambda e: e.value)
        return "note the value of " + " and ".join(e.name for e in chosen), "\n".join(note(quote_value(e)) for e in chosen)

    def notes_facts(self):
        chosen = self.rng.choices(self.labels(), k=4)
        return "note the " + " and ".join(chosen), "\n".join(note(f"{label} {self.sheet.facts[label]}") for label in chosen)

    def notes_present(self):
        names = [e.name if self.rng.random() < 0.5 else self.absent() for e in self.several()]
        answers = [note(f"{n} yes" if n in self.sheet.names else f"{n} no") for n in names]
        return "note whether " + " and ".join(names) + " are here", "\n".join(answers)

    # in full
    def point(self):
        e = self.element()
        return f"point at {self.call(e.name)}{self.tail()}", click(e)

    def point_else(self):
        e, other = self.element(), self.element()
        name = e.name if self.rng.random() < 0.5 else self.absent()
        return f"point at {self.call(name)} else at {self.call(other.name)}{self.tail()}", click(e if name == e.name else other)

    def type(self):
        e, text = self.element(("input", "textarea")), phrase(self.rng)
        if self.rng.random() < 0.3:
            return f"look up {quoted(self.rng, text)} in {self.call(e.name)}{self.tail()}", \
                act(f"search for {text}", "Search", e, text)
        return (f"write {quoted(self.rng, text)} into {self.call(e.name)}{self.tail()}",
                act(f"type {text} into {e.name}", "Type", e, text))

    def choose(self):
        e = self.element(("select",))
        option = self.rng.choice(e.options)
        return (f"pick {quoted(self.rng, option)} as {e.name}{self.tail()}",
                act(f"choose {option} as {e.name}", "Select Dropdown Option", e, option))

    def fact(self):
        label = self.rng.choice(self.labels())
        return f"say the {label}{self.tail()}", say(self.sheet.facts[label], f"{label} {self.sheet.facts[label]}")

    def beside(self):
        e = self.element(test=lambda e: e.beside)
        return f"say what stands beside {self.call(e.name)}{self.tail()}", say(e.beside, quote_beside(e))

    def value(self):
        e = self.element(test=lambda e: e.value)
        return f"say the value of {self.call(e.name)}{self.tail()}", say(e.value, quote_value(e))

    def present(self):
        name = self.element().name if self.rng.random() < 0.5 else self.absent()
        return f"say whether {self.call(name)} is here", say("yes" if name in self.sheet.names else "no")

    def repeat(self):
        text = phrase(self.rng)
        return f"say {quoted(self.rng, text)}{self.tail()}", say(text)


LISTS = {"find": 20, "find_else": 12, "notes_beside": 7, "notes_values": 4, "notes_facts": 4, "notes_present": 4}
FULL = {"point": 12, "point_else": 10, "type": 10, "choose": 4, "fact": 5, "beside": 5, "value": 2, "present": 2, "repeat": 3}


def draw(rng: Random, shares: dict) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


def exercise(rng: Random, size: int = 18, kind: str | None = None) -> dict:
    """One record of one to four rounds: all instructions stand in the task, each round has its own page, and the history tells
    whose turn it is; that history holds names with stale ids.
    """
    if kind or rng.random() < 0.9:
        kinds = [kind or draw(rng, LISTS | FULL)]
    else:
        kinds = [draw(rng, FULL) for _ in range(rng.randint(2, 4))]
    done = [Exercise(rng, size, each) for each in kinds]
    turns = [{"url": "about:blank", "observation": e.sheet.text, "response": e.response} for e in done]
    return {"task_id": 0, "sites": ["exercise"], "template": "+".join(kinds), "reward": 1.0,
            "intent": " , then ".join(e.task for e in done), "turns": turns}


def exercises(seed: int, size: int = 18):
    """Endless and reproducible."""
    rng = Random(f"exercises {seed}")
    while True:
        yield exercise(rng, size)


# ---- the tokenizer

# A word takes its one trailing space along; numbers are cut into at most two digits; a tag takes a trailing space or newline;
# the fixed parts of a response are one piece each. Pieces of the vocabulary are tokens, all others fall apart into bytes.
PIECES = (r'\n?do\(action="|", element="|", argument="|exit\(message="|\n?# (?:Element|Note): |Task: |\*\* Simplified html \*\*'
          r'|</?[a-z0-9]+>[ \n]?'
          r'|[A-Za-z]+ ?|[0-9]{1,2}|\$|\n+|<|[^A-Za-z0-9<$\n]+')
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ACTIONS = """Click Right Type Search Select Dropdown Option Hover Scroll Up Down Press Enter Switch Tab Go Backward Forward Wait You
Round Note N A go backward forward""".split()
CALLS = ['do(action="', '\ndo(action="', '", element="', '", argument="', 'exit(message="', '")', "()", "# Element: ", "\n# Element: ",
         "# Note: ", "\n# Note: ", "Task: ", "** Simplified html **", "<think>", "</think>", "<answer>", "</answer>"]
JOINTS = [" ", "\n", "\n\n", "| ", " | ", " |", " = ", "(", ")", " (", " , ", ", ", ",", ": ", " : ", ":", ". ", ".", "; ", '"', '" ', ' "', "$"]
TAGS = [f"<{tag}>" for tag in "a button input textarea select checkbox radio h1 h2 h3 title".split()]
TAGS += [tag.replace("<", "</") + end for tag in TAGS for end in ("", " ", "\n")]


def vocabulary() -> list[str]:
    """Every piece that is one token: words with and without their space, numbers below 100, markup, what joins the parts of a call."""
    words = " ".join(LINKS + BUTTONS + FIELDS + FACTS + list(CHOICES) + STATES + OTHER).split()
    names = [*ADJECTIVES, *NOUNS, *TOPICS, *SCENERY, *NAMES, *CITIES, *MONTHS, *FORUMS, *CATEGORIES]
    words = [w + end for w in dict.fromkeys(names + words + ACTIONS) for end in ("", " ")]
    pieces = list(dict.fromkeys(words + [str(i) for i in range(100)] + CALLS + JOINTS + TAGS))
    assert all(re.findall(PIECES, piece) == [piece] for piece in pieces)
    return pieces


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


# ---- the weights it starts from

WIDTH, HEADS, LAYERS, FEED_FORWARD, THETA = 128, 2, 4, 256, 1e6


def initial_weights(vocab_size: int, seed: int = 0) -> dict:
    """Random weights under Hugging Face's names, with a look-up laid into the first two layers.

    Output projections start at zero, so that each block starts as the identity. W_Q = W_K is orthogonal, so that
    every token attends to its own earlier copies.
    """
    import torch
    generator, D, F = torch.Generator().manual_seed(seed), WIDTH, FEED_FORWARD
    normal = lambda rows, columns: torch.randn(rows, columns, generator=generator) * columns ** -0.5

    def orthogonal(rows, columns):
        return torch.nn.init.orthogonal_(torch.empty(rows, columns), generator=generator)

    weights = {"model.embed_tokens.weight": normal(vocab_size, D)}
    for layer in range(LAYERS):
        block = {"input_layernorm.weight": torch.ones(D), "post_attention_layernorm.weight": torch.ones(D)}
        for name in "qkv":
            block[f"self_attn.{name}_proj.weight"] = normal(D, D)
            block[f"self_attn.{name}_proj.bias"] = torch.zeros(D)
        block |= {"self_attn.o_proj.weight": torch.zeros(D, D), "mlp.gate_proj.weight": normal(F, D),
                  "mlp.up_proj.weight": normal(F, D), "mlp.down_proj.weight": torch.zeros(D, F)}
        weights |= {f"model.layers.{layer}.{name}": weight for name, weight in block.items()}
    for layer in range(LAYERS):
        query = orthogonal(D, D)
        weights |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": query.clone() for name in "qk"}
    weights["model.norm.weight"] = torch.ones(D)
    lay_look_up(weights, orthogonal)
    return weights


def lay_look_up(weights: dict, orthogonal, sharpness: float = 7.5, gain: float = 2.0, copied: float = 2.0):
    """Starts the first two layers as a rough "what followed these two tokens before?".

    A web agent needs it all the time (red lamp -> 12). From plain random weights gradient descent finds it very
    late, because two layers have to agree first. Layer 0 adds to each token the two tokens before it. Layer 1
    compares this token and the one before it with the two tokens before every position, and copies the token at
    the positions that match.
    """
    import torch
    first = lambda name: weights[f"model.layers.0.self_attn.{name}"]
    second = lambda name: weights[f"model.layers.1.self_attn.{name}"]
    D, H, E = WIDTH, HEADS, WIDTH // HEADS
    read_ED = orthogonal(E, D)                             # a token's code
    place_ED, place2_ED = orthogonal(2 * E, D).split(E)    # where codes are written
    pairs = torch.arange(4)                                # the fastest rotations separate neighbors
    frequencies = 1 / THETA ** (2 * pairs.float() / E)
    for h, back in enumerate((1, 2)):
        # Queries and keys come from biases alone. Rotated by their positions t and s, their product is a sum of
        # cos(f (t - s - back)): the same for any two tokens, and largest `back` tokens ago.
        here, angle, size = pairs + h * E, back * frequencies, (sharpness * E ** 0.5) ** 0.5
        first("q_proj.weight")[h * E:(h + 1) * E] = 0
        first("k_proj.bias")[here] = size
        first("q_proj.bias")[here] = size * angle.cos()
        first("q_proj.bias")[here + E // 2] = -size * angle.sin()
        first("v_proj.weight")[h * E:(h + 1) * E] = read_ED
        first("o_proj.weight")[:, h * E:(h + 1) * E] = (place_ED, place2_ED)[h].T * D ** -0.5
    turn_EE = orthogonal(E, E)  # keeps the two comparisons apart within one head
    second("q_proj.weight")[:] = (gain * (read_ED + turn_EE @ place_ED)).repeat(H, 1)
    second("k_proj.weight")[:] = (gain * (place_ED + turn_EE @ place2_ED)).repeat(H, 1)
    second("v_proj.weight")[:] = orthogonal(H * E, D)
    second("o_proj.weight")[:] = second("v_proj.weight").T * copied * D ** -0.5


def write_base(path: Path, seed: int = 0) -> int:
    """A new checkpoint: tokenizer, chat template, system prompt, architecture, and the weights to start from."""
    from safetensors.torch import save_file
    path.mkdir(parents=True)  # not exist_ok: worlds/base holds trained weights
    made = tokenizer()
    made.save(str(path / "tokenizer.json"))
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>", "model_max_length": 4096, "clean_up_tokenization_spaces": False,
                "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": made.get_vocab_size(),
              "hidden_size": WIDTH, "intermediate_size": FEED_FORWARD, "num_hidden_layers": LAYERS,
              "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_act": "silu",
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": THETA,
              "tie_word_embeddings": True, "torch_dtype": "float32",
              "eos_token_id": made.token_to_id("<|im_end|>"),
              "pad_token_id": made.token_to_id("<|endoftext|>")}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "agent.json").write_text(json.dumps({"system": SYSTEM, "think": True}) + "\n")
    weights = initial_weights(made.get_vocab_size(), seed)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return made.get_vocab_size()


def main():
    parser = argparse.ArgumentParser(description="Exercises for the small base model, and its tokenizer.")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, help="write tokenizer, config and initial weights to a new DIR")
    parser.add_argument("--rows", type=int, default=0, help="print this many exercises, one JSON line each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=18, help="elements of the largest pages")
    args = parser.parse_args()
    if args.tokenizer:
        print(f"{args.tokenizer}/tokenizer.json: {write_base(args.tokenizer, args.seed)} tokens")
    source = exercises(args.seed, args.size)
    for _ in range(args.rows):
        print(json.dumps(next(source)))


if __name__ == "__main__":
    main()
