#!/usr/bin/env bash
# Prints the path of the newest Python that can create an environment for this project, or fails.
#
# Searches PATH, then the folders of pyenv, uv and Homebrew. Every candidate is run, because pyenv
# shims exist for inactive versions and a system Python may lack ensurepip.
set -euo pipefail

lowest=12
highest=14 # increase when JAX has wheels for the next version

# Prints the base interpreter of "$1" if it is a released CPython 3.$2 with all that pip and venv need.
# For an environment, this is the Python it was created from.
usable() {
    "$1" -I - "$2" 2>/dev/null <<'PYTHON'
import ctypes, ensurepip, ssl, sys, venv, zlib

good = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] == (3, int(sys.argv[1]))
    and sys.version_info.releaselevel == "final"
    and getattr(sys, "_is_gil_enabled", lambda: True)()
)
if not good:
    sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)
PYTHON
}

candidates() {
    type -aP "python3.$1" python3 python || true
    compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/*/bin/python3.$1" || true
    compgen -G "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/*/bin/python3.$1" || true
    compgen -G "/opt/homebrew/bin/python3.$1" || true
}

for minor in $(seq "$highest" -1 "$lowest"); do
    while IFS= read -r candidate; do
        if usable "$candidate" "$minor"; then
            exit 0
        fi
    done < <(candidates "$minor")
done

echo "no working Python 3.$lowest to 3.$highest with venv and pip found: install one," \
    "or choose one: make PYTHON=/path/to/python3 …" >&2
exit 1
