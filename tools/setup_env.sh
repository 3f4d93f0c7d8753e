#!/usr/bin/env bash
# Makes an environment, or completes the one that is there, with one of this project's extras.
#
#   tools/setup_env.sh <folder> <extra> [requirement ...]      e.g.  .venv test
#
# Takes a moment when nothing is to be done: a stamp in the environment holds what was asked for,
# pyproject.toml included, and is written last, so that an interrupted set-up is no finished one.
# PYTHON names the interpreter for a new environment; the default is the newest one found.
set -euo pipefail
cd "$(dirname "$0")/.."

env=$1
extra=$2
shift 2

# Two set-ups of one environment at the same time wait for each other, where flock exists.
if command -v flock >/dev/null; then
    exec 9>"$env.lock"
    flock 9
fi

request=$(pwd && echo "$@" && cat pyproject.toml)
stamp=$env/.installed-$extra
if "$env/bin/python" -c "" 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$request" ]; then
    exit 0
fi

# A new environment is marked until its first set-up has ended; one that is still marked, or whose
# Python is gone, is made again from nothing. Any other that is already there is only added to.
unfinished=$env/.unfinished
if [ -e "$unfinished" ] || ! "$env/bin/python" -c "" 2>/dev/null; then
    python=${PYTHON:-$(tools/find_python.sh newest)}
    echo "Making $env with $("$python" --version) …"
    "$python" -m venv --clear "$env"
    touch "$unfinished"
fi
if ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
    "$env/bin/python" -m ensurepip --upgrade
fi

echo "Installing magicjax[$extra] ${*:+$* }into $env (minutes the first time) …"
quiet=--quiet
if [ -t 1 ]; then
    quiet= # somebody is watching: show what pip does
fi
"$env/bin/python" -m pip install $quiet --no-input --disable-pip-version-check -e ".[$extra]" "$@" ||
    {
        echo "The installation failed. If $("$env/bin/python" --version) is too new for some" \
            "package, remove $env and name an older one: make PYTHON=/path/to/python3 …" >&2
        exit 1
    }

# Each extra contains the smaller ones.
case $extra in
    dev) covered="experiments notebooks test dev" ;;
    test) covered="experiments notebooks test" ;;
    notebooks) covered="experiments notebooks" ;;
    *) covered=$extra ;;
esac
rm -f "$unfinished"
for name in $covered; do
    printf '%s\n' "$request" >"$env/.stamp"
    mv "$env/.stamp" "$env/.installed-$name"
done
