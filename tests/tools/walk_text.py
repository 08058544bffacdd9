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
from packing import STYLE, bars

import answers
import bc
import compress
import evaluate
import mgrpo
import rollout
from compress import PLACEHOLDER, Chat, Row, Trajectory, context, past, trunk
from model import sample

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
    """Token by token, with a bar between two of them."""
    lines = [""]
    for token in ids:
        text = token_text(chat, token)
        ends_line = "\n" in text
        piece = text.replace("\n", "⏎") + "│"
        if len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
        if ends_line:
            lines.append("")
    return "\n".join(line for line in lines if line)


def signed(number: float) -> str:
    return f"{number:+.4f}"


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
its weights. You need PyTorch. You need no reinforcement learning, and you need not know how browsers work. It
takes about twenty minutes. [walk.html](walk.html) is the same episode to play with: save the file and open it
in a browser.

Six words are enough. The *policy* is the language model. A *task* is a sentence and a check. An *episode* is
one attempt at a task. A *turn* is one page and the policy's *response* to it, which holds one action. A *group*
is {record['G']} episodes of the same task.

The policy here is `{record['model']}`, a model of {walk.parameters / 1e6:.1f} million parameters after behavior
cloning: it has imitated a few demonstrations, and now it is to get better by itself. (`make demo` leaves such a
clone.) Nothing below is typed in:

    python tests/tools/walk.py --model {record['model']}

plays the group, computes each number with the functions that it shows, and writes this page. It takes the first
training task (number {record['number']}, counted from 0) in which a success and a failure can be compared well;
the tool's first lines state the rule. (Another machine may round differently, and then sample other
episodes.)"""


def person(walk) -> str:
    tau, t = walk.parting.right, walk.parting.turn
    check = {name: value for name, value in tau.task["eval"].items() if value}
    return f"""## 1. What does a person see?

The task, in words:

> {tau.task['intent']}

The browser at turn {t + 1} of episode {tau.member}, the one that we follow. The frame shows where it is about
to click:

![the page at turn {t + 1}, with a frame around the element that the action is for](walk/turn-{t + 1}.jpg)

A program decides at the end whether the task is done. This is all that it checks:

{fenced(json.dumps(check, indent=1), "json")}"""


def policy_reads(walk) -> str:
    chat, turn = walk.chat, walk.turn
    page_tokens = len(chat.encode(turn.observation))
    return f"""## 2. What does the policy read?

A language model reads text. So the page becomes text, {page_tokens} tokens here. Only elements that one can use
have tags, and each tag ends with a number, the element's id:

{fenced(turn.observation, "html")}

{code(rollout.take_turns, "# 1) Observe", "page = f")}

If the last action failed, the page opens with a line that says why. To the policy, its mistakes are text as
well."""


def parts_of(chat: Chat, tau: Trajectory, t: int) -> list[tuple[str, list[int]]]:
    """h_t of a turn, cut into (what it is, its ids)."""
    parts = [("system prompt", chat.system_ids())]
    for k in range(t):
        placeholder = chat.user_ids(tau.task, k, PLACEHOLDER)
        parts.append((f"turn {k + 1}: its page, replaced by a placeholder", placeholder))
        parts.append((f"turn {k + 1}: its response, as sampled", past(chat, tau, k)[len(placeholder):]))
    parts.append((f"turn {t + 1}: the page, whole", tau.turns[t].observation_ids))
    return parts


def history(walk) -> str:
    chat, tau, t = walk.chat, walk.parting.right, walk.parting.turn
    blocks = []
    for name, ids in parts_of(chat, tau, t):
        blocks.append(f"*{name}* ({len(ids)} tokens)\n\n{fenced(spelled(chat, ids))}")
    h_t = context(chat, tau, t)
    whole = len(chat.system_ids())
    for k in range(t):
        whole += len(tau.turns[k].observation_ids) + len(chat.past_response(tau.turns[k].action_ids))
    whole += len(tau.turns[t].observation_ids)
    return "\n\n".join([f"""## 3. What exactly stands before the response?

The policy does not see the page alone. It sees the history $h_t$, one list of {len(h_t)} token ids. Every past
response is in it; every past page is replaced by the placeholder `{PLACEHOLDER}`. This is *dynamic context
compression*. With whole pages the list would have {whole} ids, and the gap grows with every turn.

