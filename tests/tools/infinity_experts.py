"""WebArena-Infinity played by scripts, which read observations and answer with actions, as a policy does.

    python tests/tools/infinity_experts.py CLONE                      # all of SCRIPTS, two at a time
    python tests/tools/infinity_experts.py CLONE gmail paypal-my-wallet/e3  # an application, a task
    python tests/tools/infinity_experts.py CLONE --out runs/infinity  # demonstrations for bc.py --data

A script is a list of steps. A step finds its element in the page of the moment, by the name that the page
shows, and near a text of the page if need be. No script knows ids, addresses, verifiers or the server's state.
The verifier of each task judges the episode, in a fresh copy of the application.

    click("Edit", after="Acme")    the first Edit after the first Acme; ("Acme", "Mail"): after the first
                                   Mail that comes after the first Acme
    click("Edit", before="Acme")   the last Edit before the first Acme
    click("Edit", row="Acme")      the first Edit in a line that holds Acme

SCRIPTS and UNSOLVED name the tasks that served to develop the scripts and worlds/page/: no held-out figure may
count them. UNSOLVED says of each task that we tried in vain what was in the way.

A step that finds nothing ends the episode with N/A. The report names what it looked for.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]
import run  # noqa: E402, F401  first: it prepares OpenMP before torch loads

import argparse  # noqa: E402
import asyncio  # noqa: E402
import html  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import defaultdict  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import NamedTuple  # noqa: E402

import worlds  # noqa: E402
from compress import Chat, Trajectory, format_response, open_chat, to_record  # noqa: E402
from evaluate import Environment, SiteSettings  # noqa: E402
from rollout import actions_help, play, task_key  # noqa: E402

# ------------------------------------------------------------------------------------------- steps --


@dataclass(frozen=True)
class Step:
    """One action, and how to find its element."""
    action: str               # one of rollout.ACTIONS
    name: str = ""            # of the element
    text: str | None = None   # the action's argument
    thought: str = ""
    after: str | tuple = ""   # texts: each is looked for after the one before it
    before: str = ""
    row: str = ""
    kind: str = ""            # of the element: input, button, ...


def click(name: str, **where) -> Step:
    return Step("Click", name, thought=f"click {name}", **where)


def right_click(name: str, **where) -> Step:
    return Step("Right Click", name, thought=f"click {name} with the right button", **where)


def type_into(name: str, text: str, **where) -> Step:
    return Step("Type", name, text, f"type {text} into {name}", **where)


def search(name: str, text: str, **where) -> Step:
    return Step("Search", name, text, f"type {text} into {name} and press enter", **where)


def select(name: str, option: str, **where) -> Step:
    return Step("Select Dropdown Option", name, option, f"choose {option} as {name}", kind="select", **where)


def press_enter() -> Step:
    return Step("Press Enter", thought="press enter")


def done(message: str = "done") -> Step:
    return Step("exit", text=message, thought="all is done")


# ------------------------------------------------------------------------- finding them in a page --


class Lost(Exception):
    """The page does not hold what a step needs."""


class Element(NamedTuple):
    kind: str   # a, button, input, ...
    name: str   # as the page writes it, so & is &amp;
    id: str
    begin: int  # where it stands in the page's text
    line: str   # the line of the page that it stands in


ELEMENT = re.compile(r"<([^<>]+)>([^<]*) <(\d+)>")  # up to its id


def elements(page: str) -> list[Element]:
    """All elements of an observation, in its order."""
    found = []
    for match in ELEMENT.finditer(page):
        kind, name, number = match.groups()
        start = page.rfind("\n", 0, match.start()) + 1
        line = page[start:].partition("\n")[0]
        found.append(Element(kind, name, number, match.start(), line))
    return found


def position(page: str, texts: str | tuple) -> int:
    """Where the last of the texts begins, if each is looked for after the one before it."""
    if isinstance(texts, str):
        texts = (texts,)
    begin = end = 0
    for text in texts:
        text = html.escape(text, quote=False)
        begin = page.find(text, end)
        if begin < 0:
            raise Lost(f"no text {text!r} on the page")
        end = begin + len(text)
    return begin


def find(page: str, step: Step) -> Element:
    """The element that a step means: of its exact name, else one whose name begins so, else holds it."""
    candidates = elements(page)
    if step.kind:
        candidates = [element for element in candidates if element.kind == step.kind]
    if step.after:
        begin = position(page, step.after)
        candidates = [element for element in candidates if element.begin >= begin]
    if step.before:
        end = position(page, step.before)
        candidates = [element for element in reversed(candidates) if element.begin < end]
    if step.row:
        row = html.escape(step.row, quote=False)
        candidates = [element for element in candidates if row in element.line]

    names = [html.unescape(element.name) for element in candidates]
    pairs = list(zip(candidates, names))
    exact = [element for element, name in pairs if name == step.name]
    begins = [element for element, name in pairs if name.startswith(step.name)]
    holds = [element for element, name in pairs if step.name in name]
    found = exact + begins + holds
    if not found:
        raise Lost(f"no element for {step}")
    return found[0]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def response_to(page: str, step: Step) -> tuple[str, str]:
    """(thought, action) as the sandbox's experts write them."""
    if step.action == "exit":
        return step.thought, f"exit(message={quoted(step.text)})"
    if not step.name:
        return step.thought, f"do(action={quoted(step.action)})"
    element = find(page, step)
    argument = ""
    if step.text is not None:
        argument = f"argument={quoted(step.text)}, "
    call = f'do(action="{step.action}", {argument}element="{element.id}")'
    return step.thought, f"# Element: {element.name} <{element.id}>\n{call}"


