#!/usr/bin/env bash
# Runs the tests that need no broker on the lowest versions of the libraries that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
python=build/lowest/bin/python
pinned() { grep -E "^($1)==" requirements/dev.txt; }

.venv/bin/uv venv --quiet --clear --python .venv/bin/python build/lowest
# The tools of the tests are not durable's: theirs are the pinned versions.
mapfile -t tools < <(pinned 'asyncapi3|attrs|fastapi|hypothesis|numpy|openapi-spec-validator|opentelemetry-sdk|pandas|psutil|pytest.*|testcontainers|trustme')
.venv/bin/uv pip install --quiet --python "$python" --resolution lowest-direct \
    --editable '.[binary,console,embedded,http,rabbitmq,metrics,tracing]' "${tools[@]}"
# What is ignored needs Spark's libraries, as the pipeline does.
# The test client of Starlette 1.0 names something that AnyIO calls otherwise by now.
"$python" -m pytest --quiet -n auto -p no:cacheprovider tests/unit tests/contract/bus \
    -W "ignore:The anyio.abc.BlockingPortal alias is deprecated:DeprecationWarning" \
    --ignore tests/unit/docs --ignore tests/unit/pipeline \
    --ignore tests/unit/benchmarks/test_plots.py --ignore tests/unit/console/test_plots.py \
    --ignore tests/unit/transports/test_addresses.py --ignore tests/unit/transports/test_spellings.py \
    --ignore tests/unit/messages/test_versions.py
