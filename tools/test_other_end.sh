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
# What a version of JAX can break: kernels, programs, exactness. Not what runs on the host
# before anything is compiled, nor minutes of statistics on the same functions. With XLA_FLAGS set,
# the tests leave them alone: these programs are compiled with the optimizations that users get.
export XLA_FLAGS=${XLA_FLAGS-}
loop=tests/magicjax
exact=$loop/test_exactness.py::test_speculative_decoding_gives_the_oracles_text_wherever_rows_end
copies=$loop/test_compiled.py::test_the_loop_copies_no_cache_and_needs_little_memory_beside_them
"$env/bin/python" -m pytest tests/pallas_kernels \
    --ignore tests/pallas_kernels/test_peers.py --ignore tests/pallas_kernels/test_bench.py \
    "$copies[self_chain]" "$copies[small_sparse]" "$copies[int8]" "$copies[h2o_refreshed]" \
    "$loop/test_exactness.py::test_plain_decoding_gives_the_oracles_text_wherever_rows_end[8]" \
    "$exact[self-2,2,1-3]" "$exact[near-dynamic-8]" "$exact[ensemble-2,2,1-8]" \
    "$loop/test_stages.py::test_stages_give_the_text_of_one_device[snapkv-mesh1-None-2]" \
    tests/sharding/test_processes.py::test_a_process_that_is_killed_is_named_by_all_others_at_once \
    $loop/test_mesh.py::test_a_step_exchanges_two_sums_a_layer_and_what_the_vocabulary_needs "$@"