# ------------------------------------------------------------------------------------------ scripts --

SCRIPTS: dict[str, list[Step]] = {}


def scripts(app: str, **steps: list[Step]):
    """Adds an application's scripts. function_5 and the like are the benchmark's names of its tasks."""
    for name, own in steps.items():
        SCRIPTS[f"{app}/{name}"] = [*own, done()]


scripts(
    "linear-account-settings",
    e1=[click("Preferences"), click("System", after="Theme"), click("Dark")],
    e3=[click("Notifications"), click("Desktop"), click("Enable desktop notifications")],
    e4=[click("Edit Username"), type_into("Edit username", "amorgan"), click("Save")],
    e7=[click("Preferences"), click("Active issues"), click("My Issues")],
    e8=[click("Security"), click("Remove", after="YubiKey"), click("Remove")],
    e9=[click("Security"), click("Revoke access", after="Zapier"), click("Revoke")],
    e11=[click("Disconnect", after="Figma"), click("Disconnect")],
    m2=[click("Security"), click("Revoke access", after="Firefox on Windows"), click("Revoke")],
    m4=[click("Security"), click("Create key"), type_into("Label", "Staging Environment"), click("Create")],
    m6=[click("Notifications"), click("Email"), click("Status changes", after="Enable email"),
        click("Comments", after="Enable email")],
    m8=[click("Leave workspace", after="Side Project Labs"), click("Leave")],
    h3=[click("Disconnect", after="GitHub"), click("Disconnect"), click("Disconnect", after="GitLab"),
        click("Disconnect")],
    h2=[click("Security"), click("Revoke all"), click("Revoke")],
    function_1=[click("Edit Full name"), type_into("Edit full name", "Jordan Rivera"), click("Save")],
    function_5=[click("Disconnect", after="GitHub"), click("Disconnect")],
    function_9=[click("Disconnect", after="Google"), click("Disconnect")],
    function_13=[click("Preferences"), click("Active issues"), click("My Issues")],
    function_17=[click("Preferences"), click("System", after="Theme"), click("Dark")],
    function_21=[click("Preferences"), click("Title only"), click("Title and repository")],
    function_25=[click("Preferences"), click("Open in desktop app")],
    function_29=[click("Preferences"), click("Auto-assign on started")],
    function_33=[click("Notifications"), click("Desktop"), click("Enable desktop notifications")],
    function_37=[click("Notifications"), click("Desktop"), click("Issue assigned to you")],
    function_41=[click("Notifications"), click("Email"), click("Status changes", after="Enable email")],
    function_45=[click("Notifications"), click("DPA updates")],
    function_49=[click("Security"), click("Revoke access", after="Chrome on Linux"), click("Revoke")],
    function_53=[click("Security"), click("Remove", after="iPhone Face ID"), click("Remove")],
    function_57=[click("Security"), click("Revoke access", after="Zapier"), click("Revoke")],
)

