"""The code host: projects, issues, merge requests and members, whose role in a project says what they may do there."""

from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import NamedTuple

from .page import (
    LOGIN_ROUTES, NOT_FOUND, Page, Redirect,
    error, fact, items, link, table,
    area, field, form, press, search_box, select,
    members_only, navigation, paginate, refused, unfit,
)
from .shop import slug_of
from .words import ADJECTIVES, NOUNS, TOPICS
from .words import names, password, phrase

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
    main_user, *others = people
    accounts = {user: Account(user, password(rng)) for user in people}

    projects = {}
    for name in names(rng, TOPICS, 6):
        slug = slug_of(name)
        about = f"a {rng.choice(ADJECTIVES)} thing"
        projects[slug] = Project(slug, name, about, followers=rng.randint(1, 90))

    titles = iter(names(rng, NOUNS, len(NOUNS)))
    members, issues, merges = {}, {}, {}
    mine = rng.sample(["owner", "owner", "developer", "developer", "guest", "guest"], 6)
    for slug, role in zip(projects, mine):
        # Besides the main user a project has five members. The first of them owns it where the main user does not.
        first, *rest = rng.sample(others, 5)
        members[slug, first] = "developer" if role == "owner" else "owner"
        for user in rest:
            members[slug, user] = rng.choice(("guest", "developer"))
        members[slug, main_user] = role
        team = [first, *rest, main_user]

        for i in range(rng.randint(5, 7)):
            state = rng.choice(("open", "open", "closed")) if i else "open"
            number = 10 + len(issues)
            issues[number] = Issue(
                number,
                slug,
                title=next(titles),
                author=rng.choice(team),
                assignee=rng.choice([NOBODY, *team]),
                priority=rng.choice(PRIORITIES),
                state=state,
                comments=(),
            )

        for i in range(rng.randint(2, 3)):
            author, *approved = rng.sample(rest, rng.randint(1, 2))
            state = rng.choice(("open", "open", "merged")) if i else "open"
            number = 10 + len(merges)
            merges[number] = Merge(
                number,
                slug,
                title=next(titles),
                author=author,
                branch=phrase(rng).replace(" ", "-"),
                state=state,
                approved=tuple(approved),
            )
    return Code(accounts, projects, members, issues, merges, {})


def nav(user: str | None) -> str:
    links = navigation(ROOT, user, [("home", ROOT)])
    return links + search_box(ROOT)


def role_of(code, slug: str, user: str | None) -> str:
    return code.members.get((slug, user), "visitor")


def at_least(role):
    """Lets a handler run for those who have this role or a higher one in the project, and hands it the project."""
    def decorate(handler):
        @wraps(handler)
        def guarded(code, request, slug, *groups):
            p = code.projects.get(slug)
            if p is None:
                return NOT_FOUND
            if request.user is None and role != "visitor":
                return Redirect("/login")
            mine = role_of(code, slug, request.user)
            if ROLES.index(mine) < ROLES.index(role):
                return refused(f"this needs the role {role} and you are {mine} of {p.name}")
            return handler(code, request, p, *groups)
        return guarded
    return decorate


# ---- projects
def followers(code, p) -> int:
    joined = sum(slug == p.slug for slug, _ in code.following)
    return p.followers + joined


def home(code, request):
    order = request.query.get("sort", "name")
    ranked = sorted(code.projects.values(), key=lambda p: p.name)
    if order == "followers":
        ranked.sort(key=lambda p: -followers(code, p))  # where two have as many, names decide
    shown, links = paginate(ranked, request, PER_PAGE, ROOT)

    rows = []
    for p in shown:
        name = link(p.name, f"/code/p/{p.slug}")
        role = role_of(code, p.slug, request.user)
        rows.append((name, p.about, followers(code, p), role))

    choice = select("sort", ("name", "followers"), order)
    body = "<h1>projects</h1>"
    body += form(choice, submit="apply", method="get")
    body += table(("project", "about", "followers", "your role"), rows)
    return Page("code", body + links)


def search(code, request):
    """Projects by the words of their names, issues and merge requests by those of their titles."""
    text = request.query.get("q", "").lower()
    wanted = set(text.split())
    lines = []
    if wanted:
        for p in code.projects.values():
            if wanted <= set(p.name.split()):
                name = link(p.name, f"/code/p/{p.slug}")
                lines.append(f"{name} project")
        for row in (*code.issues.values(), *code.merges.values()):
            if wanted <= set(row.title.split()):
                title = link(row.title, ROOT + address(row))
                lines.append(f"{title} in {code.projects[row.project].name}")

    body = f"<h1>search</h1><p>{len(lines)} found</p>"
    body += items(lines[:12])
    return Page("search", body)


@at_least("visitor")
def project(code, request, p):
    here = f"/code/p/{p.slug}"
    button = ""
    if request.user:
        follows = (p.slug, request.user) in code.following
        button = press("unfollow" if follows else "follow", f"{here}/follow")
    links = [
        link("issues", f"{here}/issues"),
        link("merge requests", f"{here}/merges"),
        link("members", f"{here}/members"),
    ]
    body = f"<h1>{p.name}</h1><p>{p.about}</p>"
    body += fact("followers", followers(code, p))
    body += fact("your role", role_of(code, p.slug, request.user))
    body += button
    body += items(links)
    return Page(p.name, body)


