"""The small base model's vocabulary: the words of the embedded sites, those of websites in general, and its tokenizer.

    python -m worlds.sandbox.exercises --tokenizer runs/base-0     # a new checkpoint to pre-train, as `make base` does
"""
import json
import re
from pathlib import Path

from .weights import FEED_FORWARD, HEADS, LAYERS, THETA, WIDTH, initial_weights
from .words import ADJECTIVES, CATEGORIES, CITIES, FORUMS, MONTHS, NAMES, NOUNS, SCENERY, TOPICS

# How responses are written: what a checkpoint's agent.json says. Exercises come in all of them.
MANNERS = {
    "short": {
        "system": "You browse the web. Think in few words.",
        "think": True,
    },
    "none": {
        "system": "You browse the web. Do not think.",
        "think": False,
    },
    "long": {
        "system": "You browse the web. Think step by step.",
        "think": True,
    },
}

ID = "<{}>"  # how observations write the id of an element behind its name: as worlds/page/ does


def with_id(name: str, number) -> str:
    """An element as observations and responses write it. Exercises, experts and tests have it from here."""
    return f"{name} {ID.format(number)}"


def agent(manner: str = "short", compress: bool = True) -> dict:
    """What agent.json holds: how the checkpoint thinks, and whether pages leave the history."""
    return MANNERS[manner] | {"compress": compress}


# Labels of controls and facts as they occur on websites in general.
LINKS = """home|cart|orders|account|profile|log in|log out|new post|next page|
previous page|edit account|edit profile|checkout|help|about|settings|messages|users|
projects|issues|new issue|wiki|map|search|posts|comments|reviews|products|customers|
reports|stores|sales|wishlist|compare|sign in|sign out|contact|back|details|
view order|show all""".replace("\n", "").split("|")
BUTTONS = """go|save|send|continue|cancel|delete|submit|add to cart|update cart|
place order|upvote|downvote|create post|edit|close|reopen|assign|follow|subscribe|
reset|apply|sort|filter|add comment|create issue|find route|write review|
add to wishlist|merge|reply|confirm""".replace("\n", "").split("|")
FIELDS = """search|name|city|title|body|bio|comment|username|password|email|phone|street|
country|message|note|subject|quantity|description|from|to|label|address|url|tag|
review|nickname|summary""".replace("\n", "").split("|")
FACTS = """price|stock|status|total|date|author|votes|rating|city|name|bio|shipping|
number|items|owner|weight|distance|color|points|views|size|answers|comments|
followers|version""".replace("\n", "").split("|")
CHOICES = {
    "size": "small medium large",
    "shipping": "standard express pickup",
    "color": "red blue green black white",
    "sort": "newest oldest cheapest best",
    "status": "pending paid shipped delivered returned",
    "state": "open closed merged",
    "priority": "low normal high urgent",
    "forum": " ".join(FORUMS),
    "category": " ".join(CATEGORIES),
    "month": " ".join(MONTHS),
    "rating": "1 2 3 4 5",
    "country": " ".join(CITIES[:12]),
}
STATES = sorted({
    word
    for choices in CHOICES.values()
    for word in choices.split()
    if word.isalpha()
})
# Words that an instruction or a page may hold: each gets its tokens, an embedding can be learned later.
OTHER = """a add after all also amount an and any are as ask at available be before begin best
bought bought buy by can change cheapest check choose chosen click costs did dollars does done
down each else email empty error every exist exit false first for found get give goes has have he
her here his how i if in into is it its item items know last least less list log look make many me
more most much must my need new newest no none not now of off oldest on one only open option or
order other our out over page paid part pay people post posts product put question read remove
said say score see set she shop so step still store sum task than that the their them then there
these they thing think this those time today tomorrow too top true type under until up upvotes use
user was way we were what when where which who whose why will with within without word write wrong
wrote yes yesterday you your nothing between most characters must again department departments
forum wanted write answer result results found vote voted sold person member owner titled times
once twice both left right commit branch file files repository request merge route walk drive car
bike place near hotel station museum bridge minutes hours km gift wrap newsletter pick stands
beside point please whether yes value order issue browse say look invoice customer guest admin
revenue stock report catalog error failed success warning element note simplified html round web
browse system assistant""".split()