scripts(
    "paypal-my-wallet",
    e2=[click("Preferences"), click("Weekly Digest")],
    e3=[click("Offers"), click("Save Offer", after="DoorDash")],
    e5=[click("Offers"), click("Remove", after="Uber")],
    e13=[click("Cards"), click("Remove", after="6221"), click("Remove")],
    m1=[click("Cards"), click("Set as Preferred", after="7156")],
    m3=[click("Balance"), click("Withdraw"), type_into("Amount", "300"), click("Withdraw", after="Cancel")],
    m5=[click("Savings"), click("Deposit"), type_into("Deposit Amount", "500"), click("Deposit")],
    m6=[click("PayPal Debit Card"), click("Change", after="Daily Spending Limit"),
        type_into("Daily Spending Limit", "5000"), click("Update")],
    m11=[click("Cryptocurrency"), click("Buy", after="Ethereum"), type_into("Amount", "50"), click("Buy Ethereum")],
    m15=[click("PayPal Debit Card"), click("Edit", after="Employer"), type_into("Employer", "Global Dynamics"),
         click("Save")],
    function_14=[click("Balance"), click("Convert"), type_into("Amount", "100"), click("Convert")],
    h10=[click("Preferences"), click("Payment Notifications"), click("Transfer Notifications"), click("Crypto Alerts"),
         click("Rewards Updates"), click("Weekly Digest")],
    function_31=[click("PayPal Credit"), click("AutoPay", kind="checkbox")],
)

scripts(
    "elation-prescriptions",
    e1=[click("Rx Requests"), click("Approve", after="Gabapentin")],
    e2=[click("Rx Requests"), click("Deny", after="Omeprazole"),
        type_into("Reason for Denial", "The patient takes famotidine now."), click("Deny Request")],
    e4=[click("remove allergy", after="Latex"), click("Remove")],
    e7=[click("Settings"), click("Preferences"), click("Show Cost Estimates")],
    e8=[click("Settings"), click("delete template", after="Prednisone 10mg tablet (taper)"), click("Delete")],
    m5=[click("Settings"), click("Custom Rx Sigs"), click("Add"),
        type_into("Sig Text", "Take 2 capsules by mouth once daily with food"), select("Category", "Oral"), click("Add Sig")],
    m11=[click("add allergy"), type_into("Allergen", "Shellfish"), type_into("Reaction", "Hives and swelling"),
         select("Severity", "Severe"), select("Type", "Food"), click("Add Allergy")],
    m14=[click("Actions", after="Prednisone 10mg tablet"), click("Discontinue"), click("Select reason"),
         click("Patient stopped taking medication"),
         type_into("Additional Details", "Completed the course"), click("Discontinue", after="Cancel")],
    h9=[click("Rx Requests"), click("Deny & Add Reason", after=("Change Request", "Atorvastatin")),
        type_into("Reason", "The current medication is working well."), click("Deny & Add Reason", after="Cancel"),
        click("Deny & Add Reason", after=("Change Request", "Gabapentin")),
        type_into("Reason", "The current sig is correct."), click("Deny & Add Reason", after="Cancel")],
    function_13=[click("Actions", after="Montelukast"), click("Set as Temporary")],
    function_27=[click("Settings"), click("Preferences"), click("CVS"), click("Walgreens #7892")],
    function_6=[click("Rx Requests"), click("Approve with Modifications", after="Metoprolol"),
                type_into("Number of Refills", "3"), click("Approve with Modifications", after="Cancel")],
)

