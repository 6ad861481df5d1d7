#!/usr/bin/env bash
# Installs PgBouncer where it is missing: `make test` starts private ones from it (tests/support/pooler.py).
set -euo pipefail
export PATH="$PATH:/usr/sbin"

give_up() {
    cat >&2 <<END
PgBouncer is needed: $1.
Install it yourself, on Debian and Ubuntu with: sudo RUNLEVEL=1 apt-get install pgbouncer
Private poolers are started from it; the service of the package does not have to run.
END
    exit 1
}

service_runs() {
    local process
    for process in /proc/[0-9]*; do
        if [ "$(cat "$process/comm" 2>/dev/null)" = pgbouncer ] && [ "$(stat -c %U "$process" 2>/dev/null)" = postgres ]; then
            return 0
        fi
    done
    return 1
}

if command -v pgbouncer >/dev/null; then
    exit
fi
command -v apt-get >/dev/null || give_up "it is not installed, and there is no apt-get"
[ "$(id -u)" -eq 0 ] || give_up "it is not installed, and only root may install it"
# There the package starts a pooler whatever we say.
[ ! -d /run/systemd/system ] || give_up "it is not installed, and would be started as a service by systemd"

echo "Installing pgbouncer"
apt-get update -qq
# In runlevel 1, that of a single user, packages start no services.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer >/dev/null
if service_runs; then
    echo "The package has started a pooler of its own. Stop it: service pgbouncer stop" >&2
    exit 1
fi
