"""Rewards finer than 0 and 1: a checklist (CM2, arXiv 2602.12268) or F1 (ASTRA, arXiv 2601.21558).

    r_i  = sum_c w_c [episode i meets check c] / sum_c w_c                    --reward checks
    r_i  = 2 P R / (P + R),  R = that sum,  P = newly met checks / turns      --reward f1
    A_ij = r_i - mean(r) + k (e_ij - mean_j(e_ij))

The checks c are those that the judge makes anyway (evaluate.checks), and one more, the success: it is met if
all others are. e_ij is the part of R that turn j earned, for both rewards. P leaves out the success and the
checks that held at the start already (so f1 is 0 if all of them held then). The term with k has mean 0 over an
episode's turns: it moves credit between them. (Exactly so with --loss-norm paper --credit-errors. By default a
long turn weighs more, and a turn that failed gets no credit.) Success stays 0 or 1, and every table counts that.

In PyTorch terms: if all attempts at a task fail, M-GRPO learns nothing from it. But one of them may have
put the right item into the cart and forgotten to pay. Here it earns more than the others, so its tokens
get likelier, most of all those of the turn after which the cart was first seen to be right.

Checks are tested before each action, on the page as it stands, and by the judge at the end. The tests
before an action read the agent's page and its address and open nothing, so the episode goes on as it would
without them. So we know when a check came to hold only if the agent's page showed it (a check may need others
to be met first, see below):

    - A check of the address, or of the page left open, is met if a look after any turn saw it hold, with all
      that it needs. All others are met only if the judge finds them at the end.
    - What held at the start must hold at the end, and no turn earned it.
    - A check that did not hold then was earned by the first turn after which a look saw it hold, with all that
      it needs.
    - If no look saw it, the last turn earned an answer. It also earned an address, or a page left open that a
      look can read, if the episode ended without an exit. No turn earned the others: the whole episode did.

A task may say more about its checks, in the judge's order: those of the answer, the address, the verifier,
the page left open, other pages. A check counts once those that it needs are met. An episode that never
meets a required check earns nothing:

    "eval": {..., "checklist": [{"weight": 2}, {"needs": [0]}, {"required": true}]}

Differs from CM2: a program checks, not a model; a failed required check costs the reward and does not
end the episode; the success is an item (--success-weight 0: it is not). Our tasks have one user turn, so
CM2's levels "trajectory" and "turn" coincide. The turn term is ours: CM2 credits all steps up to the one
that meets an item, against the group's mean of that item, and uses this instead of the episode's advantage,
not beside it. Differs from ASTRA: P is at most 1. A check that holds by accident or for a moment pays as well:
an address that must contain /trips/ is also that of /trips/new. Give such a check needs, and watch the
success, not the reward.

Differs from mgrpo.py: `reward`; `advantages`, which do not divide by a standard deviation; `collect` looks
at the checks before each action; `choose_tasks` refuses checklists that cannot be followed. Groups of equal
r are dropped as there, whatever e is. groups_revived: groups that train although all fail, or all succeed.
On the sandbox it changes little: 125 of the 600 training tasks, of 4 of 19 templates, have more than one check.
"""
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo
from compress import Trajectory
from evaluate import contents_checks, located_text, tidy, url_match
from worlds.browser import ENV_FAILED, bounded


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/checklist"  # the run's directory; at the end it is also the checkpoint
    # Checklist
    reward: str = "checks"       # checks: share of the weights met; f1: fewer turns count as well
    success_weight: float = 1.0  # of the success; a check has 1 unless its task says otherwise
    turn_credit: float = 1.0     # k, how much more the turn gets that earned a check


class Item(NamedTuple):
    """What a task says about one of its checks."""
    weight: float = 1.0
    needs: tuple = ()       # numbers of the checks that must be met first
    required: bool = False  # whether an episode without it earns nothing


class Part(NamedTuple):
    """A part of a task's "eval", which makes one or more checks."""
    place: str           # answer, url_match, verify, last (the page left open), or another page's address
    target: dict | None  # of program_html
    n_checks: int


def count_checks(contents: dict) -> int:
    """How many checks the judge makes of an answer's or a page's {check: references}."""
    plain = {kind: references for kind, references in contents.items() if kind != "fuzzy_match"}
    n = len(contents_checks(plain, None, "page"))
    if "fuzzy_match" in contents:
        n += 1  # a model judges it, as one check
    return n


