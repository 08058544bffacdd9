"""The code host: projects, issues, merge requests and members, whose role in a project says what they may do there."""

from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import NamedTuple

from .page import (LOGIN_ROUTES, NOT_FOUND, Page, Redirect, area, error, fact, field, form, items, link, members_only,
                   navigation, paginate, press, refused, search_box, select, table, unfit)
from .shop import slug_of
from .words import ADJECTIVES, NOUNS, TOPICS, names, password, phrase

ROOT = "/code"
ROLES = ("visitor", "guest", "developer", "owner")  # each may do what those before it may
PRIORITIES = ("low", "normal", "high", "urgent")
NOBODY, ANY = "nobody", "any"
PER_PAGE = 5


class Account(NamedTuple):
    user: str
    password: str


class Project(NamedTuple):
    slug: str
    name: str
    about: str
    followers: int  # at the start of the world; who joined them since is in Code.following


class Issue(NamedTuple):
    number: int
    project: str
    title: str
    author: str
    assignee: str
    priority: str
    state: str  # open or closed
    comments: tuple[tuple[str, str], ...]


class Merge(NamedTuple):
    number: int
    project: str
    title: str
    author: str
    branch: str
    state: str  # open, merged or closed
    approved: tuple[str, ...]


@dataclass
class Code:
    accounts: dict[str, Account]
    projects: dict[str, Project]
    members: dict[tuple[str, str], str]  # (project, user): role
    issues: dict[int, Issue]
    merges: dict[int, Merge]
    following: dict[tuple[str, str], bool]  # (project, user)


def seed(rng, people: list[str], sites: dict) -> Code:
    accounts = {user: Account(user, password(rng)) for user in people}
    projects = {slug_of(name): Project(slug_of(name), name, f"a {rng.choice(ADJECTIVES)} thing", rng.randint(1, 90))
                for name in names(rng, TOPICS, 6)}
    titles, members, issues, merges = iter(names(rng, NOUNS, len(NOUNS))), {}, {}, {}
    mine = rng.sample(["owner", "owner", "developer", "developer", "guest", "guest"], 6)
    for slug, role in zip(projects, mine):
        owner, *others = rng.sample(people[1:], 5)
        members[slug, owner] = "developer" if role == "owner" else "owner"
        members |= {(slug, user): rng.choice(ROLES[1:3]) for user in others} | {(slug, people[0]): role}
        team = [owner, *others, people[0]]
        for i in range(rng.randint(5, 7)):
            state = rng.choice(("open", "open", "closed")) if i else "open"
            issues[10 + len(issues)] = Issue(10 + len(issues), slug, next(titles), rng.choice(team),
                                             rng.choice([NOBODY, *team]), rng.choice(PRIORITIES), state, ())
        for i in range(rng.randint(2, 3)):
            author, *approved = rng.sample(others, rng.randint(1, 2))
            state = rng.choice(("open", "open", "merged")) if i else "open"
            merges[10 + len(merges)] = Merge(10 + len(merges), slug, next(titles), author,
                                             phrase(rng).replace(" ", "-"), state, tuple(approved))
    return Code(accounts, projects, members, issues, merges, {})


def nav(user: str | None) -> str:
    return navigation(ROOT, user, [("home", ROOT)]) + search_box(ROOT)


def role_of(code, slug: str, user: str | None) -> str:
    return code.members.get((slug, user), "visitor")


def at_least(role):
    """Lets a handler run for those who have this role or a higher one in the project, and hands it the project."""
    def decorate(handler):
        @wraps(handler)
        def guarded(code, request, slug, *groups):
            if slug not in code.projects:
                return NOT_FOUND
            mine = role_of(code, slug, request.user)
            if request.user is None and role != "visitor":
                return Redirect("/login")
            if ROLES.index(mine) < ROLES.index(role):
                return refused(f"this needs the role {role} and you are {mine} of {code.projects[slug].name}")
            return handler(code, request, code.projects[slug], *groups)
        return guarded
    return decorate


# ---- projects
def followers(code, p) -> int:
    return p.followers + sum(slug == p.slug for slug, _ in code.following)


