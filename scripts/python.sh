#!/usr/bin/env bash
# Prints the Python of a version, such as 3.12, that the machine has on PATH or in pyenv: scripts/python.sh VERSION
set -euo pipefail
for candidate in "python$1" "$(pyenv root 2>/dev/null || true)"/versions/"$1".*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then
        exec "$candidate" -c 'import sys; print(sys.executable)'
    fi
done
echo "Python $1: none on this machine" >&2
exit 1
