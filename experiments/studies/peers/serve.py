"""Answers requests of `process.Peer` with functions of the module that the first argument names.

Runs in an environment with the peer's libraries, without this project. Reads requests as JSON lines
from stdin and writes answers as JSON lines to stdout; output of libraries goes to stderr.
"""

import importlib
import json
import os
import sys
import traceback


def main():
    """Writes the versions, then answers requests until stdin ends.

    An exception is answered with its traceback.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = importlib.import_module(sys.argv[1])
    print(json.dumps(peer.VERSIONS), file=answers, flush=True)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = getattr(peer, request.pop("function"))(**request)
        except Exception as error:  # raised again by `process.Peer`
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