scripts(
    "elation-clinical-records",
    e1=[click("Johnson, Marcus"), click("×", after="Smoker")],
    e3=[click("Settings"), click("Coded Visit Note Assessments")],
    e5=[click("Templates"), click("Delete", after="Injectable Administration"), click("Delete")],
    e8=[click("Categories"), click("Count for MIPS", after="Procedure")],
    e10=[click("Categories"), click("Edit", after="Workers Comp"), type_into("Name", "Workers Compensation"),
         click("Save")],
    e18=[click("Templates"), click("Duplicate", after="Diabetes Management")],
    e6=[click("Zhao, Helen"), click("+ Add Tag"), type_into("Tag", "Fall-Risk"), click("Add")],
    m6=[click("Settings"), click("Edit", row="Telehealth Visit"), click("cat_002"), click("Follow-Up"), click("Save")],
    m7=[click("Categories"), click("+ Add Category"), type_into("Category Name", "Behavioral Health"),
        click("Count for MIPS?"), click("Save")],
    function_7=[click("Henderson, Robert"), click("Mark Active", after="Seasonal Allergic Rhinitis")],
    m4=[click("Henderson, Robert"), click("Vitals"), click("+ Add Historical Vitals"),
        type_into("Systolic BP", "126"), type_into("Diastolic BP", "78"), type_into("Heart Rate", "72"), click("Save")],
    h1=[click("Johnson, Marcus"), *[click("Mark Controlled")] * 4],
)

scripts(
    "elation-patient-communication",
    e1=[click("Patient Letters"), click("Janet Okonkwo")],
    e2=[click("Reminders"), click("Acknowledge", after="James Rodriguez")],
    e3=[click("Appointments"), click("Cancel", row="Thyroid check-up"), click("Confirm")],
    e5=[click("Patients"), search("Search patients", "Park"), click("Park, David", kind="a"),
        click("Add Tag"), click("VIP")],
    e8=[click("Drafts"), click("Delete"), click("Confirm")],
    e13=[click("Settings"), click("Billing Codes"), click("Remove", row="99201"), click("Confirm")],
    e16=[click("Settings"), click("Telehealth", after="Message Routing"),
         click("Everyone in Meeting"), click("Host Only"), click("Save Changes")],
    m2=[click("Patient Letters"), click("Aisha Patel"), click("End"), click("Confirm")],
    h9=[click("Reminders"), *[click("Acknowledge")] * 9],
    m8=[click("Settings"), click("Billing Codes"), click("Add"), type_into("CPT Code", "99205"),
        type_into("Description", "Office visit, new patient, high complexity"), click("Add Code")],
    function_22=[click("Patients"), search("Search patients", "Murphy"), click("Murphy, Brian", kind="checkbox"),
                 click("Send Passport Invitation"), click("Confirm")],
)

def white_and_blue(slide: str) -> list[Step]:
    """Corporate Blue with a white background."""
    return [click(slide), click("▾", after="Template Style"), click("Corporate Blue"), click("Solid"),
            click("toggle color picker"), click("select color #ffffff")]


scripts(
    "figma-slides",
    h3=[*white_and_blue("3 Q3 Highlights"), *white_and_blue("4 Growth Metrics"), *white_and_blue("5 Customer Feedback")],
    function_22=[click("3 Q3 Highlights"), click("2.4M Active Users"), click("toggle color picker", before="Fill"),
                 click("select color #7b61ff")],
    e1=[right_click("Competitive Landscape"), click("Skip")],
    e2=[type_into("Rename deck", "Q4 2025 Strategy Update"), press_enter()],
    e4=[click("Share"), click("Remove", after="Tom Nguyen")],
    e14=[click("Share"), click("Can view", after="Role"), click("Can edit")],
    e20=[click("Thank You"), click("Animate"), click("Dissolve"), click("Push")],
    function_3=[click("12 Competitive Landscape"), right_click("12 Competitive Landscape"), click("Skip slide")],
    function_5=[click("-- Sprint Timeline"), right_click("-- Sprint Timeline"), click("Delete"), click("Delete")],
    function_2=[click("Q4 Roadmap"), type_into("Add presenter notes",
        "Aiko will present the roadmap. Focus on timelines and deliverables."), click("Design")],
    function_6=[right_click("Q3 Highlights"), click("Duplicate")],
    function_34=[click("API Reference"), click("JavaScript"), click("Monokai"), click("Dracula")],
    e11=[click("Q4 2025 Product Strategy", after="Thank You"), click("🔓 Lock")],
)

