"""The files that start pool_ray.py on containers and on Kubernetes, read by what reads them there.

Neither docker nor Kubernetes is needed. Where `DEPLOY_SCHEMAS` names a folder with
`compose-spec.json` of compose-spec and `ray.io_rayjobs.yaml` of KubeRay, the files are held against
these schemas too.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pool_ray
import pytest
import yaml
from launching import RECIPES, run_recipe

pytest.importorskip("ray")

import ray
from ray._private.state import actors
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.cluster_utils import Cluster
from ray.scripts.scripts import start

DEPLOY = RECIPES / "deploy"
ROOT = RECIPES.parent
SCHEMAS = os.environ.get("DEPLOY_SCHEMAS")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def documents():
    return list(yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text()))


@pytest.fixture(scope="module")
def ray_job(documents):
    (found,) = (one["spec"] for one in documents if one["kind"] == "RayJob")
    return found


def commands(service):
    """Return the commands of a service, each as a list of words."""
    command = service["command"]
    lines = command.splitlines() if isinstance(command, str) else command[-1].splitlines()
    return [shlex.split(line.removeprefix("exec ")) for line in lines]


def options_of_ray(words):
    """Return the options of `ray start`, as Ray's own command line reads them."""
    assert words[:2] == ["ray", "start"], words
    return start.make_context("start", words[2:]).params


def options_of_recipe(words, monkeypatch):
    """Return the options of pool_ray.py, as its own parser reads them."""
    assert words[0] == "python"
    script = Path(words[1].removeprefix("/app/"))
    assert (ROOT / script).samefile(pool_ray.__file__)
    monkeypatch.setattr(sys, "argv", [str(script), *words[2:]])
    return pool_ray.parsed_arguments()


def test_compose_starts_the_nodes_that_the_recipe_asks_for(services, monkeypatch):
    trainer, worker = services["trainer"], services["worker"]
    head, recipe = commands(trainer)
    (node,) = commands(worker)
    head, node = options_of_ray(head), options_of_ray(node)
    recipe = options_of_recipe(recipe, monkeypatch)
    assert head["head"] is True
    assert head["num_cpus"] == 0
    assert node["address"] == f"trainer:{head['port']}"
    assert node["block"] is True
    assert node["num_cpus"] * worker["deploy"]["replicas"] == recipe.num_workers
    assert recipe.output_dir.is_relative_to("/runs")
    assert "runs:/runs" in trainer["volumes"]
    assert trainer["volumes"] == worker["volumes"]
    assert trainer["networks"] == worker["networks"]
    assert not any("ports" in service for service in services.values())
    assert {service["environment"]["RAY_AUTH_MODE"] for service in services.values()} == {"token"}
    build = trainer["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    dockerfile = (ROOT / build["dockerfile"]).read_text()
    assert all(f"\nARG {name}=" in dockerfile for name in build["args"])


def test_kuberay_starts_the_nodes_that_the_recipe_asks_for(ray_job, documents, monkeypatch):
    recipe = options_of_recipe(shlex.split(ray_job["entrypoint"]), monkeypatch)
    cluster = {"metadata": {"name": "pool", "namespace": "any"}, "spec": ray_job["rayClusterSpec"]}
    nodes = autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)
    head, workers = (nodes["available_node_types"][name] for name in ("headgroup", "workers"))
    assert head["resources"]["CPU"] == 0
    assert workers["min_workers"] == workers["max_workers"]
    assert workers["resources"]["CPU"] * workers["max_workers"] == recipe.num_workers
    assert (
        f"\nray=={ray_job['rayClusterSpec']['rayVersion']}\n"
        in (ROOT / "constraints.txt").read_text()
    )
    (claim,) = (one for one in documents if one["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    groups = [ray_job["rayClusterSpec"]["headGroupSpec"]]
    groups += ray_job["rayClusterSpec"]["workerGroupSpecs"]
    for pod in (group["template"]["spec"] for group in groups):
        (volume,) = pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert recipe.output_dir.is_relative_to(mount["mountPath"])


def closed(schema):
    """Return a schema whose objects refuse names that it does not have, as an API server does."""
    if not isinstance(schema, dict):
        return schema
    closed_parts = {
        key: {name: closed(part) for name, part in value.items()}
        if key == "properties"
        else closed(value)
        for key, value in schema.items()
    }
    is_record = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    return closed_parts | ({"additionalProperties": False} if is_record else {})


@pytest.mark.skipif(SCHEMAS is None, reason="DEPLOY_SCHEMAS names no folder of schemas")
def test_the_files_are_of_the_schemas_of_compose_and_kuberay(documents):
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(SCHEMAS or "")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    valid = jsonschema.Draft7Validator
    valid(json.loads((folder / "compose-spec.json").read_text())).validate(compose)
    definition = yaml.safe_load((folder / "ray.io_rayjobs.yaml").read_text())
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    # Kubernetes' own part of an object.
    schema["properties"]["metadata"] = {"type": "object"}
    (job,) = (one for one in documents if one["kind"] == "RayJob")
    valid(schema).validate(job)
    misspelt = job | {"spec": job["spec"] | {"entrypoints": "x"}}
    assert not valid(schema).is_valid(misspelt)


@pytest.mark.slow
def test_the_recipe_runs_on_a_cluster_of_three_nodes_whose_head_has_no_cpus(tmp_path):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        few = ("--warmup-steps", 2, "--max-steps", 2, "--num-held-out", 8)
        printed = run_recipe(
            "pool_ray", *few, "--output-dir", tmp_path, OMP_NUM_THREADS="1",
            RAY_ADDRESS=cluster.address,
        )  # fmt: skip
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes()}
        used = [actor["Address"]["NodeID"] for actor in actors().values()]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert sorted(nodes.values()) == [0, 1, 1]
    # The pool's two workers, on the two nodes that have a CPU.
    assert sorted(used) == sorted(node for node, num_cpus in nodes.items() if num_cpus)
    last_line = printed.strip().splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy \d+\.\d% -> \d+\.\d%", last_line), printed
