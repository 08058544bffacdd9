"""The text of assets/walk.md: prose around numbers that walk.compute measured. walk.py says how to run it.

Each stop of the walk is a function that returns Markdown. Shown code is cut out of the source files, so it is
what runs. Shown numbers come from a Walk, or from a call of the six files' functions right here.
"""
import difflib
import inspect
import json
import math
import re
import textwrap

import torch
from packing import STYLE, bars, count, row_parts

import answers
import bc
import figures
import compress
import evaluate
import mgrpo
import rollout
from compress import PLACEHOLDER, Chat, Row, Trajectory, context, past_turn, trunk
from model import load, sample

# ---------------------------------------------------------------------------------- Markdown's pieces


def code(source, first: str, last: str) -> str:
    """Lines of a function's or class's source: from the one that begins with `first` to the next with `last`."""
    lines = inspect.getsource(source).splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip().startswith(first)]
    if not starts:
        raise ValueError(f"{source.__qualname__} has no line that begins with {first!r}; choose other lines to show.")
    begin = starts[0]
    ends = [i for i, line in enumerate(lines) if i >= begin and line.strip().startswith(last)]
    if not ends:
        raise ValueError(f"{source.__qualname__} has no line that begins with {last!r}; choose other lines to show.")
    end = ends[0]
    shown = textwrap.dedent("\n".join(lines[begin:end + 1]))
    return f"From `{source.__module__}.{source.__qualname__}`:\n\n```python\n{shown}\n```"


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"


def table(header: list[str], rows: list[list]) -> str:
    """All columns but the first are numbers, or short enough to be set like numbers."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def visible(text: str) -> str:
    """A token in a table: its spaces and line ends can be seen."""
    text = text.replace("\n", "⏎").replace("|", "\\|").replace("`", "'")
    if text.endswith(" "):
        text = text[:-1] + "␣"
    if text.startswith(" "):
        text = "␣" + text[1:]
    return f"`{text}`"


def token_text(chat: Chat, token: int) -> str:
    return chat.tokenizer.decode([token], skip_special_tokens=False)


def spelled(chat: Chat, ids: list[int], width: int = 100) -> str:
    """Token by token, with a raised dot between two of them."""
    lines = [""]
    for token in ids:
        text = token_text(chat, token)
        ends_line = "\n" in text
        piece = text.replace("\n", "⏎") + "·"
        if len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
        if ends_line:
            lines.append("")
    return "\n".join(line for line in lines if line)


def signed(number: float) -> str:
    return f"{number:+.4f}"


def exact(number: float) -> str:
    """Enough decimals to compute with by hand."""
    return f"{number:+.6f}"


def small(number: float) -> str:
    """Four decimals, or the order of magnitude of what they would hide."""
    if number == 0 or abs(number) >= 5e-5:
        return f"{number:.4f}"
    return f"{number:.0e}"


# ------------------------------------------------------------------------------------------ the stops


def opening(walk) -> str:
    record = walk.record
    return f"""# Follow one episode, from the page to the gradient

We follow one attempt of a language model at one task in a browser: from the page that it saw to the change of
its weights. You should know PyTorch. You need no background in reinforcement learning or in how browsers work. The
{len(STOPS) - 2} stops and {len(answers.EXERCISES)} exercises take about forty minutes. [walk.html](walk.html)
is the same episode to play with: save the file and open it in a browser.

The *policy* is the language model. A *task* is a sentence and a check. An *episode* is one attempt at a task;
in the code it is a trajectory, or `tau`. A *turn* is one page and the policy's *response* to it, which holds
one action. An *update* is one change of the weights. A *group* is {record['G']} episodes of the same task. The
method compares them with each other. It is called M-GRPO, multi-turn group relative policy optimization; GRPO
is the single-turn version.

The policy here is `{record['model']}`, a model of {walk.parameters / 1e6:.1f} million parameters after behavior
cloning: it has imitated a few demonstrations, and now it has to improve on its own. (`make demo SEED=31` leaves such a
clone.) No number below was typed by hand:

    python tests/tools/walk.py --model {record['model']}

plays the group, computes each number with the functions that it shows, and writes this page. It takes the first
training task (number {record['number']}, counted from 0) in which a success and a failure can be compared well;
the tool's first lines state the rule. (Another machine may round differently, and then sample other
episodes.)"""


def person(walk) -> str:
    tau, t = walk.parting.right, walk.parting.turn
    check = {name: value for name, value in tau.task["eval"].items() if value}
    reads = ""
    for page in check.get("program_html", []):
        reads = f"""

The program opens `{page['url']}` and reads what the `locator`, a line of JavaScript, finds there. That has
to be what `required_contents` says. Each episode has a fresh copy of the site. (In a task file the address is whole,
`http://HOST:PORT{page['url']}`; we leave out its beginning, which differs from run to run.)"""
    return f"""## 1. What does a person see?

The task, in words:

> {tau.task['intent']}

The browser at turn {t + 1} of episode {tau.member}, the one that we follow. The frame shows which element it is
about to use:

![the page at turn {t + 1}, with a frame around the element that the action is for](walk/turn-{t + 1}.jpg)

A program decides at the end whether the task is done. This is all that it checks:

{fenced(json.dumps(check, indent=1), "json")}{reads}"""


def policy_reads(walk) -> str:
    chat, turn = walk.chat, walk.turn
    page_tokens = len(chat.encode(turn.observation))
    return f"""## 2. What does the policy read?

A language model reads text. So the page becomes text, {page_tokens} tokens here. Only elements you can use
keep their tags, and each tag contains a number, the element's id:

{fenced(turn.observation, "html")}

{code(rollout.take_turns, "# 1) Observe", "page = f")}