scripts(
    "figma-text-and-typography",
    e1=[click("Hide", after="Copyright Notice")],
    e2=[click("Lock", after="Page Title")],
    e4=[click("Settings"), click("Smart quotes")],
    e6=[click("Settings"), click("English (US)"), click("French")],
    e14=[click("Settings"), click("16", after="Font size"), click("14")],
    e8=[click("Page Title"), click("Typography"), click("Underline")],
    m4=[click("New Text"), type_into("Text content", "Terms and Conditions"), click("Create")],
    m11=[click("Text Styles"), click("Delete style", after="Heading/Display"), click("Delete")],
    m13=[click("Page Title"), click("Settings"), type_into("px", "2", after="Nudge amount"), type_into("px", "20", after="Big nudge")],
    function_9=[click("Body Text"), click("Typography"), type_into("px", "18", after="Size")],
    function_28=[click("Feature List"), click("Typography"), click("Details"), click("bulleted"), click("Numbered")],
)

scripts(
    "gitlab-plan-and-track",
    e1=[click("Login page shows blank screen"), click("Close issue")],
    e2=[click("Epics"), click("Analytics Dashboard"), click("Reopen")],
    e3=[click("To-Do List"), click("Done", after="Upgrade vulnerable dependencies")],
    e4=[click("Markdown preview"), click("Delete"), click("Delete")],
    e5=[click("Fix typo in 404"), click("Edit", after="Weight"), type_into("Weight", "3"), click("Save")],
    e8=[click("Milestones"), click("v4.3 - Mobile Optimization"), click("Close")],
    e14=[click("Labels"), click("Edit", after="good-first-issue"), type_into("Title", "starter-issue"), click("Save changes")],
    m1=[click("Milestones"), click("New milestone"), type_into("Title", "v4.4 - Integrations"),
        type_into("Start date", "2026-08-01"), type_into("Due date", "2026-09-30"), click("Create milestone")],
    m17=[click("Boards"), click("New board"), type_into("Board name", "Priority Board"), click("Add list"),
         click("Create board")],
    function_16=[type_into("Search issues", "Dashboard widget"), click("Dashboard widget layout"),
                 click("Edit", after=("# Dashboard widget", "Iteration")), click("Sprint 27"), click("Save")],
    h7=[type_into("Search issues", "error boundary"), click("Improve error boundary"),
        click("Edit", after=("# Improve error", "Labels")), click("type improvement"),
        click("component frontend"), click("UX"), click("type bug"), click("priority medium"), click("Save")],
    function_1=[click("New issue"), type_into("Title", "Implement user profile badges"), type_into("Weight", "5"),
                click("Create issue")],
)

scripts(
    "gmail",
    e1=[click("☆", before="Q1 Product Roadmap Review")],
    e3=[click("Tom Bradley", kind="checkbox", before="Property Listing"), click("Delete")],
    e5=[click("Settings"), click("Conversation view off"), click("Save Changes")],
    e6=[click("Settings"), click("Default ▾"), click("Dark"), click("Save Changes")],
    e9=[click("Settings"), click("5 seconds"), click("30 seconds"), click("Save Changes")],
    h8=[click("Settings"), click("Default ▾"), click("Dark"), click("5 seconds"), click("20 seconds"),
        click("Compact"), click("Disable hover actions"), click("Enable dynamic email"), click("Save Changes")],
    e15=[click("▷", before="Design System Update")],
    e19=[click("Settings"), click("Filters and Blocked Addresses"), click("unblock", after="annoying@daily-deals.biz")],
    m8=[click("Settings"), click("Inbox", after="# Settings"), click("Social", kind="checkbox"),
        click("Save Changes")],
    m16=[click("Spam"), click("Delete all spam messages"), click("Empty Spam now")],
    function_7=[click("Ana Gutierrez", kind="checkbox", before="Volunteer Event"), click("Archive")],
    function_18=[click("Compose"), type_into("To", "sarah.chen@techcorp.io", after="New Message"),
                 type_into("Subject", "Meeting Follow-up"),
                 type_into("compose body", "Thanks for the update on the project."), click("Send", after="New Message")],
    function_14=[click("Create new label"), type_into("Label name", "Urgent"), click("Create")],
)