@at_least("visitor")
@members_only
def follow(code, request, p):
    """Follows the project, or no longer follows it."""
    key = (p.slug, request.user)
    if key in code.following:
        del code.following[key]
    else:
        code.following[key] = True
    return Redirect(f"/p/{p.slug}")


# ---- members
@at_least("visitor")
def members(code, request, p, problem=""):
    mine = role_of(code, p.slug, request.user)
    rows = []
    for (slug, user), role in code.members.items():
        if slug != p.slug:
            continue
        if mine == "owner":
            name = link(user, f"/code/p/{p.slug}/members/{user}")
        else:
            name = f'<span id="{user}">{user}</span>'
        rows.append((name, f'<span id="role-{user}">{role}</span>'))

    body = f"<h1>members</h1><p>{p.name}</p>{error(problem)}"
    body += table(("member", "role"), rows)
    if mine == "owner":
        username = request.form.get("username", "")
        body += "<h2>invite</h2>"
        body += form(
            field("username", username),
            select("role", ("choose", *ROLES[1:])),
            submit="invite",
        )
    return Page("members", body)


@at_least("owner")
def invite(code, request, p):
    user = request.form.get("username", "").strip()
    role = request.form.get("role")

    problem = ""
    if role not in ROLES[1:]:
        problem = "choose a role"
    elif (p.slug, user) in code.members:
        problem = f"{user} is a member already"
    elif user not in code.accounts:
        problem = "there is no such user"
    if problem:
        return members(code, request, p.slug, problem)

    code.members[p.slug, user] = role
    return Redirect(f"/p/{p.slug}/members")


@at_least("owner")
def member(code, request, p, user):
    if (p.slug, user) not in code.members:
        return NOT_FOUND
    here = f"/code/p/{p.slug}/members/{user}"
    role = select("role", ROLES[1:], code.members[p.slug, user])
    body = f"<h1>{user}</h1><p>member of {p.name}</p>"
    body += form(role, submit="save")
    body += press(f"remove {user}", f"{here}/remove", "remove this member?")
    return Page(user, body)


@at_least("owner")
def set_role(code, request, p, user):
    role = request.form.get("role")
    if (p.slug, user) not in code.members or role not in ROLES[1:]:
        return NOT_FOUND
    if user == request.user:
        return refused("you cannot change your own role")
    code.members[p.slug, user] = role
    return Redirect(f"/p/{p.slug}/members")


@at_least("owner")
def remove_member(code, request, p, user):
    if user == request.user:
        return refused("you cannot leave a project that you own")
    code.members.pop((p.slug, user), None)
    return Redirect(f"/p/{p.slug}/members")


# ---- issues
def address(row) -> str:
    """The path of an issue or a merge request, below ROOT."""
    kind = "issues" if isinstance(row, Issue) else "merges"
    return f"/p/{row.project}/{kind}/{row.number}"


def issue_table(issues) -> str:
    rows = []
    for i in issues:
        title = link(i.title, ROOT + address(i))
        rows.append((title, i.priority, i.state, i.assignee))
    return table(("issue", "priority", "state", "assignee"), rows)


@at_least("visitor")
def issues(code, request, p):
    here = f"/code/p/{p.slug}/issues"
    state = request.query.get("state", "open")
    priority = request.query.get("priority", ANY)

    found = [i for i in code.issues.values() if i.project == p.slug]
    found = [i for i in found if state in (ANY, i.state)]
    found = [i for i in found if priority in (ANY, i.priority)]
    shown, links = paginate(found, request, PER_PAGE, here)

    choices = form(
        select("state", ("open", "closed", ANY), state),
        select("priority", (ANY, *PRIORITIES), priority),
        submit="filter",
        method="get",
    )
    new = link("new issue", f"{here}/new")
    body = f"<h1>issues</h1><p>{p.name}</p><p>{new}</p>"
    body += f"{choices}<p>{len(found)} found</p>"
    body += issue_table(shown)
    return Page("issues", body + links)


def team_of(code, p) -> list[str]:
    return [user for slug, user in code.members if slug == p.slug]


def issue_form(code, request, p, title, shown, submit, problem=""):
    """The form of a new or an old issue. shown: what its fields hold before anything is typed."""
    shown = shown | request.form
    assignees = (NOBODY, *team_of(code, p))
    body = f"<h1>{title}</h1><p>{p.name}</p>{error(problem)}"
    body += form(
        field("title", shown["title"]),
        select("priority", PRIORITIES, shown["priority"]),
        select("assignee", assignees, shown["assignee"]),
        submit=submit,
    )
    return Page(title, body)


def read_issue(code, request, p) -> tuple[dict, str]:
    """What a posted form says of an issue, and what is wrong with it."""
    given = {}
    for name in ("title", "priority", "assignee"):
        given[name] = request.form.get(name, "").strip()

    assignees = (NOBODY, *team_of(code, p))
    problem = unfit("title", given["title"])
    if given["priority"] not in PRIORITIES or given["assignee"] not in assignees:
        problem = "choose a priority and an assignee from the list"
    return given, problem