If the last action failed, the page opens with a line that says why. So the policy reads about its mistakes
as text."""


def parts_of(chat: Chat, tau: Trajectory, t: int) -> list[tuple[str, list[int]]]:
    """h_j of a turn, cut into (what it is, its ids)."""
    parts = [("system prompt", chat.system_ids())]
    for k in range(t):
        placeholder = chat.user_ids(tau.task, k, PLACEHOLDER)
        parts.append((f"turn {k + 1}: its page, replaced by a placeholder", placeholder))
        response = past_turn(chat, tau, k)[len(placeholder):]
        sampled = len(tau.turns[k].response_ids)
        name = f"turn {k + 1}: its response, as sampled"
        if len(response) > sampled:
            name = (f"turn {k + 1}: its response, {sampled} as sampled and {len(response) - sampled} that the chat "
                    "format adds")
        parts.append((name, response))
    parts.append((f"turn {t + 1}: the page, whole", tau.turns[t].message_ids))
    return parts


def history(walk) -> str:
    chat, tau, t = walk.chat, walk.parting.right, walk.parting.turn
    blocks = []
    for name, ids in parts_of(chat, tau, t):
        blocks.append(f"*{name}* ({len(ids)} tokens)\n\n{fenced(spelled(chat, ids))}")
    h_j = context(chat, tau, t)
    past_ids = len(trunk(chat, tau, t))
    page_tokens = len(chat.encode(tau.turns[t].observation))
    whole = len(chat.system_ids())
    for k in range(t):
        whole += len(tau.turns[k].message_ids) + len(chat.past_response(tau.turns[k].response_ids))
    whole += len(tau.turns[t].message_ids)
    return "\n\n".join([f"""## 3. What exactly is in the context?

