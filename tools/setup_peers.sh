#!/usr/bin/env bash
# Creates the environments of other libraries that experiments.studies.peers compares:
# .venv-peers/huggingface, llama and genai. A finished one is kept; remove its folder for new versions.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(tools/find_python.sh)}

setup() {
    local env=.venv-peers/$1
    shift
    if [ -e "$env/.installed" ]; then
        return
    fi
    echo "Creating $env with $* …"
    "$python" -m venv --clear "$env"
    "$env/bin/python" -m pip install --quiet "$@"
    touch "$env/.installed"
}

setup huggingface torch transformers
setup genai openvino-genai
setup llama llama-cpp-python # is compiled for this processor, which takes minutes
