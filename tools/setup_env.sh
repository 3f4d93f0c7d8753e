#!/usr/bin/env bash
# Creates an environment, or completes an existing one, with one of this project's extras.
#
#   tools/setup_env.sh <folder> <extra> [requirement ...]      e.g.  .venv test
#
# A stamp in the environment records the request, including pyproject.toml. It is written last, so an
# interrupted setup is repeated and a finished one returns immediately.
# PYTHON is the interpreter for a new environment; the default is the newest one found.
set -euo pipefail
cd "$(dirname "$0")/.."

env=$1
extra=$2
shift 2

# A lock serializes concurrent setups of one environment, where flock exists.
if command -v flock >/dev/null; then
    exec 9>"$env.lock"
    flock 9
fi

request=$(pwd && echo "$@" && cat pyproject.toml)
stamp=$env/.installed-$extra
if "$env/bin/python" -c "" 2>/dev/null && [ "$(cat "$stamp" 2>/dev/null)" = "$request" ]; then
    exit 0
fi

# A new environment is marked until its first setup finishes. One that is still marked, or whose
# Python is missing, is created again. Packages are only added to any other environment.
unfinished=$env/.unfinished
if [ -e "$unfinished" ] || ! "$env/bin/python" -c "" 2>/dev/null; then
    python=${PYTHON:-$(tools/find_python.sh)}
    echo "Creating $env with $("$python" --version) …"
    "$python" -m venv --clear "$env"
    touch "$unfinished"
fi
if ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
    "$env/bin/python" -m ensurepip --upgrade
fi

echo "Installing magicjax[$extra] ${*:+$* }into $env (takes minutes the first time) …"
quiet=--quiet
if [ -t 1 ]; then
    quiet= # a terminal: show pip's output
fi
# Python compiles the modules that it imports; compiling all of them takes most of the installation.
"$env/bin/python" -m pip install $quiet --no-compile --no-input --disable-pip-version-check \
    --config-settings editable_mode=compat -e ".[$extra]" "$@" ||
    {
        echo "The installation failed. If $("$env/bin/python" --version) is too old or too new for" \
            "some package, remove $env and choose another one: make PYTHON=/path/to/python3 …" >&2
        exit 1
    }

# Each extra contains the smaller ones.
case $extra in
    dev) covered="experiments notebooks test docs dev" ;;
    docs) covered="experiments docs" ;;
    test) covered="experiments notebooks test" ;;
    notebooks) covered="experiments notebooks" ;;
    *) covered=$extra ;;
esac
rm -f "$unfinished"
for name in $covered; do
    printf '%s\n' "$request" >"$env/.stamp"
    mv "$env/.stamp" "$env/.installed-$name"
done

echo "Compiling CPU kernels (takes half a minute the first time) …"
"$env/bin/python" -m pallas_kernels.cpu || true # models run without them