The policy does not see the page alone. It sees the *context* $h_j$, one list of {len(h_j)} token ids:
{past_ids} of the past (the *trunk*: the system prompt's {len(chat.system_ids())} and the past turns), then
{len(h_j) - past_ids} of the present page (the {page_tokens} of stop 2; the other {len(h_j) - past_ids - page_tokens}
are the chat format and the line `Round {t}`). Every past response is in the trunk; every past page is replaced by the
placeholder `{PLACEHOLDER}`. This is *dynamic context compression*. With whole pages the context would have {whole} ids, and the gap grows with every turn.

{code(compress.past_turn, "turn = trajectory", "return")}

`trunk` puts the system prompt and the past turns one after the other, and then comes the page:

{code(compress.context, "return", "return")}

Token by token, with a · between tokens (⏎ is the end of a line; the prompt counts turns as rounds, from 0):""",
                        *blocks, """The words `<|im_start|>` and `<|im_end|>` are single tokens that mark where a
message begins and ends. A page cannot fake them: if it contains that text, it is spelled out in ordinary
characters.

Each turn, the past (the trunk) grows by a placeholder and a response only. In a longer episode, not ours:

![ids in the context over the turns of an episode](figures/compression.svg)"""])


def draws(walk) -> str:
    """The random numbers with which the two responses part, and where they fall."""
    chat, parting = walk.chat, walk.parting
    k = parting.token
    right, wrong = parting.right_ids[k], parting.wrong_ids[k]
    owns = []
    for token, (begin, end) in zip((right, wrong), walk.intervals):
        owns.append(f"{visible(token_text(chat, token))} owns [{begin:.6f}, {end:.6f})")
    same = "the recorded one"
    if walk.drawn[k] != right:
        same = "not the recorded one: this machine rounds differently"
    before = len(context(chat, parting.right, parting.turn))
    first = " ".join(visible(token_text(chat, token)) for token in parting.right_ids[:k])
    as_well = f" (the {before} of the context and {first})" if k else ""
    begin, end = walk.intervals[1]
    other = f"but wrote {visible(token_text(chat, wrong))}"
    if begin <= walk.other_draw < end:
        other = f"but its random number was {walk.other_draw:.6f}: {visible(token_text(chat, wrong))}"
    return f"""Remember the token with the arrow. `sample` lays the probabilities of all tokens side by side, in
the order of their ids, from 0 to 1, and takes the token in whose interval the random number falls. Here
{" and ".join(owns)}. The random number was {walk.draws[k]:.6f}, so `sample` takes token {walk.drawn[k]}
({same}).
Episode {parting.wrong.member} was at the same place, with the same {before + k} ids before it{as_well}, {other}."""


def cache_numbers() -> str:
    """What the figures of stops 3 and 4 show, in words."""
    computed, at_end = [], []
    turns_there = len(figures.expert_episode(figures.two_chats()[0]).turns)
    for chat in figures.two_chats():
        turns = figures.reuse(chat, load(answers.BASE))
        computed.append(sum(new for _, new in turns))
        at_end.append(figures.lengths(chat)[-1])
    return f"""At the next turn, the page just read has become a placeholder. So the cache holds only up to that
page: the placeholder and the response are computed again, then the new page. In the longer episode of the figure
({turns_there} turns, not ours) that makes {computed[0]} ids instead of {computed[1]} with whole pages. This is the price of short contexts, which save
memory and attention: the last has {at_end[0]} ids, not {at_end[1]}."""


def sampling(walk) -> str:
    chat, parting, turn = walk.chat, walk.parting, walk.turn
    rows = []
    for k, (token, logp) in enumerate(zip(turn.response_ids, turn.logps)):
        others = [(i, p) for i, p in walk.likeliest[parting.turn][k] if i != token]
        other = f"{visible(token_text(chat, others[0][0]))} {small(others[0][1])}"
        mark = " ←" if k == parting.token else ""
        rows.append([visible(token_text(chat, token)) + mark, token, small(logp), f"{math.exp(logp):.4f}", other])
    total = sum(turn.logps)
    return f"""## 4. What does it write, and how likely was that?

The policy writes one token after the other. Each time, the model gives a probability to every token of its
vocabulary, and a random number picks one. (Letters after an underscore name dimensions: B the responses that
are written together, V the vocabulary. In later stops, N is the tokens that train.)

{code(sample, "cdf_BV", "ids_B = torch.searchsorted")}

The response of turn {parting.turn + 1}. `log-prob` is the logarithm of the probability with which the token was
drawn. It is stored at that moment, and training will need it:

{table(["token", "id", "log-prob", "probability", "the likeliest other token"], rows)}

The log-probs add up to {total:.4f}. So this response, as a whole, had a probability of exp({total:.4f}) =
{math.exp(total):.4f}.

{draws(walk)}

The model does not read everything again at each turn. Keys and values of the common beginning are still there
from the turn before; only what follows it is computed:

![ids that each turn computes, and those that it keeps](figures/cache.svg)

{cache_numbers()}

Why does training not simply take the likeliest token? Because then all episodes of a group would be the same,
and there would be nothing to compare. The temperature T, {walk.cfg.temperature}, says how bold the sampling is:
logits are divided by it before the softmax."""


def changed_lines(before: str, after: str) -> str:
    compared = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(line for line in compared if line[0] in "-+")


def element_name(observation: str, number: str | None) -> str:
    """The text of an element of the page; "" for none."""
    found = re.search(rf">([^<>]+) <{number}>", observation)
    return found[1] if found else ""


def wrong_name(turn, element: str | None) -> str:
    """A sentence for a response that names another element than its call uses; "" for any other response."""
    named = re.search(r"# Element: (.+?) <", turn.response)
    used = element_name(turn.observation, element)
    if not named or not used or named[1] == used:
        return ""
    return (f" The response names “{named[1]}”, but element {element} is “{used}”. Only the call counts: nobody checks "
            "what the policy says about it.")


def calls_table(walk) -> tuple[str, int]:
    """What the episodes in the walk's context called there, and how they ended; (table, how many they are)."""
    parting, t = walk.parting, walk.parting.turn
    marks = {parting.right.turns[t].action: "right call", parting.wrong.turns[t].action: "wrong call"}
    h_j = context(walk.chat, parting.right, t)
    by_call = {}
    for tau in walk.trained:
        if t < len(tau.turns) and context(walk.chat, tau, t) == h_j:
            by_call.setdefault(tau.turns[t].action, []).append(tau)
    rows = []
    for call, episodes in by_call.items():
        said = "no call that can be read"
        if call:
            element = rollout.parse(episodes[0].turns[t].response).element
            name = element_name(episodes[0].turns[t].observation, element)
            notes = [note for note in (name, marks.get(call)) if note]
            said = f"`{call}`"
            if notes:
                said += f" ({'; '.join(notes)})"
        succeed = ", ".join(str(tau.member) for tau in episodes if tau.success)
        fail = ", ".join(str(tau.member) for tau in episodes if not tau.success)
        rows.append([said, succeed, fail])
    n = sum(len(episodes) for episodes in by_call.values())
    return table([f"call at turn {t + 1}", "successful episodes", "failed episodes"], rows), n


def acting(walk) -> str:
    parting = walk.parting
    right, t = parting.right, parting.turn
    call = rollout.parse(walk.turn.response)
    wrong_turn = parting.wrong.turns[t]
    method = rollout.ACTIONS[call.name].method
    if method is None:
        does = "It ends the episode."
    else:
        does = f"The browser runs `{method.__qualname__}` with {call.method_args()}."
    turn, last = walk.turn, t + 1 == len(right.turns)
    lines = [f"""## 5. What does the response do?

The response is text again, and a parser finds the one call in it. No text of a policy is ever run as code:

{fenced(turn.response)}

{code(rollout.take_turns, "call = parse", "await session.execute")}

`parse` returns `{call}`. {does} (The action `exit` ends the episode.){wrong_name(turn, call.element)}"""]
    if not last:
        after = right.turns[t + 1]
        where = f"The browser goes from `{turn.url}` to `{after.url}`."
        if after.url == turn.url:
            where = f"The address stays `{turn.url}`."
        lines.append(f"""{where} Turn {t + 2} begins with this page:

![the page at turn {t + 2}](walk/turn-{t + 2}.jpg)

In the text that the policy reads, these lines were removed (-) and added (+):

{fenced(changed_lines(turn.observation, after.observation), "diff")}""")
    why = "; ".join(detail for _, passed, detail in parting.wrong.checks if not passed)
    calls, n = calls_table(walk)
    who = f"{n} of the {len(walk.trained)} episodes"
    if n == len(walk.trained):
        who = f"All {n} episodes"
    lines.append(f"""Episode {parting.wrong.member}, which parted from ours at the arrow, wrote

{fenced(wrong_turn.response)}

At its end, the check fails: {why}. {who} were in this very context. These are their calls, and how the
episodes end:

{calls}

Only successful episodes made our call there, the *right call*, and only failed ones that of episode
{parting.wrong.member}, the *wrong call*.""")
    return "\n\n".join(lines)


def all_alike(episodes: list[Trajectory]) -> bool:
    """Whether all wrote the same responses, token for token."""
    written = [[turn.response_ids for turn in tau.turns] for tau in episodes]
    return all(responses == written[0] for responses in written)


def rewards(walk) -> str:
    right = walk.parting.right
    rows = []
    for tau in walk.group:
        marks = {right.member: " (ours)", walk.parting.wrong.member: " (wrong call)"}
        tokens = sum(len(turn.response_ids) for turn in tau.turns)
        last = "no call that can be read"
        if tau.turns and tau.turns[-1].action:
            last = f"`{tau.turns[-1].action}`"
        if tau.answer is None:
            last += ", no exit"
        reward = f"{tau.reward:.0f}"
        if tau.status != "ok":
            reward = "none: the browser failed"
        rows.append([f"{tau.member}{marks.get(tau.member, '')}", len(tau.turns), tokens, last, reward])
    checks = []
    for name, passed, detail in right.checks:
        verdict = "yes" if passed else "no"
        checks.append(f"- {name}: {verdict}. {detail}")
    checks = "\n".join(checks)

    remarks = []
    for tau in walk.trained:
        if tau.answer == "N/A":
            remarks.append(f"Episode {tau.member} gave up: `N/A` says that the task cannot be done.")
    successes = [tau for tau in walk.trained if tau.success]
    if len(successes) > 1 and all_alike(successes):
        likely = math.exp(sum(sum(turn.logps) for turn in right.turns))
        remarks.append(f"The {len(successes)} successes are the same, token for token. This is no accident: the "
                       "policy is sure of nearly every token. The probabilities of all tokens of our episode, "
                       f"multiplied, are {likely:.4f}.")
    remarks = "\n\n" + " ".join(remarks) if remarks else ""
    return f"""## 6. Did it work?

When an episode ends, the check of stop 1 runs once. For ours:

{checks}

The result is the *reward*: 1 if everything holds, else 0. There is no other signal. Nobody says which click was
good, and no gradient runs through the browser or the check. All {len(walk.group)} episodes of the group:

{table(["episode", "turns", "tokens written", "last call", "reward r"], rows)}{remarks}"""


def common_turns(walk) -> int:
    """How many turns, from the first on, are the same in all episodes that train."""
    n = 0
    while all(n < len(tau.turns) for tau in walk.trained):
        seen = [context(walk.chat, tau, n) + tau.turns[n].response_ids for tau in walk.trained]
        if any(ids != seen[0] for ids in seen):
            break
        n += 1
    return n


def advantage(walk) -> str:
    r = [tau.reward for tau in walk.trained]
    n = len(r)
    mean = sum(r) / n
    squares = sum((value - mean) ** 2 for value in r)
    std = math.sqrt(squares / (n - 1))
    added = " + ".join(f"{value:.0f}" for value in r)
    best, worst = max(r), min(r)
    of_successes = f"{r.count(best)} x ({best:.0f} - {mean:.6g})^2"
    of_failures = f"{r.count(worst)} x ({worst:.0f} - {mean:.6g})^2"
    by_hand = f"""mean = ({added}) / {n} = {mean:.6g}
std  = sqrt(({of_successes} + {of_failures}) / {n - 1}) = {std:.6f}
A    = ({best:.0f} - {mean:.6g}) / {std:.6f} = {exact((best - mean) / std)}   for a success
A    = ({worst:.0f} - {mean:.6g}) / {std:.6f} = {exact((worst - mean) / std)}   for a failure"""
    computed = ", ".join(exact(tau.advantage) for tau in walk.trained)
    common = common_turns(walk)
    cancels = ""
    if common:
        which = "turn 1 is" if common == 1 else f"turns 1 to {common} are"
        cancels = (f"What all episodes have in common cancels: here {which} the same in all {n}, whose advantages add up "
                   "to 0. (Exactly so while all tokens weigh the same and none is clipped; both come in stop 9.)")
    return f"""## 7. How good was it, compared with the others?

A reward of 1 says little by itself: perhaps the task is easy. So each episode is compared with its group. The
*advantage* $A_i$ says by how many standard deviations its reward lies above the group's mean:

{code(mgrpo.group_advantages, "def ", "return valid")}

The *baseline* is the mean, `r.mean()`; the *released code* is that of the method's paper, WebAgent-R1. An
episode that the site or the browser broke is not valid: it says nothing about the policy, so it neither
counts in the mean nor trains. `std` divides by n - 1. By hand:

{fenced(by_hand)}

By the function, in the order of the episodes: {computed}.

All tokens of an episode get its advantage. This is crude: a needless click of a successful episode is praised
like the decisive one. (There is one exception, which no success of this group needs: a response that failed, such as
one in which no action could be read, earns nothing from the success that followed. `mgrpo.withhold_credit` sees to
it.) Why does pushing all tokens by one advantage raise the mean reward? Think of one choice at one place, over many groups. Each
time the choice is made, its log-prob is pushed by the advantage of that episode: up after a success, down after a
failure. Over many groups the sum is positive only if episodes with this choice end better than those without.
{cancels}

If all rewards are equal, the group teaches nothing, and the function returns no episode:

![the advantage by the number of successes in a group of eight](figures/advantage.svg)"""


def training_row(walk) -> str:
    row = walk.rows[walk.row_of(walk.parting.right, walk.parting.turn)]
    n_tokens = sum(one.n_action for one in walk.rows)
    seen = sum(len(one.ids) for one in walk.rows)
    return f"""## 8. Which tokens train?

Every turn of the group becomes one row: the ids that the policy saw, then the ids that it wrote. Ours has
{len(row.ids)} ids: the trunk's {row.n_context - len(row.turn.message_ids)}, then the page and the response of this
turn. A mask marks the {row.n_action} ids of the response. The model reads all ids; the marked ones are the targets of
the loss:

![the row of this turn, to scale](walk/row.svg)

{code(compress.trajectory_rows, "ids = ", "tau=trajectory")}

`turn.advantage` is 0 unless you change the method (stop 12). (`withhold_credit` comes later: it works on the rows.)

The group has {len(walk.rows)} rows, and {n_tokens} of their ids train. Many rows begin alike: those of an episode, and
those of episodes that read the same pages. Training stores what they have in common once and lets every row attend to
it: {walk.passes[0]['packed_tokens']:,.0f} ids instead of {seen:,}, the same gradient. ([The picture of a whole
episode](packing.svg) shows how.)

No token of a page is a target of the loss: the policy should learn what to write after a page, not how to write
pages. But the response attends to the page, and its gradient flows back through it. Past responses are
context in this row; each is trained in its own row, where it stands under the page that it answered."""


def per_token(walk, done: int, row: Row, k: int) -> dict:
    """What mgrpo_loss makes of one token after `done` updates. With weight 1 the numbers are those of the token alone."""
    logp_1 = torch.tensor([walk.logps[done][walk.rows.index(row)][k]], dtype=torch.float64, requires_grad=True)
    old_1 = torch.tensor([row.logps[k]], dtype=torch.float64)
    loss, measured = mgrpo.mgrpo_loss(logp_1, old_1, logp_1.detach(), A_N=row.advantage, weight_N=1.0,
                                      eps=walk.cfg.eps, beta=walk.cfg.beta)
    loss.backward()
    return {"rho": (logp_1 - old_1).exp().item(), "counts": -loss.item(), "slope": -logp_1.grad.item(),
            "clipped": bool(measured["clip_frac"]), "old": old_1.item(), "now": logp_1.item()}


MOVED = 1e-3  # a log-prob that has changed by less may be rounding


def place(walk, row: Row) -> str:
    return f"episode {row.tau.member}, turn {row.tau.turns.index(row.turn) + 1}"


def chosen_tokens(walk, done: int) -> list[tuple[str, Row, int]]:
    """(which one it is, row, token): the two where the responses part, and up to three others.

    The one whose rho is furthest from 1, the next one of the right response that keeps its gradient, and the
    one that moved furthest against its advantage. The last two are left out where there is none.
    """
    parting = walk.parting
    both = (parting.right_ids[parting.token], parting.wrong_ids[parting.token])
    right_row = walk.rows[walk.row_of(parting.right, parting.turn)]
    wrong_row = walk.rows[walk.row_of(parting.wrong, parting.turn)]
    out = [("right call", right_row, parting.token), ("wrong call", wrong_row, parting.token)]

    furthest, against = (0.0, None, 0), (MOVED, None, 0)
    for row in walk.rows:
        for k in range(row.n_action):
            moved = math.log(per_token(walk, done, row, k)["rho"])
            if abs(moved) > furthest[0] and row.turn.response_ids[k] not in both:
                furthest = (abs(moved), row, k)
            if abs(moved) > against[0] and moved * row.advantage < 0:
                against = (abs(moved), row, k)
    _, row, k = furthest
    out.append((f"{place(walk, row)}: its rho is furthest from 1", row, k))

    for k in range(parting.token + 1, right_row.n_action):
        if not per_token(walk, done, right_row, k)["clipped"]:
            out.append(("right call, a later token: it still counts", right_row, k))
            break
    _, row, k = against
    if row is not None:
        out.append((f"{place(walk, row)}: it moved against its A", row, k))
    return out


def norms(walk) -> str:
    """The three weights of a token, with the figure's example for the paper's."""
    n_tokens = sum(row.n_action for row in walk.rows)
    success = figures.made_up(1.0, figures.SUCCESS)
    failure = figures.made_up(0.0, figures.FAILURE)
    rows = figures.weighed("paper", success, failure)
    first_responses = (rows[0], rows[len(figures.SUCCESS)])
    short, long = (round(1 / (2 * row.weight)) for row in first_responses)  # two episodes weigh 1/2 each
    return f"""Last, the *weight* of a token in the loss. This walk uses `--loss-norm {walk.cfg.loss_norm}`, the default:
all tokens weigh the same, `1 / {n_tokens} = {1 / n_tokens:.6f}`. Below, `n_groups` counts the groups that train and
`n_tokens` all their tokens; `group` holds the episodes of one, `rows` the turns of an episode, `row.n_action` is the
number of tokens of a response, and `longest` the most tokens that an episode can write:

{code(mgrpo.weighted_rows, "if cfg.loss_norm ==", "row.weight = 1 / (n_groups * len(group) * longest)")}

`paper` is the norm of the paper (WebAgent-R1, arXiv 2505.16421): the mean over an episode's turns of the mean
over a turn's tokens. All episodes weigh the same. In the figure, the success has {len(figures.SUCCESS)} turns and its
first response {figures.SUCCESS[0]} tokens, so each of them weighs 1/{short} of the episode; the failure has
{len(figures.FAILURE)} turns, and each of its first {figures.FAILURE[0]} tokens weighs only 1/{long}. `constant` weighs
every token of a step alike, whatever the lengths of the episodes, and a longer episode as a whole weighs more. `token`
does so too, but its weight falls when the step's episodes are long:

![which tokens weigh what in a short success and a long failure, with three norms](figures/loss-norms.svg)"""


def clip_cases(eps: float) -> str:
    """What min picks outside [1 - eps, 1 + eps], by mgrpo_loss."""
    rows = []
    for A, sign in ((1.0, "A > 0"), (-1.0, "A < 0")):
        for rho, place in ((1 + 2 * eps, f"rho > {1 + eps:g}"), (1 - 2 * eps, f"rho < {1 - eps:g}")):
            value, slope = figures.surrogate(rho, A, eps)
            picks, gradient = "rho A", "rho A: the token moved the wrong way"
            if slope == 0:
                picks, gradient = f"{value / A:g} A, the clipped value", "0: the token moved enough"
            rows.append([sign, place, picks, gradient])
    return table(["A", "rho", "min picks", "gradient"], rows)


def ratio(walk) -> str:
    done = len(walk.passes) - 1
    cfg = walk.cfg
    rows = []
    chosen = chosen_tokens(walk, done)
    _, far, _ = chosen[2]  # the row of the token whose rho is furthest from 1
    for which, row, k in chosen:
        said = per_token(walk, done, row, k)
        gradient = signed(said["slope"])
        if said["clipped"]:
            gradient = "0: ended"
        token = visible(token_text(walk.chat, row.turn.response_ids[k]))
        rows.append([f"{token} ({which})", f"{said['old']:.6f}", f"{said['now']:.6f}", f"{said['rho']:.6f}",
                     exact(row.advantage), signed(said["counts"]), gradient])
    n_tokens = sum(row.n_action for row in walk.rows)
    outside = walk.passes[done]["clip_frac"] * n_tokens
    return f"""## 9. What does one token add?

We want to make the tokens of good episodes likelier and those of bad ones less likely. The obvious loss is
$-A \\log \\pi$ for each token: a cross-entropy whose weight may be negative. But playing {len(walk.group)}
episodes is slow, so a *step* of training plays, then makes {len(walk.passes)} updates with the same tokens. After the
first update, the policy is no longer the one that drew the tokens. A token that the new policy likes twice as much
should count twice. So each token counts $\\rho$ times:

$$\\rho = \\frac{{\\pi(\\text{{token}})}}{{\\pi_\\text{{old}}(\\text{{token}})}} = \\exp(\\log \\pi - \\log \\pi_\\text{{old}})$$

It adds $\\rho A$, times a weight, to the *objective*, which is minus the loss. So an average over tokens that the old
policy drew becomes an average over tokens of the new one: $\\sum \\pi A = \\sum \\pi_\\text{{old}} \\rho A$, over all tokens of the
vocabulary, where A is the advantage of an episode that goes on with the token. (It corrects the token, not the context before it.) The gradient
of $\\rho A$ is $\\rho A$ times the gradient of $\\log \\pi$. At $\\rho = 1$ that is exactly the gradient of $A \\log
\\pi$: the first update is a weighted cross-entropy.

*Clipping* stops pushing a token once it has moved by more than eps = {cfg.eps} in the direction that its
advantage asks for:

{code(mgrpo.mgrpo_loss, "rho_N", "surrogate_N")}

From {1 - cfg.eps:g} to {1 + cfg.eps:g} both values are rho A. Outside, `min` takes the smaller one:

{clip_cases(cfg.eps)}

Before the first update, training and sampling are the same policy, so $\\rho = 1$. For this, training has to
divide the logits by the same temperature, {cfg.temperature}. Over all {n_tokens} tokens here, the stored
log-prob and the one that training computes differ by {walk.gap:.1e} at most: rounding. (Training logs the mean
difference at every step, as `logp_gap`: a bug in sampling or training would show there.)

After {done} updates it looks different. The table shows the two tokens where the calls part, and some others:

{table(["token", "old log-prob", "new", "rho", "A", "min(rho A, clip(rho) A)", "gradient"], rows)}

The last column is the gradient of min(...) by the token's log-prob: rho A while the token counts, 0 once the clip
has ended it, since the clipped value does not depend on the policy. That happens to {outside:.0f} of the {n_tokens}
tokens. The third row is from this response ({place(walk, far)}):

{fenced(far.turn.response)}

![what a token adds to the objective, over rho](figures/clip.svg)

{norms(walk)}"""


def loss_table(walk, done: int) -> tuple[str, float]:
    """The loss before an update as a sum over episodes; (table, loss)."""
    rows, total = [], 0.0
    n_tokens = sum(row.n_action for row in walk.rows)
    for tau in walk.trained:
        counts, tokens = 0.0, 0
        for row in walk.rows:
            if row.tau is tau:
                tokens += row.n_action
                counts += sum(per_token(walk, done, row, k)["counts"] for k in range(row.n_action))
        rows.append([tau.member, f"{tau.reward:.0f}", exact(tau.advantage), tokens, signed(counts)])
        total += counts
    rows.append(["sum", "", "", n_tokens, signed(total)])
    return table(["episode", "r", "A", "tokens", "sum of min(...)"], rows), -total / n_tokens


def loss(walk) -> str:
    last = len(walk.passes) - 1
    n_tokens = sum(row.n_action for row in walk.rows)
    first_table, first_loss = loss_table(walk, 0)
    last_table, last_loss = loss_table(walk, last)
    return f"""## 10. Can I check the loss with a pocket calculator?

Yes. In the first update every $\\rho$ is 1, so an episode adds its advantage times its number of tokens. (A is
rounded here, so your last digit may differ by one.)

{first_table}

{code(mgrpo.mgrpo_loss, "gain_N = ", "loss = ")}

The weight is 1 / {n_tokens} for all tokens. beta = {walk.cfg.beta:g} leaves out the last term, a penalty for
moving away from the policy that training began with. So the loss is minus the sum divided by {n_tokens}:
{first_loss:.6f}. What `MGRPO.update` returned for the first update: **{walk.passes[0]['loss']:.6f}**.

This value says little. The advantages of a group add up to 0, so with $\\rho = 1$ and episodes of equal length the loss
would be 0: it only says whether successes or failures are longer. Its gradient is what counts.
Before update {last + 1} the ratios have moved:

{last_table}

Minus the sum divided by {n_tokens}: {last_loss:.6f}. By `MGRPO.update`: **{walk.passes[last]['loss']:.6f}**."""


def unsure_tokens(walk) -> list[tuple[Row, int]]:
    """(row, token) of all that were drawn with a probability below 0.99."""
    out = []
    for row in walk.rows:
        out += [(row, k) for k in range(row.n_action) if math.exp(row.logps[k]) < 0.99]
    return out


def fewer_pulls(walk, unsure: list[tuple[Row, int]]) -> str:
    """What has become of the tokens that pull much before the last update; "" if the clip has ended none."""
    last = len(walk.passes) - 1
    n_tokens = sum(row.n_action for row in walk.rows)
    common = common_turns(walk)
    ended, cancelling, left = 0, 0, 0
    cancels = True  # what all episodes have in common, unless the clip ends it in some of them
    for row, k in unsure:
        in_common = row.tau.turns.index(row.turn) < common
        if per_token(walk, last, row, k)["clipped"]:
            ended += 1
            cancels = cancels and not in_common
        elif in_common:
            cancelling += 1
        else:
            left += 1
    if not ended:
        return ""
    shared = ""
    if cancelling and cancels:
        turns = "turn 1" if common == 1 else f"turns 1 to {common}"
        shared = (f" Another {cancelling} are in {turns}, where the pulls of all episodes cancel (stop 7). "
                  f"That leaves {left}.")
    return (f"The clip leaves most of the {n_tokens} tokens alone. But only {len(unsure)} of them pull much, and before "
            f"update {last + 1} it has ended {ended} of these.{shared} This is why the norm falls.")


def moving_on(walk) -> str:
    """Why the two tokens move after the clip has ended both, if it has."""
    parting, chat = walk.parting, walk.chat
    both = []
    for tau in (parting.right, parting.wrong):
        row = walk.rows[walk.row_of(tau, parting.turn)]
        both.append(per_token(walk, 1, row, parting.token))
    right = visible(token_text(chat, parting.right_ids[parting.token]))
    wrong = visible(token_text(chat, parting.wrong_ids[parting.token]))
    if not all(said["clipped"] for said in both):
        return ""
    coasting = " and ".join(small(p) for p in walk.coasting)
    reached = [chance.right for chance in walk.chances[2:]]
    differ = max(abs(p - alone) for p, alone in zip(reached, walk.coasting))
    others = "add next to nothing here" if differ < 1e-3 else "make the difference"
    return f"""After update 1, rho is {both[0]['rho']:.4f} for {right} and {both[1]['rho']:.4f} for {wrong}: the clip
has ended both, and they pull no more. They move on all the same, since AdamW keeps a running mean of past gradients. If
all gradients were 0 after update 1, AdamW alone would carry {right} from {small(walk.chances[1].right)} to {coasting}.
{taken_over(walk)} The table has {" and ".join(small(p) for p in reached)}: other tokens, which change the same weights,
{others}. The clip takes away a pull; it does not hold a token."""


def taken_over(walk) -> str:
    """Who gains while the right token loses, if it does."""
    if walk.coasting[-1] > walk.chances[1].right:
        return ""
    gaining = " and ".join(f"{visible(token_text(walk.chat, token))} ({small(p)})" for token, p in walk.gaining)
    right = visible(token_text(walk.chat, walk.parting.right_ids[walk.parting.token]))
    return (f"{right} falls, although update 1 raised it, because the same step in the weights raises other tokens even more: "
            f"in the end {gaining}.")


def unlikely(walk) -> str:
    """Why the right response may stay unlikely although its call has become likely."""
    parting = walk.parting
    row = walk.row_of(parting.right, parting.turn)
    k = min(range(len(parting.right_ids)), key=lambda k: walk.logps[-1][row][k])
    p = math.exp(walk.logps[-1][row][k])
    if k == parting.token or p > 0.5:
        return ""
    odd = visible(token_text(walk.chat, parting.right_ids[k]))
    return (f"The right response as a whole stays unlikely because of its token {odd}, whose probability is {small(p)} in "
            "the end. Other wordings make the same call, and the check does not ask for the wording.")


def step(walk) -> str:
    chat, parting, cfg, slope = walk.chat, walk.parting, walk.cfg, walk.slope
    right = visible(token_text(chat, parting.right_ids[parting.token]))
    wrong = visible(token_text(chat, parting.wrong_ids[parting.token]))
    A = parting.right.advantage
    scale = slope["weight"] * A / cfg.temperature
    p_right, p_wrong = slope["p_right"], slope["p_wrong"]
    by_hand = f"""d loss / d logit of the right token = -weight A / T (1 - p_right)
                                    = -{scale:.6f} x (1 - {p_right:.4f}) = {-scale * (1 - p_right):+.6f}
d loss / d logit of the wrong token = +weight A / T p_wrong
                                    = +{scale:.6f} x {p_wrong:.4f} = {scale * p_wrong:+.6f}"""
    rows = []
    for done, chance in enumerate(walk.chances):
        name = f"after update {done}" if done else "before"
        rows.append([name, small(chance.right), small(chance.wrong), small(math.exp(chance.right_response)),
                     small(math.exp(chance.wrong_response))])
    n_tokens = sum(row.n_action for row in walk.rows)
    updates = []
    for i, metrics in enumerate(walk.passes):
        ended = metrics["clip_frac"] * n_tokens
        updates.append([i + 1, f"{metrics['loss']:.6f}", f"{metrics['grad_norm']:.4f}", f"{ended:.0f}"])

    last = len(walk.passes) - 1
    unsure = unsure_tokens(walk)
    fewer = ""
    if walk.passes[last]["grad_norm"] < walk.passes[0]["grad_norm"]:
        fewer = fewer_pulls(walk, unsure)
    warming = ""
    if walk.lr == mgrpo.warmup_linear(0, cfg):
        warm = round(cfg.warmup * cfg.steps)
        warming = f"; it rises to {cfg.lr:g} over the first {warm} of {cfg.steps} steps"
    moved = {}
    for row, before, after in zip(walk.rows, walk.logps[0], walk.logps[-1]):
        changes = [now - then for now, then in zip(after, before)]
        moved.setdefault(row.advantage > 0, []).extend(changes)
    praised = sum(moved[True]) / len(moved[True])
    blamed = sum(moved[False]) / len(moved[False])
    worst = ""
    if praised < 0:
        fallen = min(moved[True])
        rest = (sum(moved[True]) - fallen) / (len(moved[True]) - 1)
        worst = (f" The first number is negative because of a single token, which changed by {fallen:+.2f}; the mean of the "
                 f"other {len(moved[True]) - 1} is {rest:+.4f}. Most of them had a probability near 1 before, and could not "
                 "gain.")
    on = moving_on(walk)
    return f"""## 11. What does the gradient do?

Look at the arrow of stop 4 once more. The token {right} of our episode has A = {exact(A)}. In the first update
$\\rho = 1$, so the derivative of the loss by $\\log p$ is minus weight times A. The derivative of $\\log p$ by
a logit is 1 - p for the token itself, and -p' for another token with probability p'; both are divided by the
temperature T. So this one token pulls at the logits with

{fenced(by_hand)}

Autograd through `mgrpo_loss` says {slope['right']:+.6f} and {slope['wrong']:+.6f}. The optimizer goes against
it: the right token's logit rises, the wrong token's falls. Episode {parting.wrong.member} pulls in the same
direction, since its token {wrong} has a negative advantage.

Most tokens hardly pull at all: where p is 1, the factor 1 - p is 0. Only {len(unsure)} of the {n_tokens} tokens
of the group were drawn with a probability below 0.99. There the policy made its decisions, and there it learns.

All of them pull at once, at weights that they share. If the norm of the gradient exceeds {cfg.max_grad_norm:g}, the gradient
is scaled to norm {cfg.max_grad_norm:g}. (This has nothing to do with the clip of stop 9. It keeps one large gradient from
ruling AdamW's running means.) AdamW uses the scaled gradient; the table shows the norm before scaling. The learning rate here is that of the first step, {walk.lr:g}{warming}:

{code(bc.optimizer_step, "grad_norm = ", "optimizer.step()")}

{table(["update", "loss", "gradient norm", "tokens ended by the clip"], updates)}

{fewer}

And this is what it is all for. The probability of the two tokens where the calls part, and of the two whole
responses:

{table(["", f"right token {right}", f"wrong token {wrong}", "right response", "wrong response"], rows)}

{unlikely(walk)}

{on}

From before update 1 to after update {last + 1}, the log-probs of the tokens of successful episodes changed by
{praised:+.4f} in the mean, those of the tokens of failed ones by {blamed:+.4f}.{worst}

One group of one task moves the policy this far because AdamW's first updates change every weight by about the
learning rate, however small its gradient is. In training, many groups share an update, so mainly
what they agree on remains."""


def after(walk) -> str:
    return f"""## 12. And then?

That was one group. A step of `mgrpo.py` plays {mgrpo.Config.batch} tasks, {mgrpo.Config.G} episodes each, and
makes {mgrpo.Config.updates_per_batch} updates with all groups whose rewards differ. `make demo` makes
{mgrpo.Config.steps} steps. This turns a step's episodes into rows:

{code(mgrpo.MGRPO.training_rows, "kept = []", "rows = weighted_rows")}

`self` is an object of the class `mgrpo.MGRPO`, which holds the parts of the method: `advantages` there calls
the `group_advantages` of stop 7 and does nothing else. `withhold_credit` follows these lines. `mgrpo.main`
holds the loop around them. A *fork* is a file that overrides some of these parts and runs the same loop. This is a
whole one; it pays less for detours:

{fenced(answers.EXAMPLE.rstrip(), "python")}

`tau.success` is what the check says, 0 or 1. The six files are `mgrpo.py` and the five that it uses: `model.py`,
`compress.py`, `rollout.py`, `evaluate.py` and `bc.py`. `start` is the checkpoint that is opened without `--model`.
Saved as `forks/short.py`, it trains with `python forks/short.py --out runs/short`; without `--out` it writes to
`runs/mgrpo`, as `mgrpo.py` does. The [README](../README.md) has the same fork with a folder and a flag of its own.

`forks/` holds other methods, each of which changes a few functions: other advantages (`forks/gigpo.py`), a critic
(`forks/critic.py`), other losses (`forks/losses.py`). A critic learns to predict how well an episode will go, and
its prediction replaces the group's mean. The next thing to read is `mgrpo.py`; its opening repeats the formula of
stop 9."""


# ---------------------------------------------------------------------------------------- the picture

ROW_STYLE = STYLE.replace("</style>", """.off { fill: #ece8e0; } .strong { font-weight: 600; }
.middle { text-anchor: middle; } @media (prefers-color-scheme: dark) { .off { fill: #34302c; } }
</style>""")


def brace(x: float, end: float, y: float, text: str) -> list[str]:
    return [f'<path class="line" d="M{x:.1f} {y + 5}v-5H{end - 1:.1f}v5"/>',
            f'<text class="middle" x="{(x + end) / 2:.1f}" y="{y - 7}">{text}</text>']


def row_picture(walk) -> str:
    """The training row of the walk's turn, to scale, with its mask below."""
    chat, tau, t = walk.chat, walk.parting.right, walk.parting.turn
    row = walk.rows[walk.row_of(tau, t)]
    width, left, right, top = 850, 92, 24, 92
    scale = (width - left - right) / len(row.ids)

    parts = row_parts(chat, tau, t)
    assert count(parts) == len(row.ids)
    past_ids = len(trunk(chat, tau, t))

    fork = left + past_ids * scale
    end = width - right
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 254" width="{width}" height="254">',
           ROW_STYLE, f'<rect class="paper" width="{width}" height="254" rx="8"/>']
    x = 20
    legend = {"system": "system prompt", "placeholder": "placeholder", "context": "past response", "page": "page",
              "trained": "response of this turn"}
    for kind, name in legend.items():
        svg.append(f'<rect class="{kind}" x="{x}" y="16" width="12" height="12" rx="2"/>')
        svg.append(f'<text class="soft" x="{x + 17}" y="26">{name}</text>')
        x += 40 + 6.6 * len(name)
    svg += brace(left, fork, top - 12, f"trunk, {past_ids} ids")
    svg += brace(fork, end, top - 12, f"this turn, {len(row.ids) - past_ids} ids")
    svg.append(f'<text x="20" y="{top + 18}">row.ids</text>')
    svg += bars(left, top, parts, scale, height=26)
    x = left
    for kind, n in parts:
        svg.append(f'<text class="soft middle" x="{x + n * scale / 2:.1f}" y="{top + 44}">{n}</text>')
        x += n * scale
    svg.append(f'<text x="20" y="{top + 76}">trains?</text>')
    svg += bars(left, top + 62, [("off", len(row.ids) - row.n_action), ("trained", row.n_action)], scale, height=20)
    svg.append(f'<text class="soft" x="{left + 8}" y="{top + 76}">no: read, not trained</text>')
    middle = end - row.n_action * scale / 2
    svg.append(f'<text class="soft" style="text-anchor:end" x="{end}" y="{top + 102}">yes: {row.n_action} ids, '
               f'each with A = {row.advantage:+.4f} and weight {row.weight:.6f}</text>')
    svg.append(f'<path class="line" d="M{middle:.1f} {top + 84}v5"/>')
    svg.append(f'<text class="soft" x="{left}" y="{top + 126}">numbers below the bar are tokens; the response '
               "attends to everything on its left</text>")
    svg.append(f'<text class="soft" x="{left}" y="{top + 144}">a past response ends with what the chat format puts '
               "behind it: the end of a line</text>")
    return "\n".join([*svg, "</svg>\n"])