scripts(
    "gmail-accounts-and-contacts",
    e1=[click("star border", after="James O'Brien")],
    e2=[click("Settings", after="Linked Services"), click("Automatically add contacts")],
    e3=[click("Delegates"), click("Remove delegate", after="expired"), click("Remove")],
    e5=[click("Linked Services"), click("YouTube")],
    h2=[click("Linked Services"), click("Google Search"), click("YouTube"), click("Google Ads"), click("Google Play"),
        click("Chrome"), click("Google Shopping"), click("Google Maps")],
    e6=[click("delete", after="Diana Castillo"), click("Delete")],
    e7=[click("Merge & fix"), click("Dismiss", after="CloudNine")],
    e12=[click("Other contacts"), click("Delete", after="AWS Billing")],
    m5=[click("Other contacts"), click("Add to contacts", after="Jason Blake")],
    m2=[click("Create contact"), type_into("First name", "Jordan"), type_into("Last name", "Wells"),
        type_into("Email", "jordan.wells@wellsfargo.com"), type_into("Company", "Wells Fargo"), click("Save")],
    function_15=[click("Create label"), type_into("Label name", "Conference"), click("Create")],
    function_21=[search("Search contacts", "Sarah Chen"), click("Sarah Chen"), click("Remove label", after=("### Labels", "Work"))],
)

scripts(
    "handshake-career-exploration",
    e1=[click("Employers"), click("Follow", before="Spotify")],
    e2=[click("Employers"), click("Following", before="Stripe"), ],
    e3=[click("Jobs"), click("save job", after="Software Engineer Intern")],
    e5=[click("Events"), click("RSVP", after="JPM Markets")],
    e6=[click("bookmark post", after="AWS re:Invent was incredible")],
    e7=[click("like post", after="Hot take: You don't need")],
    e8=[click("Messages"), click("Apple")],
    e18=[click("Q&A"), click("liberal arts"), click("Helpful")],
    m1=[click("Maya Chen"), click("Edit", after="Bio"),
        type_into("Bio", "I am exploring opportunities in AI safety and alignment research."), click("Save")],
    h1=[click("Employers"), click("Follow", before="McKinsey & Company"), click("Follow", before="Deloitte"),
        click("Follow", before="Bain & Company")],
    m3=[click("Q&A"), type_into("Type your question", "What are the best ways to prepare for product management "
        "interviews at top tech companies?"), click("Submit Question")],
    m4=[click("open comments", after="Just got my return offer"), ],
    m18=[click("Career Center"), click("Case Interview Prep"), click("Cancel Appointment")],
    function_1=[click("Share something with the community"),
                type_into("Share something", "Looking for advice on product management interview prep! Any tips "
                          "appreciated."), click("Post")],
    function_21=[click("Messages"), click("Mark all as read")],
)

scripts(
    "superhuman-general",
    e1=[click("☆ Star", after="Series B Term Sheet")],
    e2=[click("›"), click("✓ Mark Done", after="Logistics Update")],
    e4=[click("⚙ Settings"), click("Light"), click("Dark")],
    e6=[click("⚙ Settings"), click("Read Statuses"), click("Enable Read Statuses")],
    e12=[click("Snippets"), click("Delete", after="Out of Office")],
    m1=[click("Sarah Chen", before="Q2 Product Roadmap", kind="div"), click("🏷 Label"), click("Urgent")],
    m3=[click("+ Create label"), type_into("Name", "Partnerships"), click("select color #009688"), click("Create")],
    function_12=[click("+ Create label"), type_into("Name", "Design"), click("select color #2196f3"), click("Create")],
    m5=[click("Spam"), click("CryptoGains Now", kind="div"), click("📁 Move"), click("Inbox", after="Move")],
    function_25=[click("⚙ Settings"), click("Booking Pages"), click("❌", after="Quick Sync")],
    h4=[click("⚙ Settings"), click("Light ▾"), click("Dark"), click("Desktop notifications"), click("Sound")],
    m9=[click("Compose"), type_into("To", "david.kim@financeplus.com", after="New Message"),
        type_into("Subject", "Partnership call"),
        type_into("Write your message", "Hi David, let us schedule the partnership call next week."),
        click("Send", after="New Message")],
    function_9=[click("Reminders"), click("James O'Brien", before="Patent Filing", kind="div"), click("Clear")],
    function_2=[click("Tom Bradley", before="Infrastructure Migration Plan", kind="checkbox"), click("Mark Unread")],
)