{code(compress.past, "turn = trajectory", "return")}

`trunk` puts the system prompt and the past turns one after the other, and then comes the page:

{code(compress.context, "return", "return")}

Token by token, with a bar between tokens (⏎ is the end of a line):""", *blocks, """The words `<|im_start|>`
and `<|im_end|>` are single tokens that mark where a message begins and ends. A page cannot fake them: if it
contains that text, it is spelled out in ordinary characters.

With compression the context grows by a placeholder and a response each turn, not by a page. In a longer
episode:

![ids in the context over the turns of an episode](figures/compression.svg)"""])


def sampling(walk) -> str:
    chat, parting, turn = walk.chat, walk.parting, walk.turn
    rows = []
    for k, (token, logp) in enumerate(zip(turn.action_ids, turn.logps)):
        others = [(i, p) for i, p in walk.likeliest[parting.turn][k] if i != token]
        other = f"{visible(token_text(chat, others[0][0]))} {small(others[0][1])}"
        mark = " ←" if k == parting.token else ""
        rows.append([visible(token_text(chat, token)) + mark, token, small(logp), f"{math.exp(logp):.4f}", other])
    total = sum(turn.logps)
    k = parting.token
    drawn = walk.drawn[k]
    before = len(context(chat, parting.right, parting.turn)) + k
    same = "the recorded one"
    if drawn != turn.action_ids[k]:
        same = "not the recorded one: this machine rounds differently"
    return f"""## 4. What does it write, and how likely was that?

The policy writes one token after the other. Each time, the model gives a probability to every token of its
vocabulary, and a random number picks one:

{code(sample, "cdf_BV", "ids_B = torch.searchsorted")}

The response of turn {parting.turn + 1}. `log-prob` is the logarithm of the probability with which the token was
drawn. It is stored at that moment, and training will need it:

{table(["token", "id", "log-prob", "probability", "the likeliest other token"], rows)}

The log-probs add up to {total:.4f}. So this response, as a whole, had a probability of exp({total:.4f}) =
{math.exp(total):.4f}.

Remember the token with the arrow. There the random number was {walk.draws[k]:.6f}, and `sample` makes token
{drawn} of it ({same}). Episode {parting.wrong.member} was at the same place, with the same {before} ids before
it, but its random number picked {visible(token_text(chat, parting.wrong_ids[k]))}.

The model does not read everything again at each turn. Keys and values of the common beginning are still there
from the turn before; only what follows it is computed:

![ids that each turn computes, and those that it keeps](figures/cache.svg)

Why does training not simply take the likeliest token? Because then all episodes of a group would be the same,
and there would be nothing to compare. The temperature, {walk.cfg.temperature}, says how bold the sampling is:
logits are divided by it before the softmax."""


def changed_lines(before: str, after: str) -> str:
    compared = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(line for line in compared if line[0] in "-+")


def acting(walk) -> str:
    parting = walk.parting
    right, t = parting.right, parting.turn
    call = rollout.parse(walk.turn.response)
    wrong_turn = parting.wrong.turns[t]
    method = rollout.ACTIONS[call.name].run
    if method is None:
        does = "It ends the episode."
    else:
        does = f"The browser runs `{method.__qualname__}` with {call.given()}."
    turn, last = walk.turn, t + 1 == len(right.turns)
    lines = [f"""## 5. What does the response do?

The response is text again, and a parser finds the one call in it. No text of a policy is ever run as code:

{fenced(turn.response)}

{code(rollout.take_turns, "call = parse", "await session.execute")}

`parse` returns `{call}`. {does}"""]
    if not last:
        after = right.turns[t + 1]
        where = f"The browser goes from `{turn.url}` to `{after.url}`."
        if after.url == turn.url:
            where = f"The address stays `{turn.url}`."
        lines.append(f"""{where} Turn {t + 2} begins with this page:

![the page at turn {t + 2}](walk/turn-{t + 2}.jpg)

In the text that the policy reads, these lines have gone (-) and come (+):

{fenced(changed_lines(turn.observation, after.observation), "diff")}""")
    lines.append(f"""Episode {parting.wrong.member}, which parted from ours at the arrow, wrote

{fenced(wrong_turn.response)}