def parts(task: dict) -> list[Part]:
    """The parts in the judge's order. Only the task decides it, so a resumed run has the same."""
    spec = task["eval"]
    made = []
    if "string_match" in spec["eval_types"]:
        n_checks = count_checks(spec["reference_answers"])
        made.append(Part("answer", None, n_checks))
    for kind in ("url_match", "verify"):
        if kind in spec["eval_types"]:
            made.append(Part(kind, None, 1))
    if "program_html" in spec["eval_types"]:
        last_first = sorted(spec["program_html"], key=lambda target: target["url"] != "last")
        for target in last_first:
            n_checks = count_checks(target["required_contents"])
            made.append(Part(target["url"], target, n_checks))
    return made


def checklist(task: dict) -> list[Item]:
    """What the task says about each of its checks. Raises ValueError."""
    n = sum(part.n_checks for part in parts(task))
    if n == 0:
        raise ValueError(f"task {task['task_id']} checks nothing; see evaluate.py --validate.")
    wrong = ValueError(f"task {task['task_id']}: eval.checklist needs an entry for each of the judge's {n} "
                       "checks: a weight (0 or more, not all 0), needs (numbers of checks, not in a circle), "
                       "required (true or false).")
    try:
        entries = task["eval"].get("checklist", [{}] * n)
        items = [Item(**entry) for entry in entries]
        possible = meet(items, [True] * len(items), {}, turn=0)  # without those whose needs go in a circle
        complete = len(items) == n and len(possible) == n
        well_formed = all(0 <= item.weight < inf and isinstance(item.required, bool) for item in items)
    except TypeError:  # something is of another type than we ask for
        raise wrong from None
    if not well_formed or not complete or not any(item.weight for item in items):
        raise wrong
    return items


def meet(items: list[Item], holds: list[bool], met: dict, turn: int | None) -> dict:
    """Adds to met, {check: turn}, the checks that hold and have what they need; returns it."""
    changed = True
    while changed:  # a check that is met now may be what another one needs
        changed = False
        for c, item in enumerate(items):
            if c not in met and holds[c] and all(need in met for need in item.needs):
                met[c] = turn
                changed = True
    return met


# ------------------------------------------------------------------------------ during the episode --


def can_read(part: Part, url: str) -> bool:
    """Whether the page at `url` shows what a part asks for, with no more than a look."""
    target = part.target
    if target is None:
        return part.place == "url_match"
    if target.get("prep_actions") or target["locator"].strip().startswith("func:"):
        return False
    if "fuzzy_match" in target["required_contents"]:
        return False
    return part.place == "last" or tidy(part.place) == tidy(url)


async def look(task: dict, page) -> list[bool]:
    """Which checks hold, as far as the page as it stands shows. It neither acts nor waits."""
    url = page.url
    spec = task["eval"]
    holds = []
    for part in parts(task):
        if part.place == "url_match":
            holds.append(url_match(url, spec["reference_url"], spec.get("url_note")))
        elif can_read(part, url):
            text = None
            with suppress(LookupError):
                text = await located_text(page, part.target, url)
            made = contents_checks(part.target["required_contents"], text, "page")
            holds += [check.passed for check in made]
        else:
            holds += [False] * part.n_checks
    return holds


class Watched:
    """The task's side of an episode, `env`, that also looks at the checks before each action.

    tau.seen: {check: the turn, from 0, after which it first held with all that it needs; -1: at the start}.
    """

    def __init__(self, env, timeout: float):
        self.env = env
        self.timeout = timeout

    def __getattr__(self, name):
        return getattr(self.env, name)  # all else is env's

    async def watch(self, session, tau: Trajectory):
        await self.env.watch(session, tau)
        if len(tau.turns) == 1:
            tau.seen = {}
        with suppress(*ENV_FAILED):  # a page that cannot be read now is one look less
            looking = look(tau.task, session.page)
            holds = await bounded(looking, self.timeout, "looking at the checks")
            meet(checklist(tau.task), holds, tau.seen, turn=len(tau.turns) - 2)


# ------------------------------------------------------------------------------- after the episode --


