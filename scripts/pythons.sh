#!/usr/bin/env bash
# Runs the unit tests on every newer Python of the machine: on PATH, or one that pyenv keeps.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local candidate
    for candidate in "python$1" "$(pyenv root 2>/dev/null || true)"/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

status=0
for version in 3.12 3.13 3.14; do
    found="$(find_python "$version")"
    if [ -z "$found" ]; then
        echo "Python $version: none on this machine"
        continue
    fi
    echo "Python $version: $found"
    folder="build/python$version"
    .venv/bin/uv venv --quiet --clear --python "$("$found" -c 'import sys; print(sys.executable)')" "$folder"
    .venv/bin/uv pip install --quiet --python "$folder/bin/python" --no-deps --requirement requirements/dev.txt --editable .
    "$folder/bin/python" -m pytest --quiet -n auto -p no:cacheprovider tests/unit || status=1
done
exit $status