@at_least("guest")
def new_form(code, request, p, problem=""):
    shown = {
        "title": "",
        "priority": "normal",
        "assignee": NOBODY,
    }
    return issue_form(code, request, p, "new issue", shown, "create issue", problem)


@at_least("guest")
def create_issue(code, request, p):
    given, problem = read_issue(code, request, p)
    if problem:
        return new_form(code, request, p.slug, problem)
    number = max(code.issues) + 1
    new = Issue(
        number=number,
        project=p.slug,
        author=request.user,
        state="open",
        comments=(),
        **given,
    )
    code.issues[number] = new
    return Redirect(address(new))


def find(table, p, number):
    """The row of this number, None where it is not one of this project's."""
    row = table.get(int(number))
    if row is None or row.project != p.slug:
        return None
    return row


@at_least("visitor")
def issue(code, request, p, number, problem=""):
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND

    here = ROOT + address(i)
    tools, write = "", ""
    if request.user:
        edit = link("edit issue", f"{here}/edit")
        verb = "close" if i.state == "open" else "reopen"
        tools += f"<p>{edit}</p>"
        tools += press(f"{verb} issue", f"{here}/turn")
        tools += press("delete issue", f"{here}/delete", "delete this issue?")
        typed = request.form.get("comment", "")
        write = form(area("comment", typed), submit="send", action=f"{here}/comment")

    said = [f"{user} : {escape(text)}" for user, text in i.comments]

    body = f'<h1 id="title">{escape(i.title)}</h1>{error(problem)}'
    body += f"<p>issue of {p.name}</p>"
    body += fact("state", i.state)
    body += fact("priority", i.priority)
    body += fact("author", i.author)
    body += fact("assignee", i.assignee)
    body += f"{tools}<h2>comments</h2>{items(said)}{write}"
    return Page("issue", body)


@at_least("developer")
def edit_form(code, request, p, number, problem=""):
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND
    return issue_form(code, request, p, "edit issue", i._asdict(), "save", problem)


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
    """Closes an open issue, opens a closed one again."""
    i = find(code.issues, p, number)
    if i is None:
        return NOT_FOUND
    state = "closed" if i.state == "open" else "open"
    code.issues[i.number] = i._replace(state=state)
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
    i = find(code.issues, p, number)
    text = request.form.get("comment", "")
    problem = unfit("comment", text, 200)
    if problem or i is None:
        return issue(code, request, p.slug, number, problem)
    comment = (request.user, text.strip())
    comments = (*i.comments, comment)
    code.issues[i.number] = i._replace(comments=comments)
    return Redirect(address(i))


# ---- merge requests
@at_least("visitor")
def merges(code, request, p):
    state = request.query.get("state", ANY)
    found = [m for m in code.merges.values() if m.project == p.slug]
    found = [m for m in found if state in (ANY, m.state)]

    rows = []
    for m in found:
        title = link(m.title, ROOT + address(m))
        rows.append((title, m.author, m.state, len(m.approved)))

    choice = select("state", (ANY, "open", "merged", "closed"), state)
    body = f"<h1>merge requests</h1><p>{p.name}</p>"
    body += form(choice, submit="filter", method="get")
    body += f"<p>{len(found)} found</p>"
    body += table(("merge request", "author", "state", "approvals"), rows)
    return Page("merge requests", body)


@at_least("visitor")
def merge(code, request, p, number, problem=""):
    m = find(code.merges, p, number)
    if m is None:
        return NOT_FOUND

    tools = ""
    if request.user and m.state == "open":
        here = ROOT + address(m)
        tools += press("approve", f"{here}/approve")
        tools += press("merge", f"{here}/merge")
        tools += press("close merge request", f"{here}/close", "close without merging?")

    body = f"<h1>{escape(m.title)}</h1>{error(problem)}"
    body += f"<p>merge request of {p.name}</p>"
    body += fact("state", m.state)
    body += fact("author", m.author)
    body += fact("branch", m.branch)
    body += fact("approved by", ", ".join(m.approved) or NOBODY)
    return Page("merge request", body + tools)


@at_least("developer")
def act(code, request, p, number, what):
    """Approves, merges or closes an open merge request."""
    m = find(code.merges, p, number)
    if m is None or m.state != "open":
        return NOT_FOUND

    if what == "approve":
        if m.author == request.user:
            return merge(code, request, p.slug, number, "nobody can approve a merge request of his own")
        approved = m.approved
        if request.user not in approved:
            approved = (*approved, request.user)
        turned = m._replace(approved=approved)
    elif what == "merge":
        if not m.approved:
            return merge(code, request, p.slug, number, "somebody must approve it first")
        turned = m._replace(state="merged")
    else:
        turned = m._replace(state="closed")

    code.merges[m.number] = turned
    return Redirect(address(m))


SLUG = "/p/([a-z-]+)"
NUMBER = "([0-9]{1,6})"
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
