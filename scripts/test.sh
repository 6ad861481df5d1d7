#!/usr/bin/env bash
# Runs every test, or one part of them; a few that fail among their neighbours are run once more, alone:
# scripts/test.sh [jobs] [part, as 2/4]
#
# Tests wait for conditions, within bounds. On a machine of two cores a neighbour (a start of Spark, a broker, a storm)
# can take longer than a bound. A broken guarantee fails in both runs, and what passed only alone is named.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # each of the many processes would compile durable and the tests anew
few=10
failed=.pytest_cache/v/cache/lastfailed

# Most tests wait for servers most of the time: two workers a core, each with its servers and a JVM of some 2 GiB.
jobs=${1:-$((2 * $(getconf _NPROCESSORS_ONLN)))}
room=$(awk '/^MemAvailable/ { print int($2 / (3 * 1024 * 1024)) }' /proc/meminfo 2>/dev/null || echo 4)
[ -n "${1:-}" ] || [ "$room" -ge "$jobs" ] || jobs=$((room > 1 ? room : 1))

rm -f "$failed"
status=0
.venv/bin/pytest -n "$jobs" --dist worksteal ${2:+--part "$2"} || status=$?
[ "$status" -ne 0 ] || exit 0

count=0
[ "$status" -ne 1 ] || count=$(grep -c '": true' "$failed" || true)
[ "$count" -ge 1 ] && [ "$count" -le "$few" ] || exit "$status"
names=$(sed -n 's/^  "\(.*\)": true,\?$/  \1/p' "$failed")
printf '\n%s of the tests failed among their neighbours; they run once more, alone:\n%s\n' "$count" "$names"
.venv/bin/pytest -p no:xdist --last-failed --last-failed-no-failures none
printf '\npassed only when they ran alone:\n%s\n' "$names"