so its call is `{wrong_turn.action}`. From now on we call ours the *right call* and the other the *wrong call*,
since that is how they will turn out: in this group no failed episode made ours here, and no successful episode
made the other.""")
    return "\n\n".join(lines)


def rewards(walk) -> str:
    rows = []
    for tau in walk.group:
        marks = {walk.parting.right.member: " (ours)", walk.parting.wrong.member: " (the other)"}
        tokens = sum(len(turn.action_ids) for turn in tau.turns)
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
    for name, passed, detail in walk.parting.right.checks:
        verdict = "yes" if passed else "no"
        checks.append(f"- {name}: {verdict}. {detail}")
    checks = "\n".join(checks)
    return f"""## 6. Did it work?

When an episode ends, the check of stop 1 runs once. For ours:

{checks}

{code(evaluate.score, "made = await", "return")}

The result is the *reward*: 1 if everything holds, else 0. There is no other signal. Nobody says which click was
good, and no gradient runs through the browser or the check. All {len(walk.group)} episodes of the group:

{table(["episode", "turns", "tokens written", "last call", "reward r"], rows)}"""


def advantage(walk) -> str:
    r = [tau.reward for tau in walk.trained]
    n = len(r)
    mean = sum(r) / n
    squares = sum((value - mean) ** 2 for value in r)
    std = math.sqrt(squares / (n - 1))
    added = " + ".join(f"{value:.0f}" for value in r)
    best, worst = max(r), min(r)
    sum_of_squares = f"{r.count(best)} x ({best:.0f} - {mean:.4f})^2 + {r.count(worst)} x ({worst:.0f} - {mean:.4f})^2"
    by_hand = f"""mean = ({added}) / {n} = {mean:.4f}
std  = sqrt(({sum_of_squares}) / {n - 1}) = {std:.4f}
A    = ({best:.0f} - {mean:.4f}) / {std:.4f} = {signed((best - mean) / std)}   for a success
A    = ({worst:.0f} - {mean:.4f}) / {std:.4f} = {signed((worst - mean) / std)}   for a failure"""
    computed = ", ".join(signed(tau.advantage) for tau in walk.trained)
    return f"""## 7. How good was it, compared with the others?

A reward of 1 says little by itself: perhaps the task is easy. So each episode is compared with its group. The
*advantage* $A_i$ says by how many standard deviations its reward lies above the group's mean:

{code(mgrpo.group_advantages, "if len(valid)", "tau.advantage = ")}

By hand:

{fenced(by_hand)}

By the function, in the order of the episodes: {computed}.

The tokens of an episode all get its advantage. This is crude: a needless click of a successful episode is
praised like the decisive one. It works on average, because over many groups good clicks stand in successful
episodes more often. If all rewards were equal, the group would teach nothing, and the function returns no
episode:

![the advantage by the number of successes in a group of eight](figures/advantage.svg)"""


def training_row(walk) -> str:
    row = walk.rows[walk.row_of(walk.parting.right, walk.parting.turn)]
    n_tokens = sum(one.n_action for one in walk.rows)
    seen = sum(len(one.ids) for one in walk.rows)
    return f"""## 8. Which tokens train?

Every turn of the group becomes one row: the same ids that the policy saw, then the ids that it wrote. Ours has
{len(row.ids)} ids: {row.prefix} of the shared history (the *trunk*), then the page and the response of this
turn (the *leaf*). A mask marks the {row.n_action} ids of the response. The model reads all of them; only the
marked ones enter the loss:

![the row of this turn, to scale](walk/row.svg)

{code(compress.trajectory_rows, "leaf = ", "advantage=advantage")}

