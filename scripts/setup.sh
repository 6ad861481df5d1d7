#!/usr/bin/env bash
# Makes .venv with these pinned requirements and this project in it: scripts/setup.sh requirements/dev.txt. The Makefile
# calls it when something has changed.
set -euo pipefail
cd "$(dirname "$0")/.."
requirements="${1:-requirements/dev.txt}"

find_python() {
    local python
    for python in python3.11 python3 python3.14 python3.13 python3.12; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "Python 3.11 or newer is needed and is not on PATH." >&2
    exit 1
}

# Debian keeps the part of Python that fills a new environment in a package of its own.
install_debian_venv() {
    local package
    package="$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
        echo "$1 cannot make a virtual environment; on Debian and Ubuntu: sudo apt-get install $package" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian_venv "$python"
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

echo "Installing $requirements into .venv"
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install --root-user-action=ignore)
"${pip[@]}" --use-pep517 --requirement "$requirements" # the old pip of Debian 12 would warn without this option
# Everything it needs is pinned and there already: nothing is resolved, and nothing fetched to build it.
"${pip[@]}" --no-deps --no-build-isolation --editable .