def exercises(walk) -> str:
    given = answers.material(walk.record, answers.BASE)
    lines = ["""## Exercises

Answer first, then run the command, then unfold. The commands take the episodes of this walk, but you do not have
its clone. So they score the episodes again with `worlds/base`, the small model that the clone was made from, and take
the result as the log-probs of sampling. rho then starts at 1, but log-probs and gradients are not those above.
"""]
    for number, exercise in enumerate(answers.EXERCISES, 1):
        command = f"python tests/tools/answers.py {number}"
        solution = ""
        if exercise.compute is answers.own_fork:
            command += " forks/mine.py"
            solution = "\n\n" + fenced(answers.SOLUTION.rstrip(), "python")
        computed = fenced(exercise.compute(given))
        numbers = ""
        if exercise.table:
            numbers = fenced(exercise.table(given)) + "\n\n"
        lines.append(f"""**{number}.** {exercise.question}

{numbers}    {command}

<details><summary>Answer</summary>

{exercise.answer}{solution}

{computed}

</details>
""")
    return "\n".join(lines).rstrip()


STOPS = (opening, person, policy_reads, history, sampling, acting, rewards, advantage, training_row, ratio,
         loss, step, after, exercises)


NO_BREAK = "\0"  # stands for a space at which no line may end


def unbroken(found: re.Match) -> str:
    return found[0].replace(" ", NO_BREAK)


def filled(markdown: str, width: int = 120) -> str:
    """Breaks the lines of paragraphs anew, since the length of their numbers is not known beforehand."""
    out = []
    code_block = False
    for block in re.split(r"(\n\n+)", markdown):
        outside = not code_block
        if block.count("```") % 2:
            code_block = not code_block
        prose = outside and re.match(r"[A-Za-z*`(\[\"]", block) and "```" not in block and "<details>" not in block
        if prose:
            block = " ".join(block.split())
            block = re.sub(r"\$[^$]+\$|`[^`]+`|\]\([^)]+\)", unbroken, block)
            block = textwrap.fill(block, width, break_long_words=False, break_on_hyphens=False)
            block = block.replace(NO_BREAK, " ")
        out.append(block)
    return "".join(out)


def text(walk) -> str:
    return filled("\n\n".join(stop(walk) for stop in STOPS)) + "\n"