The group has {len(walk.rows)} rows. Together they are {seen} ids, of which {n_tokens} train. Pages are never
trained: the policy should learn what to write after a page, not how to write pages. Past responses are context
in this row; each is trained in its own row, where it stands under the page that it answered. ([The picture of a
whole episode](packing.svg) shows how rows share their trunk.)"""


def per_token(walk, done: int, row: Row, k: int) -> dict:
    """What mgrpo_loss makes of one token after `done` updates. With weight 1 the numbers are those of the token alone."""
    logp_1 = torch.tensor([walk.logps[done][walk.rows.index(row)][k]], dtype=torch.float64, requires_grad=True)
    old_1 = torch.tensor([row.logps[k]], dtype=torch.float64)
    loss, measured = mgrpo.mgrpo_loss(logp_1, old_1, logp_1.detach(), A_N=row.advantage, weight_N=1.0,
                                      eps=walk.cfg.eps, beta=walk.cfg.beta)
    loss.backward()
    return {"rho": (logp_1 - old_1).exp().item(), "counts": -loss.item(), "slope": -logp_1.grad.item(),
            "clipped": bool(measured["clip_frac"]), "old": old_1.item(), "now": logp_1.item()}


def chosen_tokens(walk, done: int) -> list[tuple[str, Row, int]]:
    """(why, row, token): the two where the responses part, and an example of each kind outside the clip range."""
    parting, eps = walk.parting, walk.cfg.eps
    out = []
    for why, tau in (("right call", parting.right), ("wrong call", parting.wrong)):
        out.append((why, walk.rows[walk.row_of(tau, parting.turn)], parting.token))

    # The furthest other token of each kind that lies outside 1 - eps to 1 + eps.
    furthest = {}
    for row in walk.rows:
        for k in range(row.n_action):
            rho = per_token(walk, done, row, k)["rho"]
            same = row.turn.action_ids[k] in (parting.right_ids[parting.token], parting.wrong_ids[parting.token])
            if abs(rho - 1) <= eps or same:
                continue
            kind = (row.advantage > 0, rho > 1)
            if kind not in furthest or abs(math.log(rho)) > furthest[kind][0]:
                furthest[kind] = (abs(math.log(rho)), row, k)
    names = {(True, True): "praised and now likelier", (False, False): "blamed and now less likely",
             (True, False): "praised, yet less likely", (False, True): "blamed, yet likelier"}
    for kind, why in names.items():
        if kind in furthest:
            _, row, k = furthest[kind]
            out.append((why, row, k))
    return out


def ratio(walk) -> str:
    done = len(walk.passes) - 1
    cfg = walk.cfg
    low, high = 1 - cfg.eps, 1 + cfg.eps
    rows = []
    for why, row, k in chosen_tokens(walk, done):
        said = per_token(walk, done, row, k)
        gradient = "ended" if said["clipped"] else signed(said["slope"])
        token = visible(token_text(walk.chat, row.turn.action_ids[k]))
        rows.append([f"{token} ({why})", f"{said['old']:.4f}", f"{said['now']:.4f}", f"{said['rho']:.4f}",
                     signed(row.advantage), signed(said["counts"]), gradient])
    n_tokens = sum(row.n_action for row in walk.rows)
    outside = walk.passes[done]["clip_frac"] * n_tokens
    return f"""## 9. What does one token add?

We want to make the tokens of good episodes likelier and those of bad ones less likely. The obvious loss is
$-A \\log \\pi$ for each token: a cross-entropy whose weight may be negative. But playing {len(walk.group)}
episodes is slow, so the same tokens are used for {len(walk.passes)} updates. After the first, the policy is no
longer the one that sampled. The ratio

$$\\rho = \\frac{{\\pi(\\text{{token}})}}{{\\pi_\\text{{old}}(\\text{{token}})}} = \\exp(\\log \\pi - \\log \\pi_\\text{{old}})$$

corrects for that: it weighs a token by how much more often the new policy would write it. And *clipping* stops
pushing a token once it has moved by more than eps = {cfg.eps} in the direction that its advantage asks for:

{code(mgrpo.mgrpo_loss, "rho_N", "surrogate_N")}

Before the first update, training and sampling are the same policy, so $\\rho = 1$. Over all {n_tokens} tokens
here, the stored log-prob and the one that training computes differ by {walk.gap:.1e} at most: rounding.
(`logp_gap` in `metrics.jsonl` checks this at every step.)

After {done} updates it looks different. Below are the two tokens where the calls part, and of each kind of
other tokens outside [{low:.1f}, {high:.1f}] the furthest:

{table(["token", "old log-prob", "new", "rho", "A", "min(rho A, clip(rho) A)", "d / d log-prob"], rows)}

The last column is a slope: how fast the token's share of the objective rises with its log-prob. Where it says
"ended", the clipped value is the smaller one, and it does not depend on the policy: no gradient. That happens
to {outside:.0f} of the {n_tokens} tokens. A token that moved against its advantage keeps its gradient, however
far it is: `min` takes the side that can still be corrected.

