"""Guards of the private servers."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_MISHAPS: Final = "tests/integration/cli/test_embedded_mishaps.py::"
_CLUSTER: Final = "tests/unit/embedded/test_cluster.py::"

ROWS: Final = (
    Mutant(
        "embedded",
        "a database that another process makes at the same time is an error",
        "durable/embedded/postgres.py",
        before="    with suppress(DuplicateDatabase, UniqueViolation):\n",
        after="    with suppress():\n",
        killed_by=(_MISHAPS + "test_database_is_created_once_when_several_ask",),
    ),
    Mutant(
        "embedded",
        "a command gives up when the owner of the joined server ends at once",
        "durable/embedded/__main__.py",
        before="            if server.owned or server.is_running:\n",
        after="            if True:\n",
        killed_by=(_MISHAPS + "test_command_takes_over_when_the_joined_owner_ends_at_once",),
    ),
    Mutant(
        "embedded",
        "the lock of a folder is waited for without end",
        "durable/embedded/ownership.py",
        before="            if time.monotonic() >= deadline:\n",
        after="            if time.monotonic() >= deadline + 600:\n",
        killed_by=(_MISHAPS + "test_endless_start_of_another_process_is_told",),
        hangs=True,
    ),
    Mutant(
        "embedded",
        "the socket is in the data folder, however its path reads",
        "durable/embedded/sockets.py",
        before="    if _is_usable(data):\n",
        after="    if True:\n",
        killed_by=(
            _MISHAPS + "test_folder_with_any_printable_name_is_used[a,b]",
            _MISHAPS + "test_folder_with_any_printable_name_is_used[a b]",
        ),
    ),
    Mutant(
        "embedded",
        "the socket directory of a killed owner stays",
        "durable/embedded/ownership.py",
        before="    remove_socket_directory(found.sockets if found else None)\n",
        after="",
        killed_by=(_MISHAPS + "test_socket_directory_of_a_killed_owner_is_removed",),
    ),
    Mutant(
        "embedded",
        "the lock of a killed server's socket stays",
        "durable/embedded/server.py",
        before="        remove_sockets(self._sockets)\n",
        after="",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_process_with_the_pid_of_a_killed_server_is_left_alone",
            "tests/integration/cli/test_embedded.py::test_process_with_the_pid_of_a_killed_server_is_no_server",
        ),
    ),
    Mutant(
        "embedded",
        "the name of a database is not quoted in its URL",
        "durable/embedded/sockets.py",
        before="quote(database, safe='')",
        after="database",
        killed_by=(_MISHAPS + "test_database_with_any_name_is_reached",),
    ),
    Mutant(
        "embedded",
        "data that a killed initdb has left are taken for whole",
        "durable/embedded/cluster.py",
        before="    if is_half_made(data):\n",
        after="    if False:\n",
        killed_by=(_MISHAPS + "test_start_after_a_killed_initdb_makes_the_data_anew",),
    ),
    Mutant(
        "embedded",
        "data that a server was started on are made anew",
        "durable/embedded/cluster.py",
        before=" and all(map(_BY_INITDB.fullmatch, names))",
        after="",
        killed_by=(
            _CLUSTER + "test_data_with_a_trace_of_use_are_kept[postmaster.opts]",
            _CLUSTER + "test_data_with_a_trace_of_use_are_kept[backup_label]",
        ),
    ),
    Mutant(
        "embedded",
        "data with tables of users are made anew",
        "durable/embedded/cluster.py",
        before=' and not any(map(_is_of_users, data.glob("base/*/*")))',
        after="",
        killed_by=(
            _CLUSTER + "test_data_with_a_trace_of_use_are_kept[base/16384/1259]",
            _CLUSTER + "test_data_with_a_trace_of_use_are_kept[base/5/16384]",
        ),
    ),
    Mutant(
        "embedded",
        "processes that outlive their server are not known by their title",
        "durable/embedded/processes.py",
        before=' or " ".join(command).startswith(f"postgres: {server_name(data)}: ")',
        after="",
        killed_by=(_MISHAPS + "test_process_outliving_its_server_is_ended[psutil.Process.cwd]",),
    ),
    Mutant(
        "embedded",
        "processes that outlive their server are not known by their working folder",
        "durable/embedded/processes.py",
        before="return bool(process.cwd() == str(data))",
        after="return False",
        killed_by=(_MISHAPS + "test_process_outliving_its_server_is_ended[durable.embedded.processes.server_name]",),
    ),
    Mutant(
        "embedded",
        "a failed start keeps the log of the server to itself",
        "durable/embedded/server.py",
        before="        told = self._log_end(begun)\n",
        after='        told = ""\n',
        killed_by=(_MISHAPS + "test_failed_start_shows_the_log_of_the_server",),
    ),
    Mutant(
        "embedded",
        "data of another version are used",
        "durable/embedded/cluster.py",
        before="    check_version(data, programs)\n",
        after="",
        killed_by=(_CLUSTER + "test_data_of_another_version_are_refused_and_kept[x-has no version]",),
    ),
    Mutant(
        "embedded",
        "a path with a control character is used",
        "durable/embedded/folders.py",
        before='each < " " or ',
        after="",
        killed_by=(_MISHAPS + "test_path_with_a_control_character_is_refused[postgres-newline]",),
    ),
    Mutant(
        "embedded",
        "a server that does not stop hides the error of its block",
        "durable/embedded/postgres.py",
        before="            except Exception as error:  # the block's own error says more\n",
        after="            except ZeroDivisionError as error:\n",
        killed_by=(_MISHAPS + "test_error_of_the_block_is_raised_when_its_server_does_not_stop",),
    ),
    Mutant(
        "embedded",
        "a forked child ends the server of its parent",
        "durable/embedded/postgres.py",
        before="    except BaseException:\n        if owner == os.getpid():\n",
        after="    except BaseException:\n        if owner is not None:\n",
        killed_by=(_MISHAPS + "test_server_outlives_a_forked_child_leaving_the_block",),
    ),
    Mutant(
        "embedded",
        "a forked child restarts the server of its parent",
        "durable/embedded/postgres.py",
        before="return self._owner == os.getpid()",
        after="return self._owner is not None",
        killed_by=(_MISHAPS + "test_forked_child_restarts_no_server",),
    ),
    Mutant(
        "embedded",
        "a forked process keeps a broker alive",
        "durable/embedded/rabbitmq.py",
        before="        hold(self._process.stdin)  # a forked process with a copy would keep the VM alive\n",
        after="",
        killed_by=(_MISHAPS + "test_forked_process_keeps_no_broker_alive",),
    ),
    Mutant(
        "embedded",
        "a broker starts in a folder that its scripts take apart",
        "durable/embedded/rabbitmq.py",
        before=", refused=REFUSED)",
        after=")",
        killed_by=(_MISHAPS + "test_folder_beyond_the_use_of_the_broker_is_refused[a b]",),
    ),
)