def home(code, request):
    order = request.query.get("sort", "name")
    ranked = sorted(code.projects.values(), key=lambda p: (-followers(code, p) if order == "followers" else 0, p.name))
    shown, links = paginate(ranked, request, PER_PAGE, ROOT)
    rows = [(link(p.name, f"/code/p/{p.slug}"), p.about, followers(code, p), role_of(code, p.slug, request.user))
            for p in shown]
    choice = form(select("sort", ("name", "followers"), order), submit="apply", method="get")
    return Page("code", "<h1>projects</h1>" + choice
                + table(("project", "about", "followers", "your role"), rows) + links)


def search(code, request):
    wanted = request.query.get("q", "").lower().split()
    found = [each for each in (*code.projects.values(), *code.issues.values(), *code.merges.values())
             if wanted and set(wanted) <= set((each.name if isinstance(each, Project) else each.title).split())]
    lines = [link(each.name, f"/code/p/{each.slug}") + " project" if isinstance(each, Project) else
             link(each.title, ROOT + address(each)) + f" in {code.projects[each.project].name}" for each in found[:12]]
    return Page("search", f"<h1>search</h1><p>{len(found)} found</p>" + items(lines))


@at_least("visitor")
def project(code, request, p):
    here, mine = f"/code/p/{p.slug}", (p.slug, request.user) in code.following
    follow = press("unfollow" if mine else "follow", f"{here}/follow") if request.user else ""
    links = items([link("issues", f"{here}/issues"), link("merge requests", f"{here}/merges"),
                   link("members", f"{here}/members")])
    return Page(p.name, f"<h1>{p.name}</h1><p>{p.about}</p>" + fact("followers", followers(code, p))
                + fact("your role", role_of(code, p.slug, request.user)) + follow + links)


@at_least("visitor")
@members_only
def follow(code, request, p):
    if code.following.pop((p.slug, request.user), None) is None:
        code.following[p.slug, request.user] = True
    return Redirect(f"/p/{p.slug}")


# ---- members
@at_least("visitor")
def members(code, request, p, problem=""):
    team = {user: role for (slug, user), role in code.members.items() if slug == p.slug}
    rows = [(f'<span id="{user}">{user}</span>' if role_of(code, p.slug, request.user) != "owner" else
             link(user, f"/code/p/{p.slug}/members/{user}"), f'<span id="role-{user}">{role}</span>')
            for user, role in team.items()]
    invite = ""
    if role_of(code, p.slug, request.user) == "owner":
        invite = "<h2>invite</h2>" + form(field("username", request.form.get("username", "")),
                                          select("role", ("choose", *ROLES[1:])), submit="invite")
    return Page("members", f"<h1>members</h1><p>{p.name}</p>{error(problem)}" + table(("member", "role"), rows)
                + invite)


@at_least("owner")
def invite(code, request, p):
    user, role = request.form.get("username", "").strip(), request.form.get("role")
    problem = "" if user in code.accounts else "there is no such user"
    if role not in ROLES[1:]:
        problem = "choose a role"
    elif (p.slug, user) in code.members:
        problem = f"{user} is a member already"
    if problem:
        return members(code, request, p.slug, problem)
    code.members[p.slug, user] = role
    return Redirect(f"/p/{p.slug}/members")


@at_least("owner")
def member(code, request, p, user):
    if (p.slug, user) not in code.members:
        return NOT_FOUND
    here = f"/code/p/{p.slug}/members/{user}"
    return Page(user, f"<h1>{user}</h1><p>member of {p.name}</p>"
                + form(select("role", ROLES[1:], code.members[p.slug, user]), submit="save")
                + press(f"remove {user}", f"{here}/remove", "remove this member?"))


@at_least("owner")
def set_role(code, request, p, user):
    if (p.slug, user) not in code.members or request.form.get("role") not in ROLES[1:]:
        return NOT_FOUND
    if user == request.user:
        return refused("you cannot change your own role")
    code.members[p.slug, user] = request.form["role"]
    return Redirect(f"/p/{p.slug}/members")


@at_least("owner")
def remove_member(code, request, p, user):
    if user == request.user:
        return refused("you cannot leave a project that you own")
    code.members.pop((p.slug, user), None)
    return Redirect(f"/p/{p.slug}/members")