![what a token adds to the objective, over rho](figures/clip.svg)

Last, the *weight*. `--loss-norm {cfg.loss_norm}` gives each token of the batch the same, 1 / {n_tokens} =
{1 / n_tokens:.6f}:

{code(mgrpo.weigh, "if cfg.loss_norm ==", "row.weight = 1 / n_tokens")}

The paper's choice (`paper`) first takes the mean over a response, then over an episode, then over the group.
Then a token of a short response, or of an episode with few turns, weighs more:

![which tokens weigh what in a short success and a long failure, with three norms](figures/loss-norms.svg)"""


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
        rows.append([tau.member, f"{tau.reward:.0f}", signed(tau.advantage), tokens, signed(counts)])
        total += counts
    rows.append(["sum", "", "", n_tokens, signed(total)])
    return table(["episode", "r", "A", "tokens", "sum of min(...)"], rows), -total / n_tokens


def loss(walk) -> str:
    last = len(walk.passes) - 1
    n_tokens = sum(row.n_action for row in walk.rows)
    first_table, first_loss = loss_table(walk, 0)
    last_table, last_loss = loss_table(walk, last)
    return f"""## 10. Can I check the loss with a pocket calculator?

Yes. In the first update every $\\rho$ is 1, so an episode adds its advantage times its number of tokens:

{first_table}

{code(mgrpo.mgrpo_loss, "loss = ", "loss = ")}

The weight is 1 / {n_tokens} for all tokens, and beta = {walk.cfg.beta:g} leaves out the last term. So the loss
is minus the sum divided by {n_tokens}: {first_loss:.6f}. What `mgrpo.update` printed for the first update:
**{walk.passes[0]['loss']:.6f}**.

The value itself says little: it only says whether successes or failures are longer. Its gradient is what
counts. Before update {last + 1} the ratios have moved:

{last_table}

Minus the sum divided by {n_tokens}: {last_loss:.6f}. By `mgrpo.update`: **{walk.passes[last]['loss']:.6f}**."""


def step(walk) -> str:
    chat, parting, cfg, slope = walk.chat, walk.parting, walk.cfg, walk.slope
    right = visible(token_text(chat, parting.right_ids[parting.token]))
    wrong = visible(token_text(chat, parting.wrong_ids[parting.token]))
    A = parting.right.advantage
    scale = slope["weight"] * A / cfg.temperature
    p_right, p_wrong = slope["p_right"], slope["p_wrong"]
    by_hand = f"""d loss / d logit of the right token = -weight A / T (1 - p)
                                    = -{scale:.6f} x (1 - {p_right:.4f}) = {-scale * (1 - p_right):+.6f}
d loss / d logit of the wrong token = +weight A / T p
                                    = +{scale:.6f} x {p_wrong:.4f} = {scale * p_wrong:+.6f}"""
    rows = []
    for done, chance in enumerate(walk.chances):
        name = f"after update {done}" if done else "before"
        rows.append([name, small(chance.right), small(chance.wrong), small(math.exp(chance.right_response)),
                     small(math.exp(chance.wrong_response))])
    updates = []
    for i, metrics in enumerate(walk.passes):
        updates.append([i + 1, f"{metrics['loss']:.6f}", f"{metrics['grad_norm']:.4f}",
                        f"{metrics['clip_frac']:.1%}"])
    sampled = []
    for row in walk.rows:
        sampled += row.logps
    unsure = sum(math.exp(logp) < 0.99 for logp in sampled)
    moved = {}
    for row, before, after in zip(walk.rows, walk.logps[0], walk.logps[-1]):
        changes = [now - then for now, then in zip(after, before)]
        moved.setdefault(row.advantage > 0, []).extend(changes)
    praised = sum(moved[True]) / len(moved[True])
    blamed = sum(moved[False]) / len(moved[False])
    return f"""## 11. What does the gradient do?

Look at the arrow of stop 4 once more. The token {right} of our episode has A = {signed(A)}. The derivative of
$\\log p$ by a logit is 1 - p for the token itself and -p for any other, divided by the temperature. So this one
token pulls at the logits with

{fenced(by_hand)}

