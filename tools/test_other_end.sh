#!/usr/bin/env bash
# Runs the kernel and loop tests at the other end of the supported range of JAX than .venv is at.
#
#   tools/test_other_end.sh [pytest arguments]
#
# .venv has what its Python gets: the newest JAX on a new Python, the oldest supported one on a
# Python that newer JAX has left behind. Whichever it is, this takes the other:
#   .venv at the newest end  ->  .venv-oldest: the oldest Python found, JAX pinned to the oldest
#   .venv at the oldest end  ->  .venv-newest: the newest Python >= 3.12; none found: nothing to test
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=$(sed -n 's/^ *"jax>=\([0-9.]*\)",$/\1/p' pyproject.toml)
here=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("jax"))')

if [ "$here" != "$oldest" ]; then
    env=.venv-oldest
    python=$(tools/find_python.sh oldest)
    pin="jax==$oldest"
elif python=$(tools/find_python.sh newest 12 2>/dev/null); then
    env=.venv-newest
    pin="jax>=$oldest"
else
    echo "Other end of JAX's range: skipped, .venv has JAX $here, the oldest supported, and no" \
        "Python >= 3.12 was found for a newer one."
    exit 0
fi

PYTHON=$python tools/setup_env.sh "$env" test "$pin"
# Not the distributions: minutes of statistics on functions that the other tests run here as well.
"$env/bin/python" -m pytest tests/pallas_kernels tests/magicjax \
    --ignore=tests/magicjax/test_joint.py --ignore=tests/magicjax/test_exact_sampling.py "$@"