def checks_met(tau: Trajectory) -> dict[int, int | None]:
    """{check that the episode met: the turn that met it; None: unknown; -1: it held at the start}."""
    items = checklist(tau.task)
    seen = getattr(tau, "seen", {})
    passed = [verdict for _, verdict, _ in tau.checks]
    holds = []  # at the end, or in passing
    met_by = []  # by check: the turn, as in the result
    for part in parts(tau.task):
        passing = part.place in ("url_match", "last")
        # Who met a check that no look saw and that the judge finds met? An answer: the last turn. The address, or an
        # open page that looks can read: the last turn as well, unless it was an exit, which changes no page.
        open_page_shows_it = can_read(part, url="")  # "": no page that a check opens has this address
        by_last_turn = part.place == "answer" or (open_page_shows_it and tau.answer is None)
        by_judge = None
        if by_last_turn:
            by_judge = len(tau.turns) - 1
        first = len(holds)
        for c in range(first, first + part.n_checks):
            in_passing = passing and c in seen
            holds.append(passed[c] or in_passing)
            met_by.append(seen.get(c, by_judge))

    met = meet(items, holds, {}, turn=None)
    # An address or open page of the start may be what another check needs. To count, it must hold at the end.
    counted = {}
    for c in met:
        from_start = met_by[c] == -1
        if passed[c] or not from_start:
            counted[c] = met_by[c]
    for c, item in enumerate(items):
        if item.required and c not in counted:
            return {}
    return counted


class Checklist(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        if cfg.reward not in ("checks", "f1"):
            raise ValueError(f"--reward {cfg.reward}: use checks or f1.")
        if not 0 <= cfg.success_weight < inf or cfg.turn_credit < 0:
            raise ValueError(f"--success-weight {cfg.success_weight:g}, --turn-credit {cfg.turn_credit:g}: "
                             "give at least 0.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        self.revived = 0  # groups of this step, on this rank

    def choose_tasks(self, tasks, step):
        """mgrpo.py's. A checklist that cannot be followed is refused before anything is played."""
        for task in tasks:
            checklist(task)
        return super().choose_tasks(tasks, step)

    def collect(self, tasks, env, step, tick=run.ignore):
        """mgrpo.py's, with a look at the checks before each action."""
        return super().collect(tasks, Watched(env, self.cfg.timeout), step, tick)

    def earnings(self, tau: Trajectory) -> list[tuple[int | None, float]]:
        """(turn, gain) of each check that was met, in the judge's order. gain: what it adds to R.

        turn: as in checks_met; -1 for the success, which is no turn's and no check of its own.
        """
        items = checklist(tau.task)
        total = sum(item.weight for item in items) + self.cfg.success_weight
        met = checks_met(tau)
        out = [(met[c], items[c].weight / total) for c in sorted(met)]
        if tau.success:
            out.append((-1, self.cfg.success_weight / total))
        return out

    def reward(self, tau):
        earned = self.earnings(tau)
        recall = sum(gain for _, gain in earned)
        if self.cfg.reward == "checks" or recall == 0:
            return recall
        n_met = sum(turn != -1 for turn, _ in earned)
        precision = min(1.0, n_met / max(len(tau.turns), 1))
        return 2 * precision * recall / (precision + recall)

    def advantages(self, group):
        training = mgrpo.group_advantages(group)  # drops groups of equal rewards
        if not training:
            return []
        outcomes = {tau.success for tau in training}
        if len(outcomes) == 1:  # mgrpo.py would drop the group
            self.revived += 1
        baseline = mean(tau.reward for tau in training)
        for tau in training:
            tau.advantage = tau.reward - baseline
            e = [0.0] * len(tau.turns)
            for j, gain in self.earnings(tau):  # of R, for f1 as well
                if j is not None and j >= 0:
                    e[j] += gain
            for turn, e_j in zip(tau.turns, e):  # a row's advantage is its episode's and its turn's
                turn.advantage = self.cfg.turn_credit * (e_j - mean(e))
        return training

    def training_rows(self, episodes, step):
        """mgrpo.py's, and how many groups train although all of them fail, or all succeed."""
        self.revived = 0
        rows, metrics = super().training_rows(episodes, step)
        [revived] = run.all_sum([self.revived])
        metrics["groups_revived"] = int(revived)
        return rows, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Checklist)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