Autograd through `mgrpo_loss` says {slope['right']:+.6f} and {slope['wrong']:+.6f}. The optimizer goes against
it: the right token's logit rises, the wrong token's falls. The other episode pulls in the same direction, since
its token {wrong} has a negative advantage.

Most tokens hardly pull at all: where p is 1, the factor 1 - p is 0. Only {unsure} of the {len(sampled)} tokens
of the group were drawn with a probability below 0.99. There the policy made its decisions, and there it learns.

All of them pull at once, at weights that they share. The gradient is cut to a norm of {cfg.clip:g} and handed
to AdamW, here with the learning rate of the first step of training, {walk.lr:g}:

{code(bc.optimizer_step, "grad_norm = ", "optimizer.step()")}

{table(["update", "loss", "gradient norm", "tokens that the clip leaves out"], updates)}

And this is what it is all for. The probability of the two tokens where the calls part, and of the two whole
responses:

{table(["", f"right token {right}", f"wrong token {wrong}", "right response", "wrong response"], rows)}

On average over all tokens of the group, those of successful episodes changed their log-prob by {praised:+.4f},
those of failed episodes by {blamed:+.4f}.

One group of one task moves the policy this far because AdamW's first steps change every weight by about the
learning rate, however small its gradient is. In training the gradient is that of many groups, and it has to
agree on what helps."""


def after(walk) -> str:
    return f"""## 12. And then?

That was one group. A step of `mgrpo.py` plays {mgrpo.Config.batch} tasks, {mgrpo.Config.G} episodes each, and
makes {mgrpo.Config.updates_per_batch} updates with all groups whose rewards differ. `make demo` makes
{mgrpo.Config.steps} steps. The loop begins like this, and goes on with the updates of stop 11:

{code(mgrpo.main, "# 1) Collect", "rows, measured")}

You have now met the functions of the method. `mgrpo.py` is the next thing to read; its opening repeats the
formula of stop 9. `forks/` holds methods that change one stop: other advantages (`forks/gigpo.py`), a critic
instead of the group (`forks/critic.py`), other losses (`forks/webrl.py`)."""


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

    parts = [("system", len(chat.system_ids()))]
    for k in range(t):
        placeholder = len(chat.user_ids(tau.task, k, PLACEHOLDER))
        parts.append(("placeholder", placeholder))
        parts.append(("context", len(past(chat, tau, k)) - placeholder))
    assert sum(n for _, n in parts) == row.prefix == len(trunk(chat, tau, t))
    parts += [("page", len(row.leaf) - row.n_action), ("trained", row.n_action)]

    fork = left + row.prefix * scale
    end = width - right
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 236" width="{width}" height="236">',
           ROW_STYLE, f'<rect class="paper" width="{width}" height="236" rx="8"/>']
    x = 20
    legend = {"system": "system prompt", "placeholder": "placeholder", "context": "past response", "page": "page",
              "trained": "response of this turn"}
    for kind, name in legend.items():
        svg.append(f'<rect class="{kind}" x="{x}" y="16" width="12" height="12" rx="2"/>')
        svg.append(f'<text class="soft" x="{x + 17}" y="26">{name}</text>')
        x += 40 + 6.6 * len(name)
    svg += brace(left, fork, top - 12, f"trunk, {row.prefix} ids")
    svg += brace(fork, end, top - 12, f"leaf, {len(row.leaf)} ids")
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
    svg.append(f'<text class="soft" x="{left}" y="{top + 126}">numbers below the bar are tokens; the response attends '
               "to everything on its left</text>")
    return "\n".join([*svg, "</svg>\n"])


def exercises(walk) -> str:
    given = answers.material(walk.record, answers.BASE)
    lines = ["""## Exercises

Answer first, then run the command, then unfold. The commands compute with these episodes and with `worlds/base`
as the policy.
"""]
    for number, exercise in enumerate(answers.EXERCISES, 1):
        command = f"python tests/tools/answers.py {number}"
        solution = ""
        if exercise.compute is answers.own_fork:
            command += " forks/mine.py"
            solution = "\n\n" + fenced(answers.SOLUTION.rstrip(), "python")
        computed = fenced(exercise.compute(given))
        lines.append(f"""**{number}.** {exercise.question}

    {command}

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
