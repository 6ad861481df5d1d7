#!/usr/bin/env bash
# Installs Java where Spark finds none that is new enough: `make test` and `make pipeline` run Spark in their own JVM.
#
# A JDK elsewhere, or a newer one, is as good: what counts is what durable.pipeline.session finds.
set -euo pipefail
cd "$(dirname "$0")/.."
package=openjdk-17-jre-headless

find_java() {
    .venv/bin/python -c 'from durable.pipeline.session import find_java; print(find_java())' 2>/dev/null
}

give_up() {
    cat >&2 <<END
Java 17 or newer is needed: $1.
Install it yourself, on Debian and Ubuntu with: sudo apt-get install $package
Or set JAVA_HOME to the folder of one that is there.
END
    exit 1
}

if find_java >/dev/null; then
    exit
fi
command -v apt-get >/dev/null || give_up "there is none, and there is no apt-get"
[ "$(id -u)" -eq 0 ] || give_up "there is none, and only root may install it"

echo "Installing $package"
apt-get update -qq
# The newer releases of Debian and Ubuntu have a newer one only.
apt-cache show "$package" >/dev/null 2>&1 || package=default-jre-headless
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
java="$(find_java)" || give_up "$package is installed now, and it is not found all the same"
echo "Installed $package: $java"
