"""Guards of wire: frames and credit."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "wire",
        "a frame has no bound",
        "transports/wire.py",
        before="        if not _SHORTEST <= length <= self.max_frame_bytes:",
        after="        if not _SHORTEST <= length:",
        killed_by=("tests/unit/transports/test_wire.py::test_impossible_length_is_a_violation_at_once[65537]",),
    ),
    Mutant(
        "wire",
        "a frame larger than the peer takes is sent",
        "transports/wire.py",
        before="    if length > max_frame_bytes:",
        after="    if False:",
        killed_by=(
            "tests/unit/transports/tcp/test_conversation.py::TestClient::test_a_batch_above_the_frame_limit_of_the_peer_travels_in_parts",
        ),
    ),
    Mutant(
        "wire",
        "a client of another version is welcome",
        "transports/tcp/server_side.py",
        before="        if not set(hello.versions) & set(VERSIONS):",
        after="        if False:",
        killed_by=(
            "tests/unit/transports/tcp/test_conversation.py::TestHandshake::test_a_future_version_is_refused_and_the_client_may_say_hello_again",
        ),
    ),
    Mutant(
        "wire",
        "a client sends without credit",
        "transports/tcp/client_side.py",
        before="        if self.state is not ClientState.OPEN or self.credit == 0:",
        after="        if self.state is not ClientState.OPEN:",
        killed_by=(
            "tests/unit/transports/tcp/test_conversation.py::TestClient::test_client_welcomed_without_credit_sends_nothing",
        ),
    ),
    Mutant(
        "wire",
        "a batch that is cancelled before it begins keeps its bytes",
        "transports/tcp/listener.py",
        before="        self._intake.budget.give_back(size_bytes)\n",
        after="        if not _task.cancelled():\n            self._intake.budget.give_back(size_bytes)\n",
        killed_by=(
            "tests/integration/transports/tcp/test_bad_input.py"
            "::test_batch_cancelled_before_its_beginning_gives_its_bytes_back",
        ),
    ),
)
