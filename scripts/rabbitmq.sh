#!/usr/bin/env bash
# Installs RabbitMQ where it is missing: `make test` and `make demo TRANSPORT=rabbitmq` start private brokers from it.
#
# `rabbitmq.sh tests` is content with a Docker engine, too (see tests/support/servers.py). A broker at
# DURABLE_TEST_AMQP_URL is not enough, because the tests of faults do not break that one.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="/usr/lib/rabbitmq/bin:$PATH"

docker_answers() {
    .venv/bin/python -c 'from tests.support.containers import docker_answers; exit(not docker_answers())'
}

give_up() {
    cat >&2 <<END
RabbitMQ is needed: $1.
Install it yourself, on Debian and Ubuntu with: sudo RUNLEVEL=1 apt-get install rabbitmq-server
Private brokers are started from it; the service of the package does not have to run.
END
    exit 1
}

service_runs() {
    local process
    for process in /proc/[0-9]*; do
        if [ "$(cat "$process/comm" 2>/dev/null)" = beam.smp ] && [ "$(stat -c %U "$process")" = rabbitmq ]; then
            return 0
        fi
    done
    return 1
}

if command -v rabbitmq-server >/dev/null && command -v erl >/dev/null; then
    exit
fi
if [ "${1:-}" = tests ] && docker_answers; then
    exit
fi
command -v apt-get >/dev/null || give_up "it is not installed, and there is no apt-get"
[ "$(id -u)" -eq 0 ] || give_up "it is not installed, and only root may install it"
# There the package starts a broker whatever we say.
[ ! -d /run/systemd/system ] || give_up "it is not installed, and would be started as a service by systemd"

echo "Installing rabbitmq-server"
apt-get update -qq
# In runlevel 1, that of a single user, packages start no services.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends rabbitmq-server >/dev/null
if service_runs; then
    echo "The package has started a broker of its own. Stop it: service rabbitmq-server stop" >&2
    exit 1
fi
