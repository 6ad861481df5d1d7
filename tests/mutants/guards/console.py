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
        before="    if origin is not None and _host_of(origin)",
        after="    if False and _host_of(origin)",
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
    Mutant(
        "console",
        "a viewer searches in contents",
        "durable/console/pages.py",
        before='        if "text" in chosen and person.role < Role.OPERATOR:',
        after="        if False:",
        killed_by=("tests/integration/console/test_actions.py::TestRoles::test_viewer_searches_no_contents",),
    ),
    Mutant(
        "console",
        "an operator discards a group",
        "durable/console/actions.py",
        before="        elif selection.letters is None and person.role < Role.ADMIN:",
        after="        elif False:",
        killed_by=(
            "tests/integration/console/test_actions.py::TestRoles::test_operator_discards_letters_but_no_group",
        ),
    ),
    Mutant(
        "console",
        "routes of the application are taken for pages",
        "durable/console/security.py",
        before='own = {"router": scope["app"].router, "app_root_path": scope.get("root_path", "")}',
        after="own: dict[str, object] = {}",
        killed_by=("tests/integration/console/test_actions.py::TestServices::test_one_login_is_for_all_services",),
    ),
    Mutant(
        "console",
        "a stream outlives its login",
        "durable/console/pages.py",
        before="while (known := await self._authorize(request)) is not None and",
        after="known = person\n                while",
        killed_by=("tests/integration/console/test_live.py::TestStream::test_stream_ends_with_the_login",),
    ),
    Mutant(
        "console",
        "browsers hide the origin of forms",
        "durable/console/security.py",
        before='"Referrer-Policy": "same-origin"',
        after='"Referrer-Policy": "no-referrer"',
        killed_by=("tests/browser/test_console.py::test_login_leads_to_no_other_site",),
    ),
    Mutant(
        "console",
        "other sites frame the console",
        "durable/console/security.py",
        before="    for name, value in _HEADERS.items():",
        after="    for name, value in dict[str, str]().items():",
        killed_by=("tests/browser/test_console.py::test_other_sites_frame_no_page_and_send_no_form",),
    ),
    Mutant(
        "console",
        "a change leaves no record",
        "durable/storage/actions.py",
        before="        if resolved.done:\n            record(",
        after="        if False:\n            record(",
        killed_by=("tests/integration/storage/test_actions.py::test_batches_of_a_run_are_one_action",),
    ),
    Mutant(
        "console",
        "letters that fail after a page are changed with those that it showed",
        "durable/console/pages.py",
        before="replace(selection, up_to=survey.newest)",
        after="replace(selection, up_to=survey.newest + 1_000)",
        killed_by=(
            "tests/integration/console/test_seen.py::TestLetters::test_letters_failing_after_the_page_are_left",
        ),
    ),
    Mutant(
        "console",
        "a stale page ends a newer pause",
        "durable/storage/actions.py",
        before="""    if seen is not None and any(each["since"] != seen""",
        after="""    if False and any(each["since"] != seen""",
        killed_by=("tests/integration/console/test_seen.py::TestPauses::test_newer_pause_of_a_colleague_stays",),
    ),
    Mutant(
        "console",
        "a pause from a stale page replaces another",
        "durable/storage/actions.py",
        before="    if not replaces and not all(",
        after="    if False and not all(",
        killed_by=("tests/integration/console/test_seen.py::TestPauses::test_newer_pause_of_a_colleague_stays",),
    ),
    Mutant(
        "console",
        "a copied cookie outlives the logout",
        "durable/console/access.py",
        before="        if cookie in self._ended:",
        after="        if False:",
        killed_by=("tests/integration/console/test_seen.py::TestDoor::test_copied_cookie_ends_with_the_logout",),
    ),
)
