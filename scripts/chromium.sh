#!/usr/bin/env bash
# Installs Chromium where there is none: `make test` drives it through the console (tests/browser).
set -euo pipefail

give_up() {
    cat >&2 <<END
Chromium is needed: $1.
Install it yourself, on Debian with: sudo apt-get install chromium
END
    exit 1
}

if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then
    exit
fi
command -v apt-get >/dev/null || give_up "it is not installed, and there is no apt-get"
[ "$(id -u)" -eq 0 ] || give_up "it is not installed, and only root may install it"

echo "Installing chromium"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
