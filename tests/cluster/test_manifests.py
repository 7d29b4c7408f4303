"""The files in deploy/ agree with each other and with forerun. Docker and Kubernetes are not run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from forerun.cli.main import app
from forerun.cluster.plan import make_plan

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def documents(name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text())}


def test_the_kuberay_plan_is_valid_and_agrees_with_its_manifest() -> None:
    found = documents("kuberay.yaml")
    plan = make_plan(tomllib.loads(found["ConfigMap"]["data"]["cluster.toml"]))
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    (workers,), pod = cluster["workerGroupSpecs"], cluster["headGroupSpec"]["template"]
    (model,), (head,) = plan.models, pod["spec"]["containers"]
    assert plan.address == "auto" and plan.settings.host == "0.0.0.0" and model.engine.kv_tokens
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        model.replicas.min,
        model.replicas.max,
    )
    worker = workers["template"]["spec"]["containers"][0]
    assert int(worker["resources"]["limits"]["cpu"]) == model.engine.threads
    mounts = {mount["name"]: mount["mountPath"] for mount in head["volumeMounts"]}
    assert found["RayJob"]["spec"]["entrypoint"] == f"forerun deploy {mounts['plan']}/cluster.toml"
    assert (
        head["ports"][0]["containerPort"]
        == plan.settings.port
        == found["Service"]["spec"]["ports"][0]["targetPort"]
    )
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["Service"]["metadata"]["name"] in plan.settings.allowed_hosts
    assert pod["spec"]["terminationGracePeriodSeconds"] > plan.settings.shutdown_timeout


def test_the_model_server_uses_valid_arguments_of_serve() -> None:
    pod = documents("model-server.yaml")["Deployment"]["spec"]["template"]["spec"]
    words = pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > float(
        words[words.index("--shutdown-timeout") + 1]
    )
    result = CliRunner().invoke(app, [*words, "--port", "70000"])  # an error in this argument only
    assert (
        "70000" in result.output + str(result.exception) and "No such option" not in result.output
    )


def test_the_dockerfile_uses_existing_files_and_extras() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert all((ROOT / name).exists() for name in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.search(r'"(torch\S+)"', text)[1] in project["dependencies"]  # type: ignore[index]
    assert "cluster" in project["optional-dependencies"] and "[cluster]" in text
    command = json.loads(re.search(r"^CMD (\[.*\])$", text, re.M)[1])  # type: ignore[index]
    assert CliRunner().invoke(app, [command[0], "--help"]).exit_code == 0


@pytest.mark.parametrize("name", ["kuberay.yaml", "model-server.yaml"])
def test_pods_run_the_image_that_is_built(name: str) -> None:
    tag = re.search(r"docker build .* -t (\S+) ", (DEPLOY / "Dockerfile").read_text())
    assert tag and set(re.findall(r"image: (\S+)", (DEPLOY / name).read_text())) == {tag[1]}