# ---- issues
def address(row) -> str:
    return f'/p/{row.project}/{"issues" if isinstance(row, Issue) else "merges"}/{row.number}'


def issue_table(issues) -> str:
    return table(("issue", "priority", "state", "assignee"), [
        (link(i.title, ROOT + address(i)), i.priority, i.state, i.assignee) for i in issues])


@at_least("visitor")
def issues(code, request, p):
    state, priority = request.query.get("state", "open"), request.query.get("priority", ANY)
    found = [i for i in code.issues.values() if i.project == p.slug and state in (ANY, i.state)
             and priority in (ANY, i.priority)]
    shown, links = paginate(found, request, PER_PAGE, f"/code/p/{p.slug}/issues")
    choices = form(select("state", ("open", "closed", ANY), state), select("priority", (ANY, *PRIORITIES), priority),
                   submit="filter", method="get")
    return Page("issues", f'<h1>issues</h1><p>{p.name}</p><p>{link("new issue", f"/code/p/{p.slug}/issues/new")}</p>'
                          f"{choices}<p>{len(found)} found</p>{issue_table(shown)}{links}")


def team_of(code, p) -> list[str]:
    return [user for slug, user in code.members if slug == p.slug]


def issue_form(code, request, p, title, shown, submit, problem=""):
    shown = shown | request.form
    return Page(title, f"<h1>{title}</h1><p>{p.name}</p>{error(problem)}"
                + form(field("title", shown["title"]), select("priority", PRIORITIES, shown["priority"]),
                       select("assignee", (NOBODY, *team_of(code, p)), shown["assignee"]), submit=submit))


def read_issue(code, request, p) -> tuple[dict, str]:
    """What a posted form says of an issue, and what is wrong with it."""
    title, priority, assignee = (request.form.get(name, "").strip() for name in ("title", "priority", "assignee"))
    problem = unfit("title", title)
    if priority not in PRIORITIES or assignee not in (NOBODY, *team_of(code, p)):
        problem = "choose a priority and an assignee from the list"
    return {"title": title, "priority": priority, "assignee": assignee}, problem


@at_least("guest")
def new_form(code, request, p, problem=""):
    shown = {"title": "", "priority": "normal", "assignee": NOBODY}
    return issue_form(code, request, p, "new issue", shown, "create issue", problem)


@at_least("guest")
def create_issue(code, request, p):
    given, problem = read_issue(code, request, p)
    if problem:
        return new_form(code, request, p.slug, problem)
    number = max(code.issues) + 1
    code.issues[number] = Issue(number=number, project=p.slug, author=request.user, state="open", comments=(), **given)
    return Redirect(address(code.issues[number]))


def find(table, p, number):
    row = table.get(int(number))
    return row if row and row.project == p.slug else None


@at_least("visitor")
def issue(code, request, p, number, problem=""):
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND
    here, tools, write = ROOT + address(i), "", ""
    if request.user:
        tools = (f'<p>{link("edit issue", f"{here}/edit")}</p>'
                 + press("close issue" if i.state == "open" else "reopen issue", f"{here}/turn")
                 + press("delete issue", f"{here}/delete", "delete this issue?"))
        write = form(area("comment", request.form.get("comment", "")), submit="send", action=f"{here}/comment")
    said = items(f"{user} : {escape(text)}" for user, text in i.comments)
    return Page("issue", f'<h1 id="title">{escape(i.title)}</h1>{error(problem)}<p>issue of {p.name}</p>'
                + fact("state", i.state) + fact("priority", i.priority) + fact("author", i.author)
                + fact("assignee", i.assignee) + f"{tools}<h2>comments</h2>{said}{write}")


@at_least("developer")
def edit_form(code, request, p, number, problem=""):
    i = find(code.issues, p, number)
    return issue_form(code, request, p, "edit issue", i._asdict(), "save", problem) if i else NOT_FOUND


@at_least("developer")
def edit_issue(code, request, p, number):
    given, problem = read_issue(code, request, p)
    i = find(code.issues, p, number)
    if problem or i is None:
        return edit_form(code, request, p.slug, number, problem)
    code.issues[i.number] = i._replace(**given)
    return Redirect(address(i))


