"""Two processes with four CPU devices each that run functions of the tests.

`python -m tests.two_processes COORDINATOR RANK` joins the other process and then reads lines like
`tests.eight_devices`.
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

from tests.eight_devices import redirect_stdout, serve

COUNT, DEVICES = 2, 4


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def environment() -> dict[str, str]:
    """Returns the environment of a process with four CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    return os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "NPROC": "4"}


class Two:
    """Both processes; calls run a function in them with JSON arguments and results."""

    def __init__(self):
        coordinator = f"127.0.0.1:{free_port()}"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.two_processes", coordinator, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=pathlib.Path(__file__).parent.parent,
                env=environment(),
            )
            for rank in range(COUNT)
        ]

    def __call__(self, function, **arguments):
        line = json.dumps([function.__module__, function.__name__, arguments])
        for process in self.processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answers = [self._answer(process, line) for process in self.processes]
        for result, failure in answers:
            assert failure is None, failure
            assert result == answers[0][0], "the processes give different answers"
        return answers[0][0]

    def _answer(self, process, line):
        answer = process.stdout.readline()
        assert answer, f"a process died of {line}"
        return json.loads(answer)

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)


def main() -> None:
    coordinator, rank = sys.argv[1], int(sys.argv[2])
    answers = redirect_stdout()
    import jax

    jax.distributed.initialize(coordinator, COUNT, rank)
    serve(COUNT * DEVICES, answers)


if __name__ == "__main__":
    main()