MARKS = "selected current unread pressed expanded on off".split()  # what observations say of links and buttons

# What the exercises' little websites are made of: sections, buttons, what is known of an entry, forms, menus.
SECTIONS = """airport albums animals artists assets authors bands beds boats bookings branches
buildings cases clients clubs collections companies contracts courses crews dancers devices
doctors drivers employees engines events exhibits families farms fields films flights folders
gardens goods graphs groups guests guides holidays horses houses inbox jobs journals kits lakes
leagues lessons letters loans machines matches meals meetings models nurses offers paintings
parcels partners parts patients pets photos players plots policies pools prints programs races
readers recipes records rentals rides rooms routes samples schools scripts sensors servers shelves
ships shows songs staff stations students studios suppliers surveys talks teachers teams tenants
tests tickets tools tours tracks trains trees trips units vans vendors venues videos villas visits
volunteers workers workshops yards""".split()
VERBS = """accept adopt allow ask attach ban block book borrow call claim clone collect complete
copy count deliver donate draw dismiss enroll export fetch flag feature fix forward freeze hide
hire import inspect join keep launch leave lend like load lock mark measure mute notify pack pause
pin play print pull push rate refund register reject release rename renew rent repair report
request reserve restart restore resume retry return scan schedule share sign skip snooze star stop
store sync tell thank track transfer translate try turn undo unlock update vote watch weigh
withdraw""".split()
DETAILS = """age altitude area artist balance bed budget capacity carrier class code coach company
cost crew deadline deposit depth doctor driver due duration engine fee floor format fuel gate
genre goal grade guide height host language leader length level license limit manager material
mark mass model origin owner percent phase plan platform players position power pressure rank
ratio reader reference region room rooms route score seat season seats series shelf shift speaker
speed sponsor start supplier teacher team temperature tenant term terms track turn unit units
vendor venue visits volume width winner year zone""".split()
MORE = """basic plus pro monday tuesday wednesday thursday friday saturday sunday english french
german spanish italian morning evening noon night north south east west pdf csv text html private
public internal hidden easy medium hard draft ready blocked done active idle busy full empty half
daily weekly monthly yearly cash card bank cheque vegan fish meat gas steam solar wood metal glass
paper cotton wool beginner expert afterwards also behind beneath below above called reach visit
press fill enter give view take type into under inside section named thing same back later second
third fourth next until follow mention show found here there missing holds hold lists shows line
lines row rows column columns which nowhere anywhere end starts begins again let us okay sorry
cannot could would like may might not no never nobody allowed denied forbidden refused reserved
must only members changed saved sent thanks thing things words letters name names value values
number numbers field button link links option options menu list lists text texts site website
section sections details entry entries items item page pages result results query searched
matching older newer previous further more earlier go on instead but so because this approve
publish promote ship decline areas overview archive do far few asked am yet work step
selected current unread pressed expanded checked disabled""".split()
FORMS = """registration|contact|preferences|feedback|application|my page|new entry|
booking|my data|subscription|questions|enquiry|new member|my details""".replace("\n", "").split("|")
MENUS = CHOICES | {
    "plan": "basic plus pro free",
    "format": "pdf csv text html",
    "time": "morning noon evening night",
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "language": "english french german spanish italian",
    "access": "public private internal hidden",
    "level": "beginner easy medium hard expert",
    "part": "north south east west",
    "payment": "cash card bank cheque",
    "material": "wood metal glass paper cotton wool",
    "meal": "vegan fish meat",
}
FILLERS = """the a of in on my this that with for from by to it is there one item post called
please now here shop forum page products all open add remove buy comment quantity set get into as
size store not""".split()


# ---- the tokenizer

