"""Guards of sending: a row goes when the peer has it, and the latch."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "sending",
        "the counts of an address leave `other` when the address is declared",
        "durable/agents/node_agents.py",
        before="        return destination if destination in self._application.destinations() else OTHER\n",
        after="        return destination\n",
        killed_by=(
            "tests/unit/observability/test_counters_of_addresses.py::test_counter_never_falls_when_addresses_come_and_go",
        ),
    ),
    Mutant(
        "sending",
        "older versions of a message that wait are shown under `other`",
        "durable/observability/metrics/families.py",
        before="        set(application.by_type()),\n",
        after="        set(application.handlers),\n",
        killed_by=(
            "tests/unit/observability/test_metric_labels.py::test_messages_wait_under_their_declared_name"
            "[incoming-message_type-labels.placed-labels.placed]",
        ),
    ),
    Mutant(
        "sending",
        "a circuit is shown under the name of something of another kind",
        "durable/observability/metrics/service.py",
        before="        name = circuit.key if circuit.key in known.get(circuit.kind, ()) else OTHER\n",
        after="        name = circuit.key if any(circuit.key in each for each in known.values()) else OTHER\n",
        killed_by=(
            "tests/unit/observability/test_metric_labels.py::test_circuit_is_shown_under_its_declared_name"
            "[key-tcp://127.0.0.1:1-other]",
        ),
    ),
    Mutant(
        "sending",
        "an address with options of listeners is a destination of its own",
        "durable/transports/tcp/transport.py",
        before="        return str(parse_destination(uri))\n",
        after="        parse_destination(uri)\n        return uri\n",
        killed_by=(
            "tests/unit/transports/test_addresses.py::test_every_form_of_an_address_resolves_to_one_destination",
        ),
    ),
    Mutant(
        "sending",
        "the port of the scheme is another destination when it is written",
        "transports/http/address.py",
        before='if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"',
        after='if not self.port else f":{self.port}"',
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "a plain character is another one when it is escaped",
        "transports/uris.py",
        before="character if _UNRESERVED.fullmatch(character) else escape.upper()",
        after="escape.upper()",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "an escaped slash is a slash",
        "transports/uris.py",
        before="character if _UNRESERVED.fullmatch(character) else escape.upper()",
        after="character",
        killed_by=("tests/unit/transports/test_spellings.py::test_different_places_are_two_destinations",),
    ),
    Mutant(
        "sending",
        "the name of this machine is another place than its address",
        "transports/hosts.py",
        before='    if name == "localhost":\n        return _THIS_MACHINE\n',
        after="",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "a host with the dot of the root is another one",
        "transports/hosts.py",
        before='name = text.lower().removesuffix(".")',
        after="name = text.lower()",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "an address of IPv6 is another one when it is written at length",
        "transports/hosts.py",
        before="not _is_address(text) else str(address)",
        after="not _is_address(text) else text",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "a path with an empty segment is another socket",
        "transports/tcp/address.py",
        before='each for each in segments if each not in ("", ".")',
        after="each for each in segments[1:]",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "a queue with options of listeners is another destination",
        "transports/rabbitmq/address.py",
        before="        return _sent_to(address)\n    broker",
        after="        return address\n    broker",
        killed_by=("tests/unit/transports/test_spellings.py::test_spellings_of_one_place_are_one_destination",),
    ),
    Mutant(
        "sending",
        "a ping of a broker does not ask whether it takes what is published",
        "transports/rabbitmq/sender.py",
        before='        await channel.basic_publish(b"", exchange=exchange, routing_key=routing_key)\n',
        after="",
        killed_by=(
            "tests/failure/test_broker_rights.py::test_destination_stays_latched_when_the_broker_refuses_messages",
        ),
    ),
    Mutant(
        "sending",
        "rows are published under the destination as it was written",
        "durable/pipeline/publishable.py",
        before='    columns["destination"] = _canonical(columns["destination"], columns["endpoint"])\n',
        after="",
        killed_by=(
            "tests/unit/transports/test_spellings.py::test_published_rows_have_one_spelling_of_each_destination",
        ),
    ),
    Mutant(
        "sending",
        "a pause is stored under the destination as it was written",
        "durable/cli/pauses.py",
        before="[canonical_name(name)] if bus is None",
        after="[name] if bus is None",
        killed_by=("tests/unit/transports/test_spellings.py::test_commands_take_every_spelling_of_a_destination",),
    ),
    Mutant(
        "sending",
        "a claim does not look at the latch",
        "durable/storage/sql/outbox.py",
        before="AND key = place.destination AND (probing OR until IS NULL OR until > now())",
        after="AND false",
        killed_by=(
            "tests/integration/storage/functions/test_claims.py::test_claim_takes_nothing_for_open_circuits[pg18-psycopg]",
        ),
    ),
    Mutant(
        "sending",
        "a claim takes expired rows",
        "durable/storage/sql/outbox.py",
        before="""{FREE}
            AND (deliver_by IS NULL OR deliver_by > now())""",
        after="{FREE}",
        killed_by=(
            "tests/integration/storage/functions/test_claims.py::test_claim_takes_only_unowned_due_and_unexpired_rows[pg18-psycopg]",
        ),
    ),
    Mutant(
        "sending",
        "Busy deletes the row",
        "durable/agents/sending.py",
        before="""\
                case Busy():
                    keep.append(lease)""",
        after="""\
                case Busy():
                    stored.append(lease)""",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestOutcomes::test_a_peer_without_room_slows_the_agent_and_is_no_failure",
        ),
    ),
    Mutant(
        "sending",
        "Failed deletes the row",
        "durable/agents/sending.py",
        before="""\
                case Failed(reason=reason):
                    keep.append(lease)""",
        after="""\
                case Failed(reason=reason):
                    stored.append(lease)""",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestOutcomes::test_envelope_failed_at_the_peer_is_sent_again_and_counted",
        ),
    ),
    Mutant(
        "sending",
        "fewer outcomes than envelopes are believed",
        "durable/agents/sending.py",
        before="        if len(outcomes) != len(batch):",
        after="        if False:",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestOutcomes::test_batch_with_too_few_outcomes_is_sent_again",
        ),
    ),
    Mutant(
        "sending",
        "a failed batch is dropped from memory",
        "durable/agents/sending.py",
        before="""\
        self.buffer.put_back(batch)
        if self.circuit""",
        after="        if self.circuit",
        killed_by=("tests/integration/agents/test_sending.py::TestLatching::test_only_failures_in_a_row_latch",),
    ),
    Mutant(
        "sending",
        "what a busy peer did not take is dropped from memory",
        "durable/agents/sending.py",
        before="""\
        self.buffer.put_back(keep)
