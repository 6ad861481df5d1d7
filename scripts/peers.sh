#!/usr/bin/env bash
# Makes build/peers/<peer>, an environment for each file of requirements/peers, or for those that are named:
# scripts/peers.sh [peer...]. It does so once, and again when the file has changed. A file that says "# Python 3.12" gets
# an environment of that Python.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
    for requirements in requirements/peers/*.txt; do
        set -- "$@" "$(basename "$requirements" .txt)"
    done
fi

for peer; do
    requirements="requirements/peers/$peer.txt"
    environment="build/peers/$peer"
    if [ ! -e "$requirements" ]; then
        echo "There is no peer $peer; each has a file in requirements/peers." >&2
        exit 1
    fi
    if cmp -s "$requirements" "$environment/requirements.txt"; then
        continue
    fi
    echo "Installing $requirements into $environment"
    python=.venv/bin/python
    version="$(sed -n 's/^# Python \(3\.[0-9]*\)$/\1/p' "$requirements")"
    if [ -n "$version" ] && ! python="$(scripts/python.sh "$version")"; then
        echo "$peer needs it; leave it out: .venv/bin/python -m tests.benchmarks --only peers --without $peer" >&2
        exit 1
    fi
    "$python" -m venv --clear "$environment"
    if ! "$environment/bin/python" -m pip --disable-pip-version-check --quiet install --root-user-action=ignore \
        --requirement "$requirements"; then
        echo "$peer cannot be installed; leave it out: .venv/bin/python -m tests.benchmarks --only peers --without $peer" >&2
        exit 1
    fi
    cp "$requirements" "$environment/requirements.txt" # the last step: it says that the others are done
done
