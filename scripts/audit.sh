#!/usr/bin/env bash
# Looks the pinned requirements up among the known vulnerabilities of https://osv.dev, and fails when one is there:
# scripts/audit.sh [requirements...]. Nothing is installed or resolved. PIP_AUDIT_OSV_URL names another such service.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- requirements/*.txt
seconds=300

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
audit=(.venv/bin/pip-audit --no-deps --disable-pip --progress-spinner off --vulnerability-service osv)
audit+=(--cache-dir "$work/cache")
for requirements; do
    audit+=(--requirement "$requirements")
done

# A fault of the pins fails here, without the network: then only the service can be the cause below.
"${audit[@]}" --dry-run >"$work/dry" 2>&1 || { cat "$work/dry" >&2; exit 1; }

status=0
timeout "$seconds" "${audit[@]}" --output "$work/found" 2>"$work/log" || status=$?
if [ -e "$work/found" ]; then
    cat "$work/log" "$work/found" >&2
    exit 1
elif [ "$status" -eq 0 ]; then
    tail -1 "$work/log"
else
    echo "pip-audit: not run, its vulnerability database cannot be reached ($(tail -1 "$work/log" | cut -c1-100))"
fi