# A word takes its one trailing space along; numbers are cut into at most two digits; an element's id below 100 is one
# piece, so that it stands right behind the name; a tag takes a trailing space or newline; the fixed parts of a response
# are one piece each. Pieces of the vocabulary are tokens, all others fall apart into bytes.
PIECES = "|".join((
    r'\n?do\(action="',
    r'", element="',
    r'", argument="',
    r'exit\(message="',
    r'\n?# (?:Element|Note): ',
    r'"\)</answer>',
    r'Task: ',
    r'title: ',
    r'#{1,6} ',
    r'\*\* Simplified html \*\*',
    r'</?[a-z][a-z0-9]*>[ \n]?',
    ID.format("[0-9]{1,2}"),
    r'[A-Za-z]+ ?',
    r'[0-9]{1,2}',
    r'\$',
    r'\n+',
    r'<',
    r'[^A-Za-z0-9<$\n]+',
))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ACTIONS = """Click Right Type Search Select Dropdown Option Hover Scroll Up Down Press Enter Switch Tab Go Backward
Forward Wait You Think Do Round Note N A go backward forward""".split()
CALLS = [
    'do(action="', '\ndo(action="',
    '", element="', '", argument="',
    'exit(message="',
    '")', "()",
    "# Element: ", "\n# Element: ",
    "# Note: ", "\n# Note: ",
    "Task: ", "title: ",
    "# ", "## ", "### ",
    "** Simplified html **",
    "<think>", "</think>",
    "<answer>", "</answer>",
    '")</answer>',
]
IDS = [ID.format(i) for i in range(100)]
JOINTS = [
    " ", "\n", "\n\n",
    "| ", " | ", " |",
    " = ",
    "(", ")", " (",
    " , ", ", ", ",",
    ": ", " : ", ":",
    ". ", ".",
    "; ",
    '"', '" ', ' "',
    "$",
]
TAG_NAMES = "a button input textarea select checkbox radio".split()
OPENING_TAGS = [f"<{name}>" for name in TAG_NAMES]
CLOSING_TAGS = [f"</{name}>{end}" for name in TAG_NAMES for end in ("", " ", "\n")]
TAGS = OPENING_TAGS + CLOSING_TAGS


def vocabulary() -> list[str]:
    """Every piece that is one token.

    These are words with and without their space, numbers below 100, markup, and parts of a call.
    """
    names = ADJECTIVES + NOUNS + TOPICS + SCENERY
    names += NAMES + CITIES + MONTHS + FORUMS + list(CATEGORIES)
    labels = LINKS + BUTTONS + FIELDS + FACTS + list(CHOICES) + STATES
    labels += OTHER + SECTIONS + VERBS + DETAILS + MORE
    words = names + " ".join(labels).split() + ACTIONS

    pieces = []
    for word in dict.fromkeys(words):
        pieces += [word, word + " "]
    pieces += [str(i) for i in range(100)]
    pieces += IDS + CALLS + JOINTS + TAGS
    pieces = list(dict.fromkeys(pieces))

    for piece in pieces:
        assert re.findall(PIECES, piece) == [piece]
    return pieces


def tokenizer():
    """Byte-level BPE whose merges are replaced by whole pieces (`ignore_merges`).

    It is small, exact on any text, and needs no training.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def as_token(piece: str) -> str:
        """The piece as byte-level BPE writes it: one printable character for each byte."""
        token, _ = byte_level.pre_tokenize_str(piece)[0]
        return token

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [as_token(piece) for piece in vocabulary()]
    tokens = list(dict.fromkeys(tokens))
    ids = {token: i for i, token in enumerate(tokens)}

    result = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    result.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    result.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    result.add_special_tokens(special)
    return result


def write_base(path: Path, seed: int = 0) -> int:
    """A new checkpoint: tokenizer, chat template, system prompt, architecture, initial weights.

    Returns the size of the vocabulary.
    """
    from safetensors.torch import save_file
    path.mkdir(parents=True)  # not exist_ok: worlds/base holds trained weights
    made = tokenizer()
    made.save(str(path / "tokenizer.json"))

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    write_json(path / "tokenizer_config.json", settings, indent=2)

    vocab_size = made.get_vocab_size()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": made.token_to_id("<|im_end|>"),
        "pad_token_id": made.token_to_id("<|endoftext|>"),
    }
    write_json(path / "config.json", config, indent=2)
    write_json(path / "agent.json", agent())

    weights = initial_weights(vocab_size, seed)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return vocab_size


def write_json(path: Path, value: dict, indent: int | None = None):
    text = json.dumps(value, indent=indent)
    path.write_text(text + "\n")