@at_least("developer")
def turn_issue(code, request, p, number):
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND
    code.issues[i.number] = i._replace(state="closed" if i.state == "open" else "open")
    return Redirect(address(i))


@at_least("owner")
def delete_issue(code, request, p, number):
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND
    del code.issues[i.number]
    return Redirect(f"/p/{p.slug}/issues")


@at_least("guest")
def add_comment(code, request, p, number):
    i, text = find(code.issues, p, number), request.form.get("comment", "")
    problem = unfit("comment", text, 200)
    if problem or i is None:
        return issue(code, request, p.slug, number, problem)
    code.issues[i.number] = i._replace(comments=(*i.comments, (request.user, text.strip())))
    return Redirect(address(i))


# ---- merge requests
@at_least("visitor")
def merges(code, request, p):
    state = request.query.get("state", ANY)
    found = [m for m in code.merges.values() if m.project == p.slug and state in (ANY, m.state)]
    rows = [(link(m.title, ROOT + address(m)), m.author, m.state, len(m.approved)) for m in found]
    choices = form(select("state", (ANY, "open", "merged", "closed"), state), submit="filter", method="get")
    return Page("merge requests", f"<h1>merge requests</h1><p>{p.name}</p>{choices}<p>{len(found)} found</p>"
                + table(("merge request", "author", "state", "approvals"), rows))


@at_least("visitor")
def merge(code, request, p, number, problem=""):
    m = find(code.merges, p, number)
    if m is None:
        return NOT_FOUND
    here, tools = ROOT + address(m), ""
    if request.user and m.state == "open":
        tools = press("approve", f"{here}/approve") + press("merge", f"{here}/merge") + \
            press("close merge request", f"{here}/close", "close without merging?")
    return Page("merge request", f"<h1>{escape(m.title)}</h1>{error(problem)}<p>merge request of {p.name}</p>"
                + fact("state", m.state) + fact("author", m.author) + fact("branch", m.branch)
                + fact("approved by", ", ".join(m.approved) or NOBODY) + tools)


@at_least("developer")
def act(code, request, p, number, what):
    m = find(code.merges, p, number)
    if m is None or m.state != "open":
        return NOT_FOUND
    if what == "approve" and m.author == request.user:
        return merge(code, request, p.slug, number, "nobody can approve a merge request of his own")
    if what == "merge" and not m.approved:
        return merge(code, request, p.slug, number, "somebody must approve it first")
    changes = {"approve": {"approved": tuple(dict.fromkeys((*m.approved, request.user)))},
               "merge": {"state": "merged"}, "close": {"state": "closed"}}
    code.merges[m.number] = m._replace(**changes[what])
    return Redirect(address(m))


SLUG, NUMBER = "/p/([a-z-]+)", "([0-9]{1,6})"
ROUTES = LOGIN_ROUTES + [
    ("GET", "", home),
    ("GET", "/search", search),
    ("GET", SLUG, project),
    ("POST", f"{SLUG}/follow", follow),
    ("GET", f"{SLUG}/members", members),
    ("POST", f"{SLUG}/members", invite),
    ("GET", f"{SLUG}/members/([a-z]+)", member),
    ("POST", f"{SLUG}/members/([a-z]+)", set_role),
    ("POST", f"{SLUG}/members/([a-z]+)/remove", remove_member),
    ("GET", f"{SLUG}/issues", issues),
    ("GET", f"{SLUG}/issues/new", new_form),
    ("POST", f"{SLUG}/issues/new", create_issue),
    ("GET", f"{SLUG}/issues/{NUMBER}", issue),
    ("GET", f"{SLUG}/issues/{NUMBER}/edit", edit_form),
    ("POST", f"{SLUG}/issues/{NUMBER}/edit", edit_issue),
    ("POST", f"{SLUG}/issues/{NUMBER}/turn", turn_issue),
    ("POST", f"{SLUG}/issues/{NUMBER}/delete", delete_issue),
    ("POST", f"{SLUG}/issues/{NUMBER}/comment", add_comment),
    ("GET", f"{SLUG}/merges", merges),
    ("GET", f"{SLUG}/merges/{NUMBER}", merge),
    ("POST", f"{SLUG}/merges/{NUMBER}/(approve|merge|close)", act),
]