scripts(
    "xero-invoicing",
    e1=[click("Invoices"), click("INV-0058", kind="a"), click("Approve")],
    e2=[click("Invoices"), click("INV-0054", kind="a"), click("Void"), click("Void")],
    e3=[click("Invoices"), click("INV-0059", kind="a"), click("Delete"), click("Delete")],
    e5=[click("Quotes"), click("QU-0023"), click("Accept")],
    e10=[click("Branding Themes"), click("Delete", after="Simple Clean")],
    e12=[click("Invoice Reminders"), click("7 day(s) before due date")],
    e14=[click("Invoice Settings"), click("Tax Exclusive"), click("Tax Inclusive"), click("Save Settings")],
    e16=[click("Invoice Settings"), type_into("Invoice Prefix", "TAX-"), click("Save Settings")],
    m1=[click("Invoices"), click("INV-0053", kind="a"), click("Add Payment"), click("Record Payment")],
    m5=[click("Repeating Invoices"), click("CloudNine Analytics"), click("Monthly"), click("Quarterly"), click("Save")],
    m11=[click("Invoice Reminders"), click("Add Reminder"), click("Before due date"), click("After due date"),
         type_into("Days", "21"), click("Add Reminder")],
    m16=[click("Branding Themes"), click("Edit", after="Retail"), type_into("Theme Name", "Retail Premium"), click("Save")],
    h16=[click("Invoice Reminders"), click("Delete", after="1 day(s) after"),
         click("Delete", after="14 day(s) after"), click("Delete", after="30 day(s) after")],
    function_10=[click("Invoices"), click("New Invoice"), type_into("To", "TechVault"), click("TechVault Solutions"),
                 type_into("Date", "2026-03-02"), type_into("Due Date", "2026-04-01"), type_into("Description", "Software Development - Hourly Rate"),
                 type_into("Qty", "10"),
                 type_into("Price", "185"), click("Save as Draft")],
    function_21=[click("Quotes"), click("QU-0022"), click("Create Invoice")],
)

# Tasks that we tried and could not solve, and what was in the way.
UNSOLVED = {
    "elation-patient-communication/m6": "the application edits the e-mail only of patients who have a Passport",
    "figma-slides/h32": "our script: a click on a cell opens the cell's dialog, and how to select the table was not found",
    "figma-slides/function_9": "the application ignores what is typed into its fields of colors",
    "paypal-my-wallet/e9": "the application cancels clicks on its radio buttons",
}

# ------------------------------------------------------------------------------------------ playing --


class Players:
    """The scripts as an `Act`. Keeps the time of each turn and where a script got lost."""

    def __init__(self, chat: Chat, scripts: dict[str, list[Step]]):
        self.chat = chat
        self.scripts = scripts
        self.seconds: list[float] = []       # from one response to the next page: act, settle, observe
        self.lost: dict[str, str] = {}       # task -> why its script gave up
        self.answered: dict[int, float] = {}  # slot -> when its last response was handed out

    async def act(self, trajectory: Trajectory, slot: int):
        now = time.monotonic()
        turn = len(trajectory.turns) - 1
        if turn > 0:
            self.seconds.append(now - self.answered[slot])
        key = task_key(trajectory.task)
        steps = self.scripts[key]
        try:
            thought, action = response_to(trajectory.turns[-1].observation, steps[turn])
        except Lost as problem:
            self.lost[key] = f"turn {turn}: {problem}"
            thought, action = response_to("", done("N/A"))
        response = format_response(thought, action, self.chat.think)
        ids = [*self.chat.encode(response, tags=True), self.chat.end_id]
        self.answered[slot] = time.monotonic()
        return ids, [], True