""",
        after="",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestOutcomes::test_a_peer_without_room_slows_the_agent_and_is_no_failure",
        ),
    ),
    Mutant(
        "sending",
        "failures never latch",
        "durable/agents/sending.py",
        before="""\
        if self.circuit.batch_failed(ticket):
            await self._latch(reason)""",
        after="        self.circuit.batch_failed(ticket)",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestLatching::test_latched_agent_releases_its_rows_and_sends_only_pings",
        ),
    ),
    Mutant(
        "sending",
        "batches that fail together count as several failures",
        "durable/agents/latch.py",
        before="""\
        if ticket is not None and ticket != self._failures:
            return False
""",
        after="",
        killed_by=("tests/unit/agents/test_latch.py::test_batches_failing_together_count_once",),
    ),
    Mutant(
        "sending",
        "a success does not end a row of failures",
        "durable/agents/latch.py",
        before="""\
    def batch_succeeded(self) -> None:
        self.failures_in_a_row = 0""",
        after="""\
    def batch_succeeded(self) -> None:
        pass""",
        killed_by=("tests/unit/agents/test_latch.py::test_a_success_starts_the_count_again",),
    ),
    Mutant(
        "sending",
        "older news of the latch is believed",
        "durable/agents/sending.py",
        before="        if not self.generation.is_current(generation) or latched == self.circuit.latched:",
        after="        if latched == self.circuit.latched:",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestLatching::test_latch_of_another_node_is_obeyed_unless_read_before_the_local_change",
        ),
    ),
    Mutant(
        "sending",
        "a latched destination gives room",
        "durable/agents/sending.py",
        before="        return self.sends and not self._stopping and self.buffer.reserve([envelope])",
        after="        return not self._stopping and self.buffer.reserve([envelope])",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestLatching::test_latch_of_another_node_is_obeyed_unless_read_before_the_local_change",
        ),
    ),
    Mutant(
        "sending",
        "a paused destination is sent to",
        "durable/agents/sending.py",
        before="""\
            if self.paused:
                await self._stay_paused()
            elif""",
        after="            if",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestLatching::test_paused_agent_holds_no_rows_and_sends_neither_batches_nor_pings",
        ),
    ),
    Mutant(
        "sending",
        "an expired message is sent",
        "durable/agents/sending.py",
        before="            if timely := await self._without_late(batch):",
        after="            if timely := batch:",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestExpiry::test_envelope_expiring_in_memory_is_not_sent",
        ),
    ),
    Mutant(
        "sending",
        "a reservation has no bound of bytes",
        "durable/agents/buffer.py",
        before="            if self._used_count + len(items) > self._max_count or self._used_bytes + weight > self._max_bytes:",
        after="            if self._used_count + len(items) > self._max_count:",
        killed_by=("tests/unit/agents/test_buffer.py::test_room_is_bounded_in_bytes_as_well",),
    ),
    Mutant(
        "sending",
        "a reservation has no bound of messages",
        "durable/agents/buffer.py",
        before="            if self._used_count + len(items) > self._max_count or self._used_bytes",
        after="            if self._used_bytes",
        killed_by=("tests/unit/agents/test_buffer.py::test_room_is_reserved_for_all_or_for_none",),
    ),
    Mutant(
        "sending",
        "two messages of a key are out at once",
        "durable/agents/fair_queue.py",
        before="""\
                if key not in self._busy:
                    self._share(lease)""",
        after="""\
                if True:
                    self._share(lease)""",
        killed_by=(
            "tests/unit/agents/test_fair_queue.py::test_no_key_is_ever_out_twice_and_each_comes_in_its_order[0]",
        ),
    ),
    Mutant(
        "sending",
        "a connection is closed for others while it is in use",
        "transports/tcp/sender.py",
        before="        if self._uses:\n",
        after="        if self._uses < 0:\n",
        killed_by=(
            "tests/integration/transports/test_idle_connections.py::test_connection_with_a_batch_under_way_stays_open[tcp]",
        ),
    ),
    Mutant(
        "sending",
        "any number of connections stays open",
        "transports/idle.py",
        before="            if other.close_if_idle():\n",
        after="            if not other:\n",
        killed_by=("tests/integration/transports/test_idle_connections.py::test_connections_used_last_stay_open[tcp]",),
    ),
    Mutant(
        "sending",
        "destinations that fail together keep the others waiting",
        "durable/agents/context.py",
        before="asyncio.Semaphore(1)",
        after="asyncio.Semaphore(1_000)",
        killed_by=(
            "tests/integration/agents/test_many_addresses.py::test_destinations_failing_together_take_one_connection",
        ),
    ),
    Mutant(
        "sending",
        "connections of HTTP stay open, however many",
        "transports/http/client.py",
        before="            self._pool = self._make_pool(self._pool.tls)\n            self._close_former()\n",
        after="            self._pool = self._make_pool(self._pool.tls)\n",
        killed_by=(
            "tests/integration/transports/test_idle_connections.py::test_connection_of_http_is_closed_at_the_peer",
        ),
    ),
    Mutant(
        "sending",
        "a dead letter is made of a message that another node has",
        "durable/storage/expiry.py",
        before="    late = [lease for lease in leases if own.get(lease.envelope.id)]\n",
        after="    late = [lease for lease in leases if own.get(lease.envelope.id, True)]\n",
        killed_by=("tests/integration/storage/test_expiry.py::test_row_expiring_meanwhile_becomes_no_line_of_history",),
    ),
    Mutant(
        "sending",
        "a refused change ends the agent",
        "durable/storage/database.py",
        before="retry_if_exception_type((StorageUnavailable, SchemaMismatch, InvalidMessage, DBAPIError))",
        after="retry_if_exception_type(StorageUnavailable)",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestRefused::test_refused_latch_is_written_when_allowed",
        ),
    ),
    Mutant(
        "sending",
        "refused deletions are never tried beside others",
        "durable/agents/deletions.py",
        before="        self._deleting += self._sent\n        self._sent = []\n",
        after="        if not self._deleting:\n            self._deleting, self._sent = self._sent, []\n",
        killed_by=(
            "tests/integration/agents/test_sending.py::TestRefused::test_refused_deletions_are_tried_beside_others",
        ),
    ),
    Mutant(
        "sending",
        "two dots behind a host are one",
        "transports/hosts.py",
        before='":" not in name and is_host(text) and',
        after='":" not in name and is_host(name) and',
        killed_by=(
            "tests/unit/transports/test_spellings.py::test_odd_host_is_refused_with_advice[tcp://localhost..:1]",
            "tests/unit/transports/test_spellings.py::test_spelling_of_a_destination_is_its_own_spelling",
        ),
    ),
    Mutant(
        "sending",
        "text beside the brackets of a host is left out",
        "transports/hosts.py",
        before="parts.netloc.isascii() and _AUTHORITY.fullmatch(parts.netloc) is not None",
        after="parts.netloc.isascii()",
        killed_by=("tests/unit/transports/test_spellings.py::test_odd_host_is_refused_with_advice[tcp://[::1]x:1]",),
    ),
    Mutant(
        "sending",
        "a letter beyond ASCII is the one that it is in lower case",
        "transports/hosts.py",
        before="return parts.netloc.isascii() and _AUTHORITY",
        after="return _AUTHORITY",
        killed_by=("tests/unit/transports/test_spellings.py::test_odd_host_is_refused_with_advice",),
    ),
    Mutant(
        "sending",
        "what an older release has stored under another spelling cannot be named",
        "transports/addresses.py",
        before="return [name] if name in stored and set(keys).isdisjoint(stored) else keys",
        after="return keys",
        killed_by=("tests/unit/transports/test_spellings.py::test_address_of_a_person_has_the_stored_spelling",),
    ),
)
