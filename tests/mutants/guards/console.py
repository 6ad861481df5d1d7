"""Guards of console: people, roles and forms."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "console",
        "a form of another site acts",
        "durable/console/security.py",
        before="    if not known or not hmac.compare_digest(",
        after="    if False and not hmac.compare_digest(",
        killed_by=(
            "tests/integration/console/test_console.py::TestForms::test_form_of_another_site_does_nothing[None-/dead-letters/resolve]",
        ),
    ),
    Mutant(
        "console",
        "another origin's form acts",
        "durable/console/security.py",
        before="    if origin is not None and urlsplit(origin).netloc",
        after="    if False and urlsplit(origin).netloc",
        killed_by=(
            "tests/integration/console/test_console.py::TestForms::test_form_sent_by_another_site_with_our_secret_does_nothing[header0]",
        ),
    ),
    Mutant(
        "console",
        "a viewer acts",
        "durable/console/pages.py",
        before="            if person.role < role:",
        after="            if False:",
        killed_by=(
            "tests/integration/console/test_console.py::TestForms::test_viewer_does_nothing[/dead-letters/resolve]",
        ),
    ),
    Mutant(
        "console",
        "a viewer sees contents",
        "durable/console/reading.py",
        before="    return person.role >= Role.OPERATOR",
        after="    return True",
        killed_by=("tests/integration/console/test_console.py::TestPages::test_viewer_sees_no_contents",),
    ),
    Mutant(
        "console",
        "a viewer reads the errors of circuits",
        "durable/console/viewers.py",
        before="if each.kind != CircuitKind.DESTINATION and _is_of_code(each) else each",
        after="if False else each",
        killed_by=("tests/integration/console/test_console.py::TestPages::test_viewer_sees_no_contents",),
    ),
    Mutant(
        "console",
        "markup in messages is markup",
        "durable/console/pages.py",
        before="            autoescape=True,",
        after="            autoescape=False,",
        killed_by=("tests/integration/console/test_console.py::TestPages::test_markup_in_messages_is_shown_as_text",),
    ),
    Mutant(
        "console",
        "a forged cookie opens the door",
        "durable/console/access.py",
        before="            if person.name == name and _is_same(",
        after="            if person.name == name or _is_same(",
        killed_by=(
            "tests/integration/console/test_console.py::TestComingIn::test_forged_cookie_opens_nothing[olga|9999999999|00]",
        ),
    ),
    Mutant(
        "console",
        "tokens are guessed for ever",
        "durable/console/access.py",
        before="return len(failures) == _MOST_FAILURES and",
        after="return False and",
        killed_by=(
            "tests/integration/console/test_console.py::TestComingIn::test_wrong_tokens_close_the_login_for_their_address_alone",
        ),
    ),
)
