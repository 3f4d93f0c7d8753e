"""The files for deployment: options, ports, paths and times are those of the server."""

import argparse
import json
import pathlib
import re
import shlex

import yaml

from magicjax.cli import main
from magicjax.cli.arg_utils import settings_from
from magicjax.cli.serve import API_KEY
from magicjax.server.config import ServerConfig
from magicjax.server.run import FLUSH_S

DEPLOY = pathlib.Path(main.__file__).parent.parent / "server" / "deploy"


def options(words: list[str]) -> argparse.Namespace:
    return main.parser(words).parse_args(words)


def test_the_image_serves_on_its_port():
    text = (DEPLOY / "Dockerfile").read_text()
    entry, command = (
        json.loads(re.search(rf"^{name} (\[.*\])$", text, re.MULTILINE)[1])
        for name in ("ENTRYPOINT", "CMD")
    )
    assert entry[0] == "magicjax"
    arguments = options(entry[1:] + command)
    assert arguments.host == "0.0.0.0" and f"EXPOSE {arguments.port}\n" in text
    assert f"http://127.0.0.1:{arguments.port}/health" in text
    stop_s = int(re.search(r"--stop-timeout (\d+)", (DEPLOY / "README.md").read_text())[1])
    server_config = ServerConfig(**settings_from(arguments, ServerConfig))
    assert stop_s > server_config.drain_s + FLUSH_S


def test_the_service_waits_for_the_drain():
    text = (DEPLOY / "magicjax.service").read_text().replace("\\\n", " ")
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    program, *words = shlex.split(unit["ExecStart"])
    assert program.endswith("/magicjax") and API_KEY in text
    assert int(unit["TimeoutStopSec"]) > options(words).drain_s + FLUSH_S


def test_the_pod_has_probes_and_waits_for_the_drain():
    service, deployment = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = options(["serve", *container["args"]])
    assert arguments.allowed_hosts == ("*",)  # requests have the name of the service
    assert container["env"][0]["name"] == API_KEY
    assert container["ports"] == [{"name": "http", "containerPort": arguments.port}]
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait_s + arguments.drain_s + FLUSH_S
