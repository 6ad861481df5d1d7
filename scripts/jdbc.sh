#!/usr/bin/env bash
# Installs the JDBC driver of Postgres where it is missing: `make bench` measures the data source beside it.
set -euo pipefail
jar=/usr/share/java/postgresql.jar
package=libpostgresql-jdbc-java

if [ -f "$jar" ]; then
    exit
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "The JDBC driver of Postgres is needed at $jar; on Debian and Ubuntu: sudo apt-get install $package" >&2
    exit 1
fi
echo "Installing $package"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
