#!/usr/bin/env bash
# Runs the unit tests on every newer Python of the machine: on PATH, or one that pyenv keeps.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
for version in 3.12 3.13 3.14; do
    found="$(scripts/python.sh "$version")" || continue
    echo "Python $version: $found"
    folder="build/python$version"
    .venv/bin/uv venv --quiet --clear --python "$found" "$folder"
    .venv/bin/uv pip install --quiet --python "$folder/bin/python" --no-deps --requirement requirements/dev.txt --editable .
    "$folder/bin/python" -m pytest --quiet -n auto -p no:cacheprovider tests/unit || status=1
done
exit $status
