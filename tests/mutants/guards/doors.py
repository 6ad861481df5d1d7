"""Guards of doors: who may come in, and whom to believe."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "doors",
        "a topic is a peer that is never used",
        "transports/peers.py",
        before='            if place.startswith("rabbitmq:"):\n                _check_path(settings, name, uri)\n',
        after="",
        killed_by=(
            "tests/unit/transports/test_spellings.py::test_address_of_rabbitmq_is_a_place_of_a_peer_and_of_no_topic_or_refused[rabbitmq-/topic-durable]",
        ),
    ),
    Mutant(
        "doors",
        "numbers of publishers on two brokers collide",
        "transports/rabbitmq/arrivals.py",
        before="    queue = uuid5(_IDS, origin.destination)",
        after="    queue = uuid5(_IDS, origin.queue)",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_message.py::TestPropertiesOfOthers::test_textual_ids_are_of_a_broker_and_on_a_topic_of_a_publisher[False]",
        ),
    ),
    Mutant(
        "doors",
        "numbers of two publishers of a topic collide",
        "transports/rabbitmq/listener.py",
        before="message_type, is_of_topic=True)",
        after="message_type)",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_foreign.py::test_publishers_of_one_topic_queue_number_their_messages_alike",
        ),
    ),
    Mutant(
        "doors",
        "a message dead-lettered by a queue has another id",
        "transports/rabbitmq/arrivals.py",
        before="                if (queue, reason) == first:",
        after="                if False:",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_message.py::TestPropertiesOfOthers::test_dead_lettered_message_keeps_the_id_of_its_first_publish",
        ),
    ),
    Mutant(
        "doors",
        "a dead letter of RabbitMQ lies at the address of nobody",
        "transports/rabbitmq/listener.py",
        before="                address = scoped(self._endpoint, delivery.peer)",
        after="                address = self._endpoint",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_storing.py::test_letter_of_a_delivery_lies_at_the_address_of_its_peer[orders-None-shop<-orders]",
        ),
    ),
    Mutant(
        "doors",
        "listeners of one broker differ when its URL has two spellings",
        "transports/rabbitmq/sharing.py",
        before="        if broker_place(settings, before.broker) != broker_place(settings, address.broker):",
        after="        if before.broker != address.broker:",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_sharing.py::test_listeners_of_a_queue_are_alike_however_the_url_of_its_broker_is_written[amqps://mail:y@mq.example/-amqps://mq.example]",
        ),
    ),
    Mutant(
        "doors",
        "messages of a topic are signed for one of its subscribers",
        "transports/peers.py",
        before=" or path[:2] == topic[: len(path)]:",
        after=":",
        killed_by=(
            "tests/unit/transports/test_spellings.py::test_address_of_rabbitmq_is_a_place_of_a_peer_and_of_no_topic_or_refused[rabbitmq-/exchange-durable]",
        ),
    ),
    Mutant(
        "doors",
        "two peers are at one address",
        "transports/peers.py",
        before="            if (other := at.setdefault(place, name)) != name:",
        after="            if (other := name) != name:",
        killed_by=(
            "tests/unit/transports/test_spellings.py::test_address_of_two_peers_is_refused_in_every_spelling[tcp://127.0.0.1:1-tcp://localhost.:1]",
        ),
    ),
    Mutant(
        "doors",
        "listeners of one queue of RabbitMQ accept different messages",
        "transports/rabbitmq/sharing.py",
        before='        "unsigned": options.unsigned,\n',
        after="",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_sharing.py::test_two_addresses_are_refused_when_they_differ_on_a_shared_queue",
        ),
    ),
    Mutant(
        "doors",
        "listeners of one topic recognise duplicates under two names",
        "transports/rabbitmq/sharing.py",
        before="        if added.name != other.name:",
        after="        if False:",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_sharing.py::test_two_names_on_one_topic_are_refused[topic/shop]",
        ),
    ),
    Mutant(
        "doors",
        "a bus declares listeners that differ on a shared queue",
        "durable/bus.py",
        before="        self.runtime.transports.check_listener(added)\n",
        after="",
        killed_by=(
            "tests/unit/transports/rabbitmq/test_sharing.py::test_bus_refuses_a_differing_listener_on_a_shared_queue[topic/pos-from-pos]",
        ),
    ),
    Mutant(
        "doors",
        "an Idempotency-Key is another one under another version",
        "transports/http/headers.py",
        before="unversioned(message_type)), key)",
        after="message_type), key)",
        killed_by=(
            "tests/unit/messages/test_versions.py::test_versions_of_a_type_share_an_id[First-Second-of_an_idempotency_key]",
        ),
    ),
    Mutant(
        "doors",
        "a listener that does not know the secret is believed",
        "transports/tcp/proofs.py",
        before="        if not hmac.compare_digest(expected, challenge.proof):",
        after="        if False:",
        killed_by=("tests/unit/transports/tcp/test_proofs.py::test_server_without_a_proof_is_not_believed",),
    ),
    Mutant(
        "doors",
        "a client that does not know the secret comes in",
        "transports/tcp/proofs.py",
        before="        return known if hmac.compare_digest(expected, proof.proof) else None",
        after="        return known",
        killed_by=(
            "tests/unit/transports/tcp/test_proofs.py::test_client_naming_the_key_without_a_proof_is_turned_away",
        ),
    ),
    Mutant(
        "doors",
        "a proof is not bound to its connection",
        "transports/tcp/proofs.py",
        before="challenge.nonce, binding]",
        after="challenge.nonce]",
        killed_by=("tests/unit/transports/tcp/test_proofs.py::test_a_proof_for_one_certificate_does_not_fit_another",),
    ),
    Mutant(
        "doors",
        "another peer with the secret answers in its place",
        "transports/tcp/proofs.py",
        before='        if self.peer not in ("", challenge.service):',
        after="        if False:",
        killed_by=(
            "tests/unit/transports/tcp/test_proofs.py::test_server_of_another_name_is_not_believed[invoices-False]",
        ),
    ),
    Mutant(
        "doors",
        "a body other than the signed one comes in",
        "transports/http/auth.py",
        before="        return hmac.compare_digest(self.body, sha256(body).hexdigest())",
        after="        return True",
        killed_by=("tests/unit/transports/http/test_auth.py::test_signature_matches_its_own_request",),
    ),
    Mutant(
        "doors",
        "an old signature comes in",
        "transports/http/auth.py",
        before="        return abs(now - self.timestamp) <= skew_seconds",
        after="        return True",
        killed_by=(
            "tests/integration/transports/http/bad_input/test_strangers.py::test_a_stranger_gets_401[a signature that is too old]",
        ),
    ),
    Mutant(
        "doors",
        "a signature does not say the origin",
        "transports/http/auth.py",
        before="    lines = [said.to, said.at, said.sender,",
        after="    lines = [said.to, said.sender,",
        killed_by=(
            "tests/integration/transports/http/test_messages.py::TestTheDocumentation::test_javascript_example_of_the_documentation_works",
        ),
    ),
    Mutant(
        "doors",
        "an answer that nobody signed is believed",
        "transports/http/auth.py",
        before="    if found is None or _equal_one(shown, [sign_answer(secret, signature, found[1], status, body)]) is None:",
        after="    if found is None:",
        killed_by=(
            "tests/integration/transports/http/test_identity.py::test_impostor_on_the_port_of_a_peer_loses_no_message[stored-another_secret]",
        ),
    ),
    Mutant(
        "doors",
        "a repeated signature proves its client",
        "transports/http/replays.py",
        before="""\
        if seen in self._latest or seen in self._before:
            return False
