#!/usr/bin/env bash
# Runs the kernel and loop tests with the oldest supported JAX, in an environment of its own.
#
#   tools/test_other_end.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=$(sed -n 's/^ *"jax>=\([0-9.]*\)",$/\1/p' pyproject.toml)
env=.venv-jax-$oldest
tools/setup_env.sh "$env" core-test "jax==$oldest"
# A version of JAX can break kernels, programs and exactness, but not validation on the host.
loop=tests/magicjax
exact=$loop/decoding/test_exactness.py::test_greedy_text_is_that_of_plain_decoding
copies=$loop/decoding/test_compiled.py::test_the_loop_copies_no_cache_and_needs_little_memory_beside_them
"$env/bin/python" -m pytest tests/pallas_kernels/test_{attention,compiled,quantized}.py \
    tests/pallas_kernels/cpu/test_linear.py "$copies[self_of_int8_cache]" "$copies[h2o_refreshed]" \
    "$exact[plain]" "$exact[small:near, dynamic:9,4,3]" "$exact[eagle:head, expansion:2,2,1]" \
    $loop/parallel/test_two_processes.py "$@"
