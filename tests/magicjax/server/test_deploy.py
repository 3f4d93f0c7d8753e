"""The deployment files: their options, ports, paths and times are those of `magicjax serve`."""

import argparse
import configparser
import json
import pathlib
import re
import shlex
import tomllib

import pytest
import yaml

from magicjax.cli import serve
from magicjax.server import run
from tests.test_layout import CORE

ROOT = pathlib.Path(__file__).parents[3]
DEPLOY = ROOT / "magicjax" / "server" / "deploy"


def parsed(arguments) -> argparse.Namespace:
    """Returns the options of `magicjax serve`; exits if they are wrong."""
    parser = argparse.ArgumentParser()
    serve.add(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile and their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, text.replace("\\\n", " ").splitlines())
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string((DEPLOY / "magicjax.service").read_text().replace("\\\n", " "))
    return parser["Service"]


@pytest.fixture
def manifests() -> dict[str, dict]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {manifest["kind"]: manifest["spec"] for manifest in found}


def is_served(path: str) -> bool:
    return f'Route("{path}"' in (ROOT / "magicjax" / "server" / "app.py").read_text()


def test_the_image_serves_on_the_port_that_it_checks():
    found = dict(instructions())
    entry = json.loads(found["ENTRYPOINT"])
    assert entry[:2] == ["magicjax", "serve"]
    options = parsed(entry[2:] + json.loads(found["CMD"]))
    assert (options.host, options.port) == ("0.0.0.0", int(found["EXPOSE"]))
    url, path = re.search(r"(http://127.0.0.1:\d+)(/\w+)", found["HEALTHCHECK"]).groups()
    assert url.endswith(f":{options.port}") and is_served(path)
    assert all(int(number) > 0 for number in found["USER"].split(":"))


def test_the_image_has_all_packages_and_known_extras():
    copied = [part for name, rest in instructions() if name == "COPY" for part in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied) and {*CORE} <= {*copied}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DEPLOY / "Dockerfile").read_text()
    named = {name for names in re.findall(r"EXTRAS=([\w,]+)", text) for name in names.split(",")}
    assert named == {"serve", "cuda13"} and named <= extras["optional-dependencies"].keys()


def test_the_unit_waits_until_the_server_has_drained():
    service = unit()
    command = shlex.split(service["ExecStart"])
    assert pathlib.Path(command[0]).name == "magicjax" and command[1] == "serve"
    options = parsed(command[2:])
    assert int(service["TimeoutStopSec"]) > options.drain_s + run.FLUSH_S
    assert int(service["RestartPreventExitStatus"]) != run.FAILED


def test_the_pod_has_the_ports_paths_key_and_time_of_the_server(manifests):
    pod = manifests["Deployment"]["template"]["spec"]
    (container,) = pod["containers"]
    image = json.loads(dict(instructions())["ENTRYPOINT"])
    options = parsed(image[2:] + container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == options.port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        check = container[name]["httpGet"]
        assert check["port"] == port["name"] and is_served(check["path"])
    (mapped,) = manifests["Service"]["ports"]
    assert mapped["targetPort"] == port["name"]
    labels = manifests["Deployment"]["template"]["metadata"]["labels"]
    assert manifests["Service"]["selector"] == labels
    assert manifests["Deployment"]["selector"]["matchLabels"] == labels
    assert [one["name"] for one in container["env"]] == [serve.API_KEY]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["terminationGracePeriodSeconds"]
    assert grace > wait + options.drain_s + run.FLUSH_S
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert options.target == mounted["model"]