""",
        after="",
        killed_by=("tests/integration/transports/test_exhaustion.py::test_repeated_request_proves_nothing",),
    ),
    Mutant(
        "doors",
        "a peer sends to an endpoint that is not its own",
        "transports/http/exchange.py",
        before="    if not peers.may_use(door.settings, caller.peer, door.endpoint):",
        after="    if False:",
        killed_by=(
            "tests/integration/transports/http/test_identity.py::test_peer_sends_only_its_types_to_its_endpoints",
        ),
    ),
    Mutant(
        "doors",
        "a queue's circle goes on for ever",
        "transports/rabbitmq/arrivals.py",
        before="        if (deaths := _deaths(headers)) > MOST_DEATHS:",
        after="        if (deaths := _deaths(headers)) > 10**9:",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_bad_input.py::test_invalid_delivery_is_a_dead_letter_with_its_bytes_and_known_facts[a circle of queues]",
        ),
    ),
    Mutant(
        "doors",
        "plaintext goes to other machines",
        "transports/plaintext.py",
        before="    if not settings.allow_plaintext:",
        after="    if False:",
        killed_by=(
            "tests/integration/transports/http/test_identity.py::test_plaintext_to_other_hosts_starts_only_when_allowed[http]",
        ),
    ),
    Mutant(
        "doors",
        "a peer is a stranger at another spelling of its address",
        "transports/peers.py",
        before="host_in(parts), normal_escapes(parts.path)",
        after="parts.hostname, parts.path",
        killed_by=("tests/unit/transports/test_spellings.py::test_peer_is_known_at_every_spelling_of_its_address",),
    ),
    Mutant(
        "doors",
        "an address of IPv4 has other names: 127.1, 0x7f000001",
        "transports/hosts.py",
        before=' and not _NUMBER.fullmatch(name.rpartition(".")[2])',
        after="",
        killed_by=("tests/unit/transports/tcp/test_address.py::test_a_host_with_two_readings_is_refused",),
    ),
    Mutant(
        "doors",
        "an answer whose key is not here is asked for again",
        "transports/http/requests.py",
        before="        except MissingKey as error:",
        after="        except ZeroDivisionError as error:",
        killed_by=(
            "tests/integration/transports/http/test_requests.py::test_unreadable_answer_is_told_as_such_and_forgotten_unopened",
        ),
    ),
    Mutant(
        "doors",
        "an answer that was changed is told as such",
        "transports/http/requests.py",
        before="        except Forged as error:",
        after="        except ZeroDivisionError as error:",
        killed_by=(
            "tests/integration/transports/http/test_requests.py::test_unreadable_answer_is_told_as_such_and_forgotten_unopened",
        ),
    ),
    Mutant(
        "doors",
        "an answer is forgotten without being opened",
        "durable/requests/outcomes.py",
        before="            await self._watch.answer(request_id, _ONE_LOOK, from_here=True)",
        after="            await self.answer(request_id, _ONE_LOOK)",
        killed_by=(
            "tests/integration/transports/http/test_requests.py::test_unreadable_answer_is_told_as_such_and_forgotten_unopened",
        ),
    ),
    Mutant(
        "doors",
        "two processes listen at one Unix address",
        "transports/tcp/unix.py",
        before="        with _alone(os.path.dirname(self.path)):\n",
        after="        if True:\n",
        killed_by=(
            "tests/unit/transports/tcp/test_unix.py::"
            "test_one_of_two_processes_listens_when_both_find_a_file_left_behind",
        ),
    ),
    Mutant(
        "doors",
        "a new request gets the answer to the former one",
        "transports/http/requests.py",
        before="            await outcomes.begin(message_id, scoped(door.endpoint, entry.peer))",
        after="            pass",
        killed_by=(
            "tests/integration/transports/http/test_requests.py::"
            "test_new_request_under_a_forgotten_id_has_its_own_answer[False]",
        ),
    ),
    Mutant(
        "doors",
        "a message that was handled hides the end of a later one under its key",
        "durable/requests/receipts.py",
        before="    past = max((each for each in place if not each.is_letter), key=_time_of, default=None)",
        after="    past = max((each for each in place if each.outcome in DONE), key=_time_of, default=None)",
        killed_by=(
            "tests/unit/requests/test_receipts.py::"
            "test_receipt_tells_the_end_of_the_second_message_under_one_id[dead-lettered-handled]",
        ),
    ),
    Mutant(
        "doors",
        "a caller that comes during a look takes deliveries from the receipt",
        "durable/requests/watch.py",
        before="[*before.get(question, []), *question",
        after="[*watched.before, *question",
        killed_by=(
            "tests/unit/requests/test_watch.py::"
            "test_receipt_has_every_delivery_when_another_caller_comes_during_a_look",
        ),
    ),
)