def last_error(tau: Trajectory, lost: dict[str, str]) -> str:
    """What went wrong in an episode that failed."""
    if tau.status != "ok":
        return f"{tau.status}: {tau.checks}"
    errors = [turn.error for turn in tau.turns if turn.error]
    said = [check[2] for check in tau.checks]
    return "; ".join([lost.get(task_key(tau.task), ""), *errors[-1:], *said]).strip("; ")


def report(played: list[Trajectory], players: Players):
    """Prints solved and tried for each application, the time of a turn, and what failed."""
    by_app = defaultdict(list)
    for tau in played:
        by_app[tau.task["sites"][0]].append(tau)
    for app, own in by_app.items():
        solved = sum(tau.success == 1 for tau in own)
        print(f"{app:32} {solved:3} of {len(own):3} solved")
    solved = sum(tau.success == 1 for tau in played)
    turns = [len(tau.turns) for tau in played]
    print(f"{'all':32} {solved:3} of {len(played):3} solved, "
          f"{statistics.mean(turns):.1f} turns an episode, at most {max(turns)}")
    if len(players.seconds) > 1:
        tenths = statistics.quantiles(players.seconds, n=10)
        print(f"seconds a turn (act, settle, observe), {len(players.seconds)} turns: "
              f"median {statistics.median(players.seconds):.2f}, 90th percentile {tenths[-1]:.2f}")
    for tau in played:
        if tau.success < 1:
            print(f"FAILED {tau.task['task_id']} ({tau.task['intent']}): {last_error(tau, players.lost)}")


def chosen(names: list[str], scripts: dict) -> dict:
    """The scripts of the named applications and tasks; all if none is named."""
    picked = {}
    for key, steps in scripts.items():
        if not names or key in names or key.partition("/")[0] in names:
            picked[key] = steps
    if not picked:
        raise ValueError(f"no script is named {' or '.join(names)}; name an application or APP/TASK.")
    return picked


def play_scripts(clone: str, scripts: dict[str, list[Step]], concurrency: int, chat: Chat):
    """Plays the tasks that scripts names -> (trajectories, Players)."""
    tasks = [task for task in worlds.load_tasks(f"infinity:{clone}", {}) if task["task_id"] in scripts]
    players = Players(chat, scripts)
    # No page is cut: scripts look for texts anywhere on it.
    settings = SiteSettings(concurrency=concurrency, max_turns=60, max_context=200_000)
    with tempfile.TemporaryDirectory() as out:
        env = Environment({}, out, settings)
        playing = play(players.act, chat, tasks, env=env, settings=settings, tick=run.ticker("scripts: "))
        return asyncio.run(playing), players


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", help="a clone of web-arena-x/webarena-infinity")
    parser.add_argument("names", nargs="*", help="applications or tasks (APP/TASK); all without")
    parser.add_argument("--out", help="a directory for trajectories.jsonl, which bc.py --data reads")
    parser.add_argument("--model", default="worlds/base", help="whose chat format and tokenizer --out uses")
    parser.add_argument("--concurrency", type=int, default=2, help="episodes at once")
    parser.add_argument("--pages", action="store_true", help="print the last page of each episode")
    args = parser.parse_args()

    chat = open_chat(args.model, actions_help())
    scripts = chosen(args.names, SCRIPTS)
    played, players = play_scripts(args.clone, scripts, args.concurrency, chat)
    for tau in played if args.pages else []:
        print(f"===== {tau.task['task_id']}: {tau.task['intent']}\n{tau.turns[-1].observation}")
    report(played, players)
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(to_record(tau, chat)) + "\n" for tau in played]
        (out / "trajectories.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"infinity_experts.py: {error}")
